"""The oracle's bound of scores in tensor cores, beside an emulated accumulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_cute.testing.e4m3 import E4M3, errors_of_scores

BITS = 13  # behind the first of the largest addend


def cut(x: Tensor, largest: Tensor) -> Tensor:
    unit = 2.0 ** (largest.clamp(min=1e-30).log2().floor() - BITS)
    return (x / unit).trunc() * unit


def accumulated(q: Tensor, k: Tensor) -> Tensor:
    """Products of rows as an accumulator adds them: 32 and the sum so far at a time, each cut
    off."""
    sums = q.new_zeros(len(q), len(k))
    for a, b in zip(q.split(32, -1), k.split(32, -1), strict=True):
        addends = torch.cat((a[:, None] * b, sums[..., None]), -1)
        sums = cut(addends, addends.abs().amax(-1, keepdim=True)).sum(-1)
        sums = cut(sums, sums.abs())
    return sums


@pytest.mark.parametrize("dim", [16, 64, 183, 256])
@pytest.mark.parametrize("kind", ["random", "of one sign", "outliers", "the same"])
def test_scores_are_within_their_bound(dim, kind):
    q, k = torch.randn(2, 100, dim)
    if kind == "of one sign":
        q, k = q.abs(), k.abs()
    if kind == "outliers":
        q = q * torch.randn(dim).exp().square()
    if kind == "the same":
        k = q
    q, k = (x.clamp(-448, 448).to(E4M3).double() for x in (q, k))
    off = (accumulated(q, k) - q @ k.T).abs()
    bound = errors_of_scores(q[None, :, None], k[None, :, None])[0, 0]
    assert (off <= bound).all()
    assert (off > bound / 50).any()  # it is no bound that nothing reaches
