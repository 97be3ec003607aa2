"""``flash-cute info``, for bug reports: versions, library, GPUs, machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import flash_cute
from flash_cute import kernels
from flash_cute.native import library

# Distributions whose versions matter to calls.
_RELATED_PACKAGES = ("triton", "transformers", "flash-attn", "vllm", "diffusers")


def gather() -> dict[str, Any]:
    """All facts as JSON types. A probe that fails gives ``{"error": reason}`` instead."""
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
    except Exception as error:  # info must report a broken part, not fail on it
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
    """How many kernels the library has, by family."""
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
        "threads": torch.get_num_threads(),
        **{name: _version(name) for name in _RELATED_PACKAGES},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


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
    tools: dict[str, str | None] = {name: shutil.which(name) for name in ("c++", "nvcc", "ncu")}
    tools["driver"] = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        query_result = subprocess.run(query, capture_output=True, text=True, timeout=20)
        tools["driver"] = next(iter(query_result.stdout.split()), None)
    return tools


def _environment() -> dict[str, Any]:
    """The machine, and the variables that flash_cute reads."""
    machine = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
    }
    own = {name: x for name, x in sorted(os.environ.items()) if name.startswith("FLASH_CUTE_")}
    return machine | own


def _cpu() -> str:
    """The CPU's name, and its best instructions for torch."""
    names = Path("/proc/cpuinfo")
    lines = names.read_text().splitlines() if names.is_file() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = found[0] if found else platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def lines(name: str, part: Any) -> list[str]:
    """A part of the facts as text."""
    if name == "kernels" and "all" in part:
        counts = {x: n for x, n in part.items() if x != "all"}
        families = ", ".join(f"{x} {n}" for x, n in counts.items() if n)
        return [f"built: {sum(counts.values())} of {part['all']}", *[families][: bool(families)]]
    if isinstance(part, dict):
        return [f"{x}: {'-' if y is None else y}" for x, y in part.items()] or ["none"]
    return [", ".join(lines(name, x)) for x in part] or ["none"]
