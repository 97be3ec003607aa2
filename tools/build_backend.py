"""Builds the package: scikit-build-core, with requirements that depend on the machine.

pip builds in an isolated environment, without the installed packages. The library only needs the
headers of any torch >= 2.10. They come from the torch of the environment that pip installs into, if
there is one (``cmake/torch.cmake`` looks there first); else torch, which the package requires, is
downloaded for the build. With an nvcc, so are CUTLASS's headers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

from scikit_build_core import build as core
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",  # without it pip compiles everything to read a version
    "prepare_metadata_for_build_wheel",
]

TORCH = "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 10)"
CUTLASS = "import importlib.util as u; assert u.find_spec('cutlass_library')"


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """scikit-build-core's requirements, and torch and CUTLASS if they are missing."""
    return [*core.get_requires_for_build_wheel(config_settings), *_missing()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """As for a wheel."""
    return [*core.get_requires_for_build_editable(config_settings), *_missing()]


def get_requires_for_build_sdist(config_settings: dict[str, Any] | None = None) -> list[str]:
    """scikit-build-core's: nothing is compiled."""
    return core.get_requires_for_build_sdist(config_settings)


def _missing() -> list[str]:
    target = os.environ.get("FLASH_CUTE_BUILD")
    may_build_kernels = target == "cuda" or (target != "cpu" and shutil.which("nvcc") is not None)
    needed = [] if _works(TORCH) else ["torch>=2.10"]
    if may_build_kernels and not os.environ.get("FLASH_CUTE_CUTLASS_DIR") and not _works(CUTLASS):
        needed.append("nvidia-cutlass==4.2.0.0")
    return needed


def _works(program: str) -> bool:
    """Whether a program runs in the environment that pip installs into, which -I selects."""
    run = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True)
    return run.returncode == 0
