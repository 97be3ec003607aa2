"""The script ``flash-cute``: flash_cute's command line, whose help does not wait for torch.

``import flash_cute`` imports torch, which takes seconds. So the folder ``flash_cute/cli`` is
imported as a package of its own, ``flash_cute_cli``; its commands import flash_cute when they run.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path


def main() -> None:
    """Runs the command that ``sys.argv`` asks for, and exits with its status."""
    package = find_spec("flash_cute")
    assert package is not None and package.submodule_search_locations is not None
    folders = [Path(folder) / "cli" for folder in package.submodule_search_locations]
    folder = next(folder for folder in folders if folder.is_dir())
    spec = spec_from_file_location(
        "flash_cute_cli", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.main()
