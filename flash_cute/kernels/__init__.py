"""The CUDA kernels as values: a list of them, the plan of a call, and why other kernels do not run.

Answers come from the code that chooses the kernels of calls (``csrc/core/``), and need only sizes:
no tensor, GPU or CUDA build.
"""

from flash_cute.kernels.calibration import use_calibration
from flash_cute.kernels.configs import KernelConfig, ctas_an_sm, kernels
from flash_cute.kernels.gpus import GPUS, Gpu, gpu
from flash_cute.kernels.plans import (
    MOST_SPLITS,
    KeyOrder,
    Plan,
    Verdict,
    bucket,
    explain,
    nearest,
    only,
    plan,
    why_widened,
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
    "why_widened",
]
