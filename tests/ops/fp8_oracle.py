"""Inputs of quantize_fp8, their attention in fp64, and with rounded weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from eight_bits import NUMBERS
from torch import Tensor

from flash_cute.testing.e4m3 import E4M3, Exact, exact, wide

__all__ = [
    "E4M3",
    "LARGEST",
    "QK",
    "Exact",
    "V",
    "attend",
    "error",
    "exact",
    "inputs",
    "nearest",
    "offsets",
    "rounded",
    "wide",
]  # fmt: skip
LARGEST = 448.0
QK, V = ["head", "tensor", "row"], ["head", "tensor", "channel"]


def rounded(expected: Exact) -> Tensor:
    """out as it is if all keys are one tile: relative to the largest score of a row."""
    base = expected.largest().nan_to_num(neginf=0.0)
    p = torch.from_numpy(nearest((expected.scores - base).exp().mul(256).numpy()))
    lse_of_scores = expected.scores.logsumexp(-1)
    of_sink = (expected.lse.exp() - lse_of_scores.exp()).clamp(min=0)
    sink = of_sink * (-base[..., 0]).exp() * 256
    total = p.sum(-1) + sink
    p = p / torch.where(total == 0, 1.0, total)[..., None]
    return torch.einsum("bhij,bjhd->bihd", p, expected.v)


def nearest(x: np.ndarray) -> np.ndarray:
    """Numbers of 0 to 448 to the nearest of e4m3, of two the even one."""
    above = np.searchsorted(NUMBERS, x).clip(1, 126)
    low, high = x - NUMBERS[above - 1], NUMBERS[above] - x
    is_low = (low < high) | ((low == high) & (above % 2 == 1))
    return np.where(is_low, NUMBERS[above - 1], NUMBERS[above])


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """out and the LSE in fp64, of (batch, seqlen, heads, dim)."""
    found = exact(q, k, v, causal)
    return found.out, found.lse


def inputs(
    device: str, dtype: torch.dtype = torch.float32, lead: Any = ((2, 30), (2, 37)), dim: int = 32,
) -> list[Tensor]:  # fmt: skip
    """Heads, rows and channels of unlike sizes."""
    found = []
    for rows, heads in ((lead[0], 4), (lead[1], 2), (lead[1], 2)):
        x = torch.randn(*rows, heads, dim) * torch.randn(heads, 1).exp()
        x = x * torch.randn(*rows, 1, 1).div(2).exp() * torch.randn(dim).div(2).exp()
        found.append(x.to(device, dtype))
    return found


def offsets(device: str, *lengths: int, first: int = 0) -> Tensor:
    return torch.tensor([first, *lengths]).cumsum(0).int().to(device)


def error(out: Tensor, expected: Tensor) -> float:
    return ((out.cpu().double() - expected).norm() / expected.norm()).item()
