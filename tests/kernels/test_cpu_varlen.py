"""The CPU ops on packed and paged sequences: bad indices, unused rows and unused pages."""

from __future__ import annotations

from typing import Any

import cpu_calls
import pytest
import torch
from cpu_oracle import (
    assert_forward,
    assert_gradients,
    oracle_gradients,
    qkv,
    randn,
)
from torch import Tensor

from flash_cute import reference
from flash_cute.cpu import tiles

NO_KEYS = -torch.inf


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 8 queries and 16 keys, so that short sequences cross their borders."""
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 8)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 16)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


PACKED: dict[str, dict[str, Any]] = {
    "plain": {"cu_seqlens_q": ints(0, 10, 11, 30), "cu_seqlens_k": ints(0, 17, 17, 40)},
    "gaps": {"cu_seqlens_q": ints(3, 10, 11, 25), "cu_seqlens_k": ints(5, 17, 20, 33)},
    "seqused": {
        "cu_seqlens_q": ints(0, 10, 11, 30),
        "cu_seqlens_k": ints(0, 17, 17, 40),
        "seqused_q": ints(4, 9, -3),
        "seqused_k": ints(11, 0, 50),
    },
    "max_too_small": {
        "cu_seqlens_q": ints(0, 10, 11, 30),
        "cu_seqlens_k": ints(0, 17, 17, 40),
        "max_seqlen_q": 7,
        "max_seqlen_k": 9,
    },
    "beyond_total": {
        "cu_seqlens_q": ints(0, 10, 20, 99),
        "cu_seqlens_k": ints(0, 2, 41, 2**31 - 1),
    },
    "negative": {"cu_seqlens_q": ints(-5, 10, 20, 30), "cu_seqlens_k": ints(-(2**31), 2, 20, 40)},
    "decreasing": {"cu_seqlens_q": ints(0, 20, 10, 30), "cu_seqlens_k": ints(0, 30, 12, 40)},
    "all_empty": {"cu_seqlens_q": ints(0, 0, 0, 0), "cu_seqlens_k": ints(0, 0, 0, 0)},
    "no_sequence": {"cu_seqlens_q": ints(0), "cu_seqlens_k": ints(0)},
}
RICH = {
    "is_causal": True,
    "alibi_slopes": torch.rand(3, 4, generator=torch.Generator().manual_seed(0)),
    "sink": randn(4, seed=6),
    "dropout_p": 0.3,
    "rng": torch.tensor([77, 3]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("name", PACKED)
def test_packed(name, options, dtype):
    packed = {"max_seqlen_q": 30, "max_seqlen_k": 40, **PACKED[name]}
    q, k, v = (x[0] for x in qkv(1, 30, 40, heads=4, dtype=dtype))
    exact = reference.attention_varlen(q, k, v, **packed, **options)
    weighted = reference.attention_varlen(q, k, v.abs(), **packed, **options).out
    results = cpu_calls.varlen_fwd(
        q, k, v, **packed, **options, return_softmax=True, return_row_max=True
    )
    assert_forward(results, exact, weighted)

    out, lse = results[:2]
    dout, dlse = randn(*out.shape, dtype=dtype, seed=4), randn(*lse.shape, seed=5)
    *gradients, _, softmax_d = cpu_calls.varlen_bwd(
        dout, q, k, v, out, lse, **packed, dlse=dlse, **options
    )
    if name == "decreasing":  # overlapping sequences have results, but no gradients worth a name
        return

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> reference.Attention:
        return reference.attention_varlen(q, k, v, **packed, **options)

    expected = oracle_gradients(attention, (q, k, v), options, dout, dlse)
    assert_gradients((*gradients,), expected[:3], dtype)
    outside = lse == NO_KEYS
    if options:
        assert not softmax_d[outside].any()
    assert not gradients[0][outside.T].any()


def test_packed_sequences_equal_dense_ones():
    q, k, v = (x[0] for x in qkv(1, 30, 40))
    packed = {"cu_seqlens_q": ints(0, 13, 30), "cu_seqlens_k": ints(0, 17, 40)}
    out, lse, *_ = cpu_calls.varlen_fwd(q, k, v, **packed, max_seqlen_q=17, max_seqlen_k=23)
    for rows, keys in ((slice(0, 13), slice(0, 17)), (slice(13, 30), slice(17, 40))):
        alone, alone_lse, *_ = cpu_calls.fwd(q[None, rows], k[None, keys], v[None, keys])
        assert torch.equal(out[rows], alone[0]) and torch.equal(lse[:, rows], alone_lse[0])


def test_rows_of_no_sequence_change_nothing():
    tensors = [x[0] for x in qkv(1, 30, 40)]
    tensors.append(randn(30, 2, 8, seed=4))
    packed = {
        "cu_seqlens_q": ints(2, 13, 28),
        "cu_seqlens_k": ints(3, 20, 38),
        "max_seqlen_q": 15,
        "max_seqlen_k": 18,
        "seqused_q": ints(10, 15),
        "seqused_k": ints(12, 18),
        "sink": randn(2, seed=6),
    }
    unused = (
        [*range(2), 12, *range(28, 30)],
        [*range(3), *range(15, 20), *range(38, 40)],
    )
    results = []
    for value in (0.0, torch.nan, torch.inf):
        q, k, v, dout = (x.clone() for x in tensors)
        q[unused[0]], dout[unused[0]], k[unused[1]], v[unused[1]] = value, value, value, value
        out, lse, *_ = cpu_calls.varlen_fwd(q, k, v, **packed)
        results.append((out, lse, *cpu_calls.varlen_bwd(dout, q, k, v, out, lse, **packed)))
    for poisoned in results[1:]:
        for clean, other in zip(results[0], poisoned, strict=True):
            assert torch.equal(clean, other)
    out, lse, dq, dk, dv, *_ = results[0]
    assert not any(x[unused[0]].any() for x in (out, dq))
    assert not any(x[unused[1]].any() for x in (dk, dv))
    assert (lse[:, unused[0]] == NO_KEYS).all()


@pytest.mark.parametrize("seqused_k", [None, ints(7, 200, 0)], ids=["cu_seqlens", "seqused"])
def test_paged(seqused_k):
    q = randn(20, 4, 8, seed=1)
    cache_k, cache_v = randn(9, 4, 2, 8, seed=2), randn(9, 4, 2, 6, seed=3)
    table = ints(*(4, 0, -1, 7), *(9, 2, 3, 1), *(2**31 - 1, -(2**31), 5, 6)).view(3, 4)
    packed = {
        "cu_seqlens_q": ints(0, 9, 12, 20),
        "cu_seqlens_k": ints(0, 14, 31, 38),
        "max_seqlen_q": 9,
        "max_seqlen_k": 100,
        "seqused_k": seqused_k,
        "block_table": table,
    }
    exact = reference.attention_varlen(q, cache_k, cache_v, **packed, **RICH)
    weighted = reference.attention_varlen(q, cache_k, cache_v.abs(), **packed, **RICH).out
    asked = {"return_softmax": True, "return_row_max": True}
    results = cpu_calls.varlen_fwd(q, cache_k, cache_v, **packed, **RICH, **asked)
    assert_forward(results, exact, weighted)

    used = torch.zeros(9, 4, dtype=torch.bool)
    lengths = (14, 16, 7) if seqused_k is None else (7, 16, 0)
    for pages, length in zip(table.tolist(), lengths, strict=True):
        for position in range(length):
            if 0 <= pages[position // 4] < 9:
                used[pages[position // 4], position % 4] = True
    for cache in (cache_k, cache_v):
        cache[~used] = torch.nan
    poisoned = cpu_calls.varlen_fwd(q, cache_k, cache_v, **packed, **RICH, **asked)
    for clean, other in zip(results, poisoned, strict=True):
        assert torch.equal(clean, other)


def test_paged_cache_without_blocks():
    q, cache = randn(3, 2, 8), torch.empty(0, 4, 2, 8)
    lengths = {"cu_seqlens_q": ints(0, 3), "cu_seqlens_k": ints(0, 5)}
    table = ints(0, 1).view(1, 2)
    out, lse, *_ = cpu_calls.varlen_fwd(
        q, cache, cache, **lengths, max_seqlen_q=3, max_seqlen_k=5, block_table=table
    )
    assert not out.any()
    torch.testing.assert_close(lse, torch.full((2, 3), 5.0).log())
