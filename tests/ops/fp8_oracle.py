"""Inputs of quantize_fp8, what its values stand for, and their attention in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
QK, V = ["head", "tensor", "row"], ["head", "tensor", "channel"]


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """out and the LSE in fp64, of (batch, seqlen, heads, dim)."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.cpu().double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(
            hidden.triu(scores.shape[-1] - scores.shape[-2] + 1), -torch.inf
        )
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(0.0), v)
    return out, scores.logsumexp(-1)


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


def wide(x: Tensor, descale: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """What values and descales stand for, in fp64, looked up entry by entry."""
    x, descale = x.cpu().double(), descale.cpu().double()
    if descale.shape == (1,):
        return x * descale
    if descale.shape == (*x.shape[:-1], 1):
        return x * descale
    group = x.shape[-2] // descale.shape[1]
    found = x.clone()
    for b in range(len(descale)):
        rows: Any = b if cu_seqlens is None else slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        for head in range(x.shape[-2]):
            found[rows, ..., head, :] *= descale[b, head // group]
    return found
