"""What ``flash-cute info`` tells: the machine, torch, and the library that is loaded."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

import flash_cute
from flash_cute import kernels, library


def gather() -> dict[str, Any]:
    """Everything as JSON types. A probe that fails leaves ``{"error": reason}`` in its place."""
    probes: dict[str, Callable[[], Any]] = {
        "flash_cute": _package,
        "kernels": _kernels,
        "torch": _torch,
        "gpus": _gpus,
        "tools": _tools,
        "environment": _environment,
    }
    return {name: _guarded(probe) for name, probe in probes.items()}


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # whatever is broken here is what this command is asked about
        return {"error": f"{type(error).__name__}: {error}"}


def _package() -> dict[str, Any]:
    path = library.find()
    return {
        "version": flash_cute.__version__,
        "library": str(path),
        "library_bytes": path.stat().st_size,
        "built_for": "CUDA" if library.has_cuda_kernels() else "the CPU alone",
    }


def _kernels() -> dict[str, int]:
    """How many the library has, by family."""
    counts: dict[str, int] = {"all": len(kernels.kernels())}
    for kernel in kernels.kernels():
        family = f"{kernel.op}_sm{kernel.arch}"
        counts[family] = counts.get(family, 0) + kernel.built
    return counts


def _torch() -> dict[str, Any]:
    return {
        "version": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": _guarded(torch.backends.cudnn.version),
        "triton": _guarded(lambda: version("triton")),
    }


def _gpus() -> list[Any]:
    return [_guarded(partial(_gpu, index)) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    known: dict[str, Any] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }
    if library.has_cuda_kernels():
        gpu = kernels.gpu(index)
        known |= {"smem_bytes_a_cta": gpu.smem_optin, "memory_gb_s": gpu.memory_gb_s}
    return known


def _tools() -> dict[str, str | None]:
    tools: dict[str, str | None] = {name: shutil.which(name) for name in ("nvcc", "ncu")}
    tools["driver"] = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, timeout=20)
        tools["driver"] = next(iter(asked.stdout.split()), None)
    return tools


def _environment() -> dict[str, str]:
    return {name: x for name, x in sorted(os.environ.items()) if name.startswith("FLASH_CUTE_")}
