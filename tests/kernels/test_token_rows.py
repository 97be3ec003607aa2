"""Hopper's forward whose rows are the query heads of tokens, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_cute import kernels
from flash_cute.native import library
from flash_cute.testing.cases import Case, VarlenCase, make_inputs
from flash_cute.testing.kernels import parse
from flash_cute.testing.kvcache import CacheCase, check, make_cache_inputs
from flash_cute.testing.verify import verify_forward

KERNELS = [id for id in library.kernels() if parse(id).packs_tokens]
CASES = {
    "one token": Case(heads=10, heads_k=2, seqlen_q=1, seqlen_k=700),
    "a causal end": Case(batch=3, heads=10, heads_k=2, seqlen_q=7, seqlen_k=333, is_causal=True),
    "many tiles": Case(heads=12, heads_k=4, seqlen_q=300, seqlen_k=500, is_causal=True),
    "rows that no token has": Case(heads=7, heads_k=1, seqlen_q=40, seqlen_k=129),
    "a whole group a token": Case(heads=128, heads_k=1, seqlen_q=5, seqlen_k=300, is_causal=True),
    "groups of 48": Case(heads=96, heads_k=2, seqlen_q=9, seqlen_k=77),
    "window": Case(heads=16, heads_k=2, seqlen_q=100, seqlen_k=400, window=(70, 33)),
    "queries that see nothing": Case(heads=8, heads_k=2, seqlen_q=300, seqlen_k=90, is_causal=True),
    "sink": Case(heads=6, heads_k=2, seqlen_q=50, seqlen_k=200, is_causal=True, sink=True),
    "varlen": VarlenCase(heads=10, heads_k=2, lengths_q=(64, 0, 1, 333), lengths_k=(64, 17, 1, 200),
                         is_causal=True, sink=True),
    "short documents": VarlenCase(heads=8, heads_k=1, lengths_q=(3, 9, 1, 17) * 8,
                                  lengths_k=(3, 9, 1, 17) * 8, is_causal=True),
    "lengths in use": VarlenCase(heads=6, heads_k=1, lengths_q=(300, 140), lengths_k=(280, 500),
                                 used_q=(211, 140), used_k=(100, 333), rows_before=3, rows_after=5),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_forward(cuda, name, case):
    kernel = parse(name)
    sizes = {"dim": kernel.dim, "dim_v": kernel.dim_v, "dtype": kernel.dtype}
    with library.only(name):
        verify_forward(make_inputs(replace(CASES[case], **sizes), cuda))


@pytest.mark.parametrize("missing", [8, 16, 24])
@pytest.mark.parametrize("name", KERNELS)
def test_head_dims_below_the_tile(cuda, name, missing):
    kernel = parse(name)
    sizes = {"dim": kernel.dim - missing, "dim_v": kernel.dim_v - 8, "dtype": kernel.dtype}
    case = Case(heads=10, heads_k=2, seqlen_q=33, seqlen_k=150, is_causal=True)
    with library.only(name):
        verify_forward(make_inputs(replace(case, **sizes), cuda))


@pytest.mark.parametrize("page_size", [None, 16, 128])
@pytest.mark.parametrize("seqlens_q", [3, (1, 30, 7)], ids=str)
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("name", KERNELS)
def test_over_caches(cuda, name, splits, seqlens_q, page_size):
    kernel = parse(name)
    case = CacheCase(
        lengths=(700, 0, 1333), seqlens_q=seqlens_q, heads=20, heads_k=4, page_size=page_size,
        dim=kernel.dim, dim_v=kernel.dim_v, dtype=kernel.dtype, is_causal=True, sink=True,
    )  # fmt: skip
    with kernels.only(name, num_splits=splits):
        check(make_cache_inputs(case, cuda))


def test_results_do_not_depend_on_memory(cuda):
    """Rows that no token has hold anything."""
    q = torch.randn(1, 3, 7, 128, device=cuda, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 300, 1, 128, device=cuda, dtype=torch.bfloat16).unbind()
    (name,) = (id for id in KERNELS if "bf16" in id and "_d128x" in id)
    with library.only(name):
        expected = torch.ops.flash_cute.fwd(q, k, v)[:2]
        nan = torch.full((1, 128, 7, 128), torch.nan, device=cuda, dtype=torch.bfloat16)
        torch.ops.flash_cute.fwd(nan, k, v)
        for x, y in zip(torch.ops.flash_cute.fwd(q, k, v)[:2], expected, strict=True):
            assert torch.equal(x, y)
