"""Merges: exact, whatever the LSEs are."""

from __future__ import annotations

import itertools

import pytest
import torch

from flash_cute.distributed.merge import merge_, merge_sink, sink_gradient
from flash_cute.reference import combine

LSES = [-torch.inf, -200.0, -3.0, 0.0, 5.0, 120.0, 700.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merge_of_two(dtype):
    """Gaps of hundreds, and parts that saw no key on either side."""
    pairs = torch.tensor(list(itertools.product(LSES, LSES)), dtype=dtype)
    parts = torch.randn(2, 1, len(pairs), 3, 8, dtype=dtype)
    lses = pairs.T[:, None, None].expand(2, 1, 3, -1).clone()
    parts.masked_fill_((lses == -torch.inf).transpose(-1, -2)[..., None], 0)
    out, lse = parts[0].clone(), lses[0].clone()
    merge_(out, lse, parts[1], lses[1])
    expected, expected_lse = combine(parts, lses.transpose(-1, -2))
    torch.testing.assert_close(out, expected.to(dtype), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse.transpose(-1, -2).to(dtype))
    assert not out.isnan().any() and not lse.isnan().any()


def test_merge_of_many_in_any_order():
    parts = torch.randn(6, 2, 5, 3, 8, dtype=torch.float64)
    lses = torch.randn(6, 2, 3, 5, dtype=torch.float64) * 30
    expected, expected_lse = combine(parts, lses.transpose(-1, -2))
    for order in (range(6), [5, 2, 4, 0, 1, 3]):
        out, lse = torch.zeros_like(parts[0]), torch.full_like(lses[0], -torch.inf)
        for i in order:
            merge_(out, lse, parts[i], lses[i])
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse.transpose(-1, -2))


def test_merging_keeps_rows_without_keys():
    out, lse = torch.zeros(1, 1, 2, 4), torch.full((1, 2, 1), -torch.inf)
    merge_(out, lse, torch.zeros_like(out), lse.clone())
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -torch.inf).all()
    sink = torch.tensor([0.5, -torch.inf])
    out, lse = merge_sink(out, lse, sink)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse.flatten(), sink)


def test_sink_gradient_of_autograd():
    scores = torch.randn(1, 2, 5, 7, dtype=torch.float64)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 7, 2, 4, dtype=torch.float64)
    logits = torch.cat([scores, sink[None, :, None, None].expand(1, 2, 5, 1)], -1)
    out = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1)[..., :-1], v)
    lse, dout = logits.logsumexp(-1), torch.randn(1, 5, 2, 4, dtype=torch.float64)
    dlse = torch.randn_like(lse)
    (out * dout).sum().add((lse * dlse).sum()).backward()
    softmax_d = (out * dout).sum(-1).transpose(1, 2) - dlse
    found = sink_gradient(lse.detach(), softmax_d.detach(), sink.detach())
    torch.testing.assert_close(found, sink.grad.float())
