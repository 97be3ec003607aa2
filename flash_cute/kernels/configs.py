"""Kernels as values: the rows of ``csrc/kernels/*/rows.def``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import torch

from flash_cute.kernels.gpus import Gpu


@dataclass(frozen=True)
class KernelConfig:
    """One kernel, a row of ``csrc/kernels/*/rows.def``. Sizes are those of its tiles."""

    id: str
    op: str  # "fwd", "bwd", or "decode": forward over a key/value cache
    arch: int  # 80 runs on sm_80 and newer GPUs, 90 only on Hopper
    dtype: str  # "fp16", "bf16", "e4m3", "tf32", or "tf32x3": fp32 in three products of TF32
    tier: str  # "rich" has softcap, ALiBi, dropout and scales below 0
    head_dim: int  # the largest that it supports
    head_dim_v: int
    block_m: int  # query rows a tile
    block_n: int  # key rows a tile
    stages: int
    warps: int
    threads: int
    ctas: int  # CTAs per SM that the launch bounds ask for
    cluster: int
    smem_bytes: int  # of a CTA
    # Key tiles that it visits: consecutive ("interval"), of a "list", or consecutive for rows that
    # are all heads of a group for each of some "tokens".
    tiles: str = "interval"
    cache: str | None = None  # dtype of K and V; for decode it may be "e4m3" or "int8"
    built: bool = True  # whether the loaded library has it

    @property
    def most_registers(self) -> int:
        """Registers of a thread by the launch bounds; Hopper's warps redistribute them later."""
        return min(255, 65_536 // (self.threads * self.ctas) // 8 * 8)


@cache
def kernels() -> tuple[KernelConfig, ...]:
    """Every row of ``csrc/kernels/*/rows.def``, whether the loaded library has it or not.

    Example::

        from flash_cute import kernels
        print([kernel.id for kernel in kernels.kernels() if kernel.block_m == 192])
    """
    rows = json.loads(torch.ops.flash_cute.describe_kernels())
    return tuple(KernelConfig(**row) for row in rows)


def ctas_an_sm(kernel: KernelConfig, gpu: Gpu) -> int:
    """CTAs of a kernel that an SM holds at once by its launch bounds and shared memory; 0 if none
    fits, or the GPU has another arch.

    Example::

        from flash_cute import kernels
        print(kernels.ctas_an_sm(kernels.kernels()[0], kernels.GPUS["h100"]))
    """
    kept = 1024  # bytes that an SM keeps for itself of each CTA
    runs = gpu.capability == 90 if kernel.arch == 90 else gpu.capability >= kernel.arch
    return min(kernel.ctas, (gpu.smem_optin + kept) // (kernel.smem_bytes + kept)) if runs else 0
