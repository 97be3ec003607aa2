"""The version of a build: flash_cute's, and behind a plus sign what FLASH_CUTE_LOCAL_VERSION says it
was built for, as in 0.1.0+cu130 (PEP 440)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

__all__ = ["dynamic_metadata"]


def dynamic_metadata(field: str, settings: dict[str, Any] | None = None) -> str:
    """scikit-build-core asks for the one field that is dynamic."""
    if field != "version" or settings:
        raise ValueError(f"field {field}, settings {settings}; expected version, without settings")
    source = Path("flash_cute/__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    local = os.environ.get("FLASH_CUTE_LOCAL_VERSION")
    return f"{version}+{local}" if local else version
