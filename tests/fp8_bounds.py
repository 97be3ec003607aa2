"""How far attention of fp8 inputs may be from fp64's, of all numbers of out together."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute.ops import has_fp8_attention

# Numbers of e4m3 are off by at most 2^-4, evenly spread: 2^-4 / 3^.5 in the mean square. Sums over
# keys have no more of it, relative to themselves, if their terms do not cancel.
ROUNDED_WEIGHTS = 2.0**-4 / 3**0.5


def relative(device: str, widened: float, *qkv: Tensor) -> float:
    """``widened``, or more if the ops of e4m3 inputs, which round weights, compute the call."""
    is_e4m3 = all(x.dtype == torch.float8_e4m3fn for x in qkv)
    is_rounded = is_e4m3 and has_fp8_attention(torch.device(device))
    return widened + ROUNDED_WEIGHTS * is_rounded
