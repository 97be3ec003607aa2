"""The CUDA kernels as values: which there are, which one a call takes, and why no other.

Everything is computed by the code that calls go through (``csrc/core/``), from sizes alone: no
tensor, no GPU and no CUDA build is needed.
"""

from flash_cute.kernels.calibration import use_calibration
from flash_cute.kernels.plans import (
    GPUS,
    MOST_SPLITS,
    Gpu,
    KernelConfig,
    KeyOrder,
    Plan,
    Verdict,
    bucket,
    ctas_an_sm,
    explain,
    gpu,
    kernels,
    nearest,
    only,
    plan,
)
from flash_cute.kernels.problem import OPS, Problem
from flash_cute.kernels.support import supports

__all__ = [
    "GPUS",
    "MOST_SPLITS",
    "OPS",
    "Gpu",
    "KernelConfig",
    "KeyOrder",
    "Plan",
    "Problem",
    "Verdict",
    "bucket",
    "ctas_an_sm",
    "explain",
    "gpu",
    "kernels",
    "nearest",
    "only",
    "plan",
    "supports",
    "use_calibration",
]
