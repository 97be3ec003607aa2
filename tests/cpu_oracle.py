"""What the tests of the CPU ops share: inputs, and comparisons with the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import reference
from flash_cute.cpu import tiles

ULP = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-20,
    torch.float64: 2.0**-48,
}
"""Unit of the error bounds: the rounding of half types, a few roundings of the others."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch, seqlen_q, seqlen_k, heads=2, heads_k=2, dim=8, dim_v=8, dtype=torch.float32):
    return (
        randn(batch, seqlen_q, heads, dim, dtype=dtype, seed=1),
        randn(batch, seqlen_k, heads_k, dim, dtype=dtype, seed=2),
        randn(batch, seqlen_k, heads_k, dim_v, dtype=dtype, seed=3),
    )


def assert_bounded(out: Tensor, exact: Tensor, weighted: Tensor) -> None:
    """|out - exact| <= u|exact| + 2u weighted + half a subnormal; weighted is P|V| in fp64."""
    u, tiny = ULP[out.dtype], torch.finfo(out.dtype).smallest_normal
    assert ((out - exact).abs() <= u * (exact.abs() + 2 * weighted + tiny)).all()


def assert_forward(results: tuple[Tensor, ...], exact: reference.Attention, weighted: Tensor):
    """out by the bound, statistics to fp32 (fp64), softmax to half a unit in q's dtype."""
    out, lse, row_max, softmax = results
    assert_bounded(out, exact.out, weighted)
    assert lse.dtype == row_max.dtype == tiles.compute_dtype(out) and softmax.dtype == out.dtype
    close = ULP[lse.dtype] * 4
    torch.testing.assert_close(lse.double(), exact.softmax_lse, rtol=close, atol=close)
    torch.testing.assert_close(row_max.double(), exact.row_max, rtol=close, atol=close)
    u = max(ULP[out.dtype], 16 * ULP[lse.dtype])
    torch.testing.assert_close(softmax.double(), exact.softmax, rtol=u, atol=2**-24)


def assert_gradients(results: tuple[Tensor, ...], exact: tuple[Tensor, ...], dtype: torch.dtype):
    """Relative to the largest gradient of each tensor: eight units of ``dtype``."""
    for result, expected in zip(results, exact, strict=True):
        assert result.shape == expected.shape
        if expected.numel():
            error = (result.double() - expected).abs().amax()
            assert error <= 8 * ULP[dtype] * expected.abs().amax() + 1e-30


def oracle_gradients(attention: Any, tensors: Any, options: dict[str, Any], dout, dlse):
    """(dq, dk, dv, dsink) by autograd through the oracle; a lse of -inf takes no gradient."""
    leaves = [x.double().requires_grad_() for x in tensors]
    if options.get("sink") is not None:
        leaves.append(options["sink"].double().requires_grad_())
        options = options | {"sink": leaves[3]}
    result = attention(*leaves[:3], **options)
    lse = result.softmax_lse.masked_fill(result.softmax_lse == -torch.inf, 0)
    loss = (result.out * dout.double()).sum() + (lse * dlse.double()).sum()
    loss = loss + 0 * sum(x.sum() for x in leaves)  # also without any sequence
    return torch.autograd.grad(loss, leaves)
