"""Arguments of the ops that torch's global switches decide."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals


def allow_tf32(x: Tensor) -> bool:
    """Whether products of ``x`` may be rounded to TF32: fp32 on CUDA where torch's own may be."""
    return x.dtype == torch.float32 and x.is_cuda and _matmuls_in_tf32()


@internals.constant_in_graphs  # torch.compile guards torch's switch in any case
def _matmuls_in_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def deterministic(requested: bool) -> bool:
    """Whether backward must be bitwise repeatable: by the call, or by torch's global switch."""
    return requested or torch.are_deterministic_algorithms_enabled()
