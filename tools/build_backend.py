"""Builds the package: scikit-build-core, and what a build on this machine needs besides.

pip builds in an environment of its own, without what is installed. torch is never asked for there:
its headers are those of the torch in the environment that pip installs into, and where there is
none, copies in ``third_party/torch`` (``cmake/torch.cmake``). Where there is an nvcc, CUTLASS's
headers are needed too.
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

CUTLASS = "import importlib.util as u; assert u.find_spec('cutlass_library')"


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """scikit-build-core's requirements, and CUTLASS's headers for a build with nvcc."""
    return [*core.get_requires_for_build_wheel(config_settings), *_missing()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """The same."""
    return [*core.get_requires_for_build_editable(config_settings), *_missing()]


def get_requires_for_build_sdist(config_settings: dict[str, Any] | None = None) -> list[str]:
    """scikit-build-core's: nothing is compiled."""
    return core.get_requires_for_build_sdist(config_settings)


def _missing() -> list[str]:
    asked = os.environ.get("FLASH_CUTE_BUILD")
    may_build_kernels = asked == "cuda" or (asked != "cpu" and shutil.which("nvcc") is not None)
    has_headers = bool(os.environ.get("FLASH_CUTE_CUTLASS_DIR")) or _works(CUTLASS)
    return ["nvidia-cutlass==4.2.0.0"] if may_build_kernels and not has_headers else []


def _works(program: str) -> bool:
    """Whether a program runs in the environment that is installed into, which -I shows."""
    run = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True)
    return run.returncode == 0
