"""The command ``flash-cute``, or ``python -m flash_cute``: see, explain, time, profile kernels.

It needs the extra ``cli`` (typer and rich). docs/cli.md has an output of each command. Modules here
import one another by relative names, and flash_cute inside of their functions, so that help is
fast: the script ``flash-cute`` imports this folder without the package around it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

_NEEDED = ("typer", "rich")


def main() -> None:
    """Runs the command in ``sys.argv``, and exits with its status."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"flash-cute needs {' and '.join(missing)}: pip install 'flash-cute[cli]'")
    from .app import app

    app()
