"""Builds the package: scikit-build-core, with requirements that depend on the machine.

pip builds in an isolated environment, without the installed packages. The library only needs the
headers of any torch >= 2.10. They come from the torch of the environment that pip installs into, if
there is one (``cmake/torch.cmake`` looks there first). Else pip downloads torch's wheel, which it
keeps and installs later, and the headers are taken out of it. If that fails, torch is a requirement
of the build, which installs it a second time, with all of CUDA. CUTLASS's headers are downloaded if
kernels may be built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
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

HEADERS = Path(__file__).resolve().parents[1] / "build" / "torch"  # the path in cmake/torch.cmake
TORCH = """from importlib.metadata import version
assert tuple(map(int, version('torch').split('.')[:2])) >= (2, 10)"""
CUTLASS = "import importlib.util as u; assert u.find_spec('cutlass_library')"


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """scikit-build-core's requirements, and torch and CUTLASS if they are missing."""
    return [*core.get_requires_for_build_wheel(config_settings), *_missing()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """As for a wheel."""
    return [*core.get_requires_for_build_editable(config_settings), *_missing()]


def get_requires_for_build_sdist(config_settings: dict[str, Any] | None = None) -> list[str]:
    """scikit-build-core's requirements alone: nothing is compiled."""
    return core.get_requires_for_build_sdist(config_settings)


def _missing() -> list[str]:
    needed = [] if _works(TORCH) or _extract_headers() else ["torch>=2.10"]
    if _builds_kernels() and not os.environ.get("FLASH_CUTE_CUTLASS_DIR") and not _works(CUTLASS):
        needed.append("nvidia-cutlass==4.2.0.0")
    return needed


def _builds_kernels() -> bool:
    """Whether cmake/targets.cmake may decide to build the CUDA kernels on this machine."""
    asked = os.environ.get("FLASH_CUTE_BUILD")
    if asked or shutil.which("nvcc") is None:
        return asked == "cuda"
    return bool(os.environ.get("FLASH_CUTE_CUDA_ARCHS")) or shutil.which("nvidia-smi") is not None


def _extract_headers() -> bool:
    """Downloads torch's wheel; extracts headers and the library to link. False if that fails."""
    shutil.rmtree(HEADERS, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-I", "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        if subprocess.run([*pip, "--only-binary=torch", "torch>=2.10"]).returncode != 0:
            return False
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            kept = ("torch/include/", "torch/lib/libtorch.so")
            wheel.extractall(HEADERS.parent, [x for x in wheel.namelist() if x.startswith(kept)])
    return (HEADERS / "lib" / "libtorch.so").is_file()


def _works(program: str) -> bool:
    """Whether a program runs in the environment that pip installs into, which -I selects."""
    run = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True)
    return run.returncode == 0
