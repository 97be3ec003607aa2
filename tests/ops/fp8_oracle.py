"""Inputs of quantize_fp8, what its values stand for, their attention in fp64, and how far attention
may be from it whose weights are rounded to e4m3."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from eight_bits import NUMBERS
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
QK, V = ["head", "tensor", "row"], ["head", "tensor", "channel"]


class Exact(NamedTuple):
    """Attention in fp64 of (batch, seqlen, heads, dim)."""

    out: Tensor
    lse: Tensor  # (batch, heads, seqlen_q)
    scores: Tensor  # (batch, heads, seqlen_q, seqlen_k), -inf where hidden
    v: Tensor  # of each query head
    sizes: Tensor  # (batch, heads, seqlen_q), the largest sum of |q| |k| that a row sees, scaled

    def weights(self) -> Tensor:
        return (self.scores - self.lse[..., None]).exp().nan_to_num(0.0)

    def largest(self) -> Tensor:
        """Of each row; -inf if it sees no key."""
        none = self.scores.new_full((*self.scores.shape[:-1], 1), -torch.inf)
        return torch.cat((self.scores, none), -1).amax(-1, keepdim=True)

    def bound(self, dtype: torch.dtype = torch.bfloat16, losses: int | None = None) -> Tensor:
        """Of each number of out, how far it may be off if weights p, at most 1 relative to the
        largest so far, are rounded as 2^8 p to e4m3, and divided by their sum; out to ``dtype``.

        Rounding changes p by 2^-4 of it, or where e4m3 is subnormal by 2^-10 / 2^8. What the sum
        of errors times v does to out is the sum of errors times v - out. ``losses``: of tensor
        cores, how many products an accumulator adds: each may lose 2^-13 of the sum.
        """
        seen, largest = ~self.scores.isneginf(), self.largest()
        least = 2.0**-18 * (largest - self.lse[..., None]).exp()
        relative = 2.0**-4 if losses is None else 2.0**-4 + self.score_error()[..., None]
        errors = torch.where(seen, relative * self.weights() + least, 0.0).nan_to_num(0.0)
        heads = zip(errors.unbind(1), self.v.unbind(2), self.out.unbind(2), strict=True)
        spreads = [(e[..., None] * (v[:, None] - o[:, :, None]).abs()).sum(2) for e, v, o in heads]
        lost = errors.sum(-1).transpose(1, 2)[..., None].clamp(max=0.9)
        unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        of_sums = 0.0
        if losses is not None:
            sums = torch.einsum("bhij,bjhd->bihd", self.weights(), self.v.abs())
            of_sums = 2.0**-13 * losses * (sums + self.out.abs())
        return (
            torch.stack(spreads, 2) / (1 - lost) * (1 + unit)
            + unit * self.out.abs()
            + of_sums
            + 1e-5
        )

    def score_error(self) -> Tensor:
        """(batch, heads, seqlen_q): how far sums of products of q and k may be off in tensor cores,
        whose accumulators keep about 14 bits of the largest number."""
        return 2.0**-12 * self.sizes

    def rounded(self) -> Tensor:
        """out as it is if all keys are one tile: relative to the largest score of a row."""
        base = self.largest().nan_to_num(neginf=0.0)
        p = torch.from_numpy(nearest((self.scores - base).exp().mul(256).numpy()))
        lse_of_scores = self.scores.logsumexp(-1)
        sink = (self.lse.exp() - lse_of_scores.exp()).clamp(min=0) * (-base[..., 0]).exp() * 256
        total = p.sum(-1) + sink
        p = p / torch.where(total == 0, 1.0, total)[..., None]
        return torch.einsum("bhij,bjhd->bihd", p, self.v)


def nearest(x: np.ndarray) -> np.ndarray:
    """Numbers of 0 to 448 to the nearest of e4m3, of two the even one."""
    above = np.searchsorted(NUMBERS, x).clip(1, 126)
    low, high = x - NUMBERS[above - 1], NUMBERS[above] - x
    is_low = (low < high) | ((low == high) & (above % 2 == 1))
    return np.where(is_low, NUMBERS[above - 1], NUMBERS[above])


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    sink: Tensor | None = None,
) -> Exact:
    """Attention of (batch, seqlen, heads, dim) in fp64, masks aligned to the bottom right."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.cpu().double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
    ahead = ahead - (k.shape[1] - q.shape[1])  # of the key, how far behind the diagonal it lies
    left, right = window
    right = 0 if causal else right
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.cpu().double()[None, :, None].expand_as(lse))
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    sizes = torch.einsum("bihd,bjhd->bhij", q.abs(), k.abs())
    sizes = sizes * abs(q.shape[-1] ** -0.5 if scale is None else scale)
    none = scores.new_zeros((*scores.shape[:-1], 1))
    sizes = torch.cat((sizes.masked_fill(hidden, 0), none), -1).amax(-1)
    return Exact(torch.einsum("bhij,bjhd->bihd", weights, v), lse, scores, v, sizes)


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
