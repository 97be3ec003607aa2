"""GPUs as values: known ones by name, and those of this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from flash_cute.call import validate
from flash_cute.native.library import has_cuda_kernels


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that plans depend on; ``smem_optin`` is the largest shared memory of
    a CTA in bytes.

    Raises:
        TypeError, ValueError: a number is not an int >= 1, or the name not a str.
    """

    name: str
    capability: int  # 10 * major + minor
    smem_optin: int
    sms: int
    memory_gb_s: int
    l2_bytes: int  # of its L2 cache

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name is {validate.kind_of(self.name)}; expected a str")
        for name in ("capability", "smem_optin", "sms", "memory_gb_s", "l2_bytes"):
            validate.count(name, getattr(self, name), 1)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80, 166_912, 108, 2039, 40 << 20),
        Gpu("a10", 86, 101_376, 72, 600, 6 << 20),
        Gpu("l40s", 89, 101_376, 142, 864, 96 << 20),
        Gpu("h100", 90, 232_448, 132, 3352, 50 << 20),
        Gpu("h200", 90, 232_448, 132, 4917, 60 << 20),
    )
}


def gpu(index: int | None = None) -> Gpu:
    """A GPU of this machine; None is the current one.

    Raises:
        TypeError, ValueError: ``index`` is not an int >= 0.
        RuntimeError: there is none, or this build has no CUDA.

    Example::

        from flash_cute import kernels
        print(kernels.gpu())
    """
    if index is not None:
        validate.count("index", index)
    if not has_cuda_kernels():
        raise RuntimeError("this build of flash_cute has no CUDA, and cannot query a GPU")
    index = torch.cuda.current_device() if index is None else index
    facts = json.loads(torch.ops.flash_cute.describe_gpu(index))
    return Gpu(torch.cuda.get_device_name(index), **facts)


def as_gpu(gpu: Gpu | str | int) -> Gpu:
    """The GPU, or the one of a name in :data:`GPUS`; ValueError for anything else."""
    found = GPUS.get(gpu) if isinstance(gpu, str) else gpu
    if not isinstance(found, Gpu):
        raise ValueError(f"gpu is {gpu!r}; expected one of {list(GPUS)}, or a Gpu")
    return found
