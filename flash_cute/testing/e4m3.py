"""Attention of e4m3 inputs in fp64, and how far the ops, which round weights, may be from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
_MOST_NUMBERS = 2**22  # of what a bound holds at once


class Exact(NamedTuple):
    """Attention in fp64 of (batch, seqlen, heads, dim)."""

    out: Tensor
    lse: Tensor  # (batch, heads, seqlen_q)
    scores: Tensor  # (batch, heads, seqlen_q, seqlen_k), -inf where hidden
    v: Tensor  # of each query head
    score_errors: Tensor  # (batch, heads, seqlen_q): how far tensor cores' scores may be off

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
        relative = 2.0**-4 if losses is None else 2.0**-4 + self.score_errors[..., None]
        errors = torch.where(seen, relative * self.weights() + least, 0.0).nan_to_num(0.0)
        heads = zip(errors.unbind(1), self.v.unbind(2), self.out.unbind(2), strict=True)
        spreads = [_spread(*head) for head in heads]
        lost = errors.sum(-1).transpose(1, 2)[..., None].clamp(max=0.9)
        unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        of_sums: Tensor | float = 0.0
        if losses is not None:
            sums = torch.einsum("bhij,bjhd->bihd", self.weights(), self.v.abs())
            of_sums = 2.0**-13 * losses * (sums + self.out.abs())
        return (
            torch.stack(spreads, 2) / (1 - lost) * (1 + unit)
            + unit * self.out.abs()
            + of_sums
            + 1e-5
        )


def errors_of_scores(q: Tensor, k: Tensor) -> Tensor:
    """(batch, heads, seqlen_q, seqlen_k): how far products of q and k may be off in tensor cores.

    These add 32 products and the sum so far at a time, and cut each off at 2^-13 of the largest,
    towards zero, by half of that on average. Cuts of one sign add up; those of both signs cancel
    but for 4, more than twice the standard deviation.
    """
    sums = errors = torch.zeros((), dtype=q.dtype, device=q.device)
    for a, b in zip(q.split(32, -1), k.split(32, -1), strict=True):
        before, sums = sums, sums + torch.einsum("bihd,bjhd->bhij", a, b)
        products = torch.einsum("bih,bjh->bhij", a.abs().amax(-1), b.abs().amax(-1))
        largest = products.maximum(before.abs()).maximum(sums.abs())
        signs = torch.einsum("bihd,bjhd->bhij", a.sign(), b.sign()) + before.sign()
        errors = errors + 2.0**-13 * largest * (signs.abs() / 2 + 4)
    return errors


def _spread(errors: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """Sums of errors (batch, seqlen_q, seqlen_k) times |v - out|, some rows at a time."""
    rows = max(1, _MOST_NUMBERS // max(1, v.numel()))
    parts = zip(errors.split(rows, 1), out.split(rows, 1), strict=True)
    found = [(e[..., None] * (v[:, None] - o[:, :, None]).abs()).sum(2) for e, o in parts]
    return torch.cat(found, 1)


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    sink: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Exact:
    """Attention of (batch, seqlen, heads, dim) in fp64, masks aligned to the bottom right."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.to(device).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    ahead = torch.arange(k.shape[1], device=device)
    ahead = ahead - torch.arange(q.shape[1], device=device)[:, None]
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
        lse = torch.logaddexp(lse, sink.to(device).double()[None, :, None].expand_as(lse))
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    errors = errors_of_scores(q, k) * abs(q.shape[-1] ** -0.5 if scale is None else scale)
    none = scores.new_zeros((*scores.shape[:-1], 1))
    errors = torch.cat((errors.masked_fill(hidden, 0), none), -1).amax(-1)
    return Exact(torch.einsum("bhij,bjhd->bihd", weights, v), lse, scores, v, errors)


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
        rows = b if cu_seqlens is None else slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        for head in range(x.shape[-2]):
            found[rows, ..., head, :] *= descale[b, head // group]
    return found


def meant(x: Tensor, descale: Tensor | None) -> Tensor:
    """What (batch, seqlen, heads, dim) and a descale of the op stand for, in fp64."""
    if descale is None:
        return x.double()
    return wide(x, descale[..., None] if tuple(descale.shape) == tuple(x.shape[:3]) else descale)


def check(
    out: Tensor,
    lse: Tensor,
    expected: Exact,
    dtype: torch.dtype = torch.bfloat16,
    two_level: bool = True,
) -> float:
    """Asserts that results are within what rounding weights may change, and on CUDA the
    accumulators of tensor cores.

    Returns:
        The largest error, as a fraction of its bound.
    """
    assert out.dtype == dtype and lse.dtype == torch.float32
    losses = None
    if out.is_cuda:  # in two levels sums are of 128 keys
        losses = min(128, expected.scores.shape[-1]) if two_level else expected.scores.shape[-1]
    there, bound = expected.out.device, expected.bound(dtype, losses)
    off = (out.to(there).double() - expected.out).abs()
    assert (off <= bound).all(), f"out: up to {(off / bound).max()} times the bound"
    within = 1e-5 * (1 + expected.lse.abs()) + (expected.score_errors if out.is_cuda else 0.0)
    equal, lse_off = lse.to(there) == expected.lse, (lse.to(there) - expected.lse).abs()
    assert (equal | (lse_off <= within)).all(), f"softmax_lse: off by {lse_off.max()}"
    ratios = torch.cat(((off / bound).flatten(), (lse_off / within)[~equal].flatten()))
    return ratios.max().item() if ratios.numel() else 0.0
