"""Sparse calls over caches: every format, layout of pages and mask, beside fp64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sparse.masks import mask_of
from torch import Tensor

import flash_cute
from flash_cute import Sparse
from flash_cute.functional import sparse_kvcache

CLOSE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


def sparse_of(draw: random.Random, batch: int, heads: tuple[int, int], queries: int, keys: int):
    """Any format, on the CPU."""
    kind = draw.choice(["blocks", "topk", "topk", "map", "intervals"])
    lists = (draw.choice([1, batch]), draw.choice([1, *heads]))
    if kind == "topk":
        size = draw.choice([1, 16, 32, 64, 128, 128])
        k = draw.randint(1, 4)
        indices = torch.randint(-1, -(-keys // size) + 1, (*lists, queries, k))
        return Sparse.topk(indices, size, layout="bhsk", seqlen_k=keys)
    if kind == "intervals":
        first = torch.randint(0, keys, (*lists, queries), dtype=torch.int32)
        return Sparse.intervals(first, first + draw.randint(1, 100), seqlen_k=keys)
    block = (draw.choice([64, 128]), draw.choice([64, 128, 256]))
    blocks = torch.rand(*lists, -(-queries // block[0]), -(-keys // block[1])) < 0.5
    if kind == "map":
        return Sparse.from_block_map(blocks, block, seqlens=(queries, keys))
    counts = blocks.sum(-1).int()
    index = (~blocks).int().argsort(-1).int()[..., : max(1, int(counts.max()))]
    return Sparse.blocks(index, counts, block=block, seqlens=(queries, keys))


def expected_of(
    q: Tensor, keys: tuple[Tensor, Tensor], mask: Tensor, options: dict[str, Any], leftpad: int
) -> tuple[Tensor, Tensor]:
    """fp64 of one sequence: q (queries, heads, dim), keys (keys, heads_k, dim), and mask (heads,
    queries, keys)."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in keys)
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * options["softmax_scale"]
    if options["softcap"]:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    left, right = options["window_size"]
    seen = mask & (j >= leftpad)
    if options["causal"]:
        seen = seen & (j <= i)
    elif right >= 0:
        seen = seen & (j <= i + right)
    if left >= 0:
        seen = seen & (j >= i - left)
    scores = scores.masked_fill(~seen, -torch.inf)
    logits = torch.cat((scores, torch.full((*scores.shape[:2], 1), -torch.inf).double()), -1)
    if options["learnable_sink"] is not None:
        logits[..., -1] = options["learnable_sink"].double()[:, None]
    lse = logits.logsumexp(-1)
    p = (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()[..., :-1]
    return torch.einsum("hij,jhd->ihd", p, v), lse


@pytest.mark.parametrize("seed", range(120))
def test_is_attention_of_the_keys_that_are_visible(device, seed):
    draw = random.Random(f"{seed} {torch.initial_seed()}")
    dtype = torch.bfloat16 if device == "cuda" else draw.choice(list(CLOSE))
    batch, heads_k = draw.randint(1, 3), draw.choice([1, 2])
    heads, dim, dim_v = heads_k * draw.choice([1, 3]), draw.choice([32, 64]), draw.choice([32, 64])
    queries = draw.choice([1, 1, 2, 5, 140])
    page = draw.choice([0, 1, 16, 64, 128, 100, 256])
    columns = draw.randint(1, max(1, 600 // page)) if page else 1
    capacity = page * columns if page else draw.choice([64, 130, 384, 500])
    new = draw.choice([0, 0, 1, 3]) if capacity > 3 else 0
    used = [draw.randint(0, capacity - new) for _ in range(batch)]
    options: dict[str, Any] = {
        "softmax_scale": dim**-0.5, "causal": draw.random() < 0.5, "softcap": draw.choice([0, 3.0]),
        "window_size": draw.choice([(-1, -1), (-1, -1), (40, -1), (100, 7), (-1, 3)]),
        "learnable_sink": draw.choice([None, torch.randn(heads)]),
    }  # fmt: skip
    table = index = None
    if page:
        table = torch.randperm(batch * columns + 2)[: batch * columns].view(batch, columns).int()
        shape = (batch * columns + 2, page, heads_k)
    else:
        index = draw.choice([None, torch.randperm(batch + 2)[:batch].int()])
        shape = (batch + 2, capacity, heads_k)
    if draw.random() < 0.3:  # heads first in memory
        by_head = (shape[0], heads_k, shape[1])
        k_cache, v_cache = (
            torch.randn(*by_head, d).to(dtype).transpose(1, 2) for d in (dim, dim_v)
        )
    else:
        k_cache, v_cache = (torch.randn(*shape, d).to(dtype) for d in (dim, dim_v))
    leftpad = [draw.randint(0, n) for n in used] if draw.random() < 0.3 else None
    packed = draw.random() < 0.3
    counts = [draw.randint(0, queries) if packed else queries for _ in range(batch)]
    rows = sum(counts) + (2 if packed else 0)
    q = torch.randn(rows, heads, dim).to(dtype)
    k, v = (torch.randn(batch, new, heads_k, d).to(dtype) for d in (dim, dim_v))
    sparse = sparse_of(draw, batch, (heads_k, heads), queries, capacity)
    mask = mask_of(sparse).expand(batch, -1, -1, -1)
    mask = mask.repeat_interleave(heads // mask.shape[1], 1)

    def ints(x: list[int] | None) -> Tensor | None:
        return None if x is None else torch.tensor(x, dtype=torch.int32, device=device)

    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    given = options | {"learnable_sink": there(options["learnable_sink"])}
    if packed:
        offsets = [sum(counts[:i]) for i in range(batch + 1)]
        given |= {"cu_seqlens_q": ints(offsets), "max_seqlen_q": queries}
    caches = (there(k_cache.clone()), there(v_cache.clone()))
    on_device = Sparse(
        there(sparse.tile_lists), there(sparse.tile_bits), sparse.seqlen_q, sparse.seqlen_k,
        sparse.format, granularity=sparse.granularity,
    )  # fmt: skip
    out, lse = flash_cute.flash_attn_with_kvcache(
        there(q if packed else q.view(batch, queries, heads, dim)), *caches,
        *((there(k), there(v)) if new else ()), cache_seqlens=ints(used),
        cache_batch_idx=there(index), cache_leftpad=ints(leftpad), block_table=there(table),
        return_softmax_lse=True, sparse=on_device, **given,
    )  # fmt: skip
    out, lse = out.cpu().double(), lse.cpu().double()
    begin = 0
    for b, count in enumerate(counts):
        if page:
            keys = [x[table[b].long()].flatten(0, 1).clone() for x in (k_cache, v_cache)]
        else:
            keys = [x[b if index is None else index[b]].clone() for x in (k_cache, v_cache)]
        for x, joining in zip(keys, (k, v), strict=True):
            x[used[b] : used[b] + new] = joining[b]
        length = used[b] + new
        own = q[begin : begin + count]
        expected, expected_lse = expected_of(
            own, (keys[0][:length], keys[1][:length]), mask[b, :, :count, :length], options,
            0 if leftpad is None else leftpad[b],
        )  # fmt: skip
        got = out[begin : begin + count] if packed else out[b]
        got_lse = lse[:, begin : begin + count] if packed else lse[b]
        torch.testing.assert_close(got, expected, **CLOSE[dtype])
        torch.testing.assert_close(got_lse, expected_lse, atol=1e-3, rtol=1e-4)
        begin += count
    if packed:
        assert not out[begin:].any()


def test_keys_that_no_query_sees_are_not_read(device):
    """Whatever lies there."""
    dtype = torch.bfloat16
    q = torch.randn(2, 1, 4, 64, device=device, dtype=dtype)
    k_cache, v_cache = torch.randn(2, 2, 1024, 2, 64, device=device, dtype=dtype)
    indices = torch.tensor([[[[0, 5]], [[3, 3]]]] * 2, device=device)  # of both kv heads
    sparse = Sparse.topk(indices, 128, layout="bhsk", seqlen_k=1024)
    arguments = {"cache_seqlens": 1000, "sparse": sparse}
    expected = flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    for head, blocks in ((0, (1, 2, 3, 4, 6, 7)), (1, (0, 1, 2, 4, 5, 6, 7))):
        for block in blocks:
            k_cache[:, 128 * block : 128 * block + 128, head] = torch.nan
            v_cache[:, 128 * block : 128 * block + 128, head] = torch.inf
    found = flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    assert torch.equal(found, expected) and expected.isfinite().all()


def test_large_calls_go_in_parts(device, monkeypatch):
    q = torch.randn(2, 9, 4, 64, device=device, dtype=torch.bfloat16)
    k_cache, v_cache = torch.randn(2, 2, 256, 2, 64, device=device, dtype=torch.bfloat16)
    sparse = Sparse.topk(torch.randint(0, 4, (2, 9, 2, 2), device=device), 64, seqlen_k=256)
    arguments = {"causal": True, "sparse": sparse, "return_softmax_lse": True}
    expected = flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    monkeypatch.setattr(sparse_kvcache, "_PAGES_AT_ONCE", 40)
    found = flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right, atol=1e-2, rtol=1e-2)


class TestRefusals:
    @pytest.fixture
    def call(self):
        q = torch.randn(2, 1, 4, 8)
        k_cache, v_cache = torch.randn(2, 2, 256, 2, 8)
        sparse = Sparse.topk(torch.zeros(2, 1, 2, 1, dtype=torch.int32), 64, seqlen_k=256)
        return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "sparse": sparse}

    @pytest.mark.parametrize(
        ("wrong", "error", "words"),
        [
            ({"sparse": "topk"}, TypeError, "sparse is 'topk'|sparse is str"),
            ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes and sparse"),
            ({"q": torch.randn(2, 2, 4, 8)}, ValueError, "sparse is for 1 queries"),
            ({"q": torch.randn(1, 1, 4, 8)}, ValueError, "sparse is for a batch of 2"),
            ({"v_cache": torch.randn(2, 2, 256, 8).transpose(1, 2)}, ValueError, "one layout"),
        ],
    )
    def test_what_does_not_fit(self, call, wrong, error, words):
        with pytest.raises(error, match=words):
            flash_cute.flash_attn_with_kvcache(**call | wrong)

    def test_a_refused_call_appends_nothing(self, call):
        k = torch.ones(2, 1, 2, 8)
        before = call["k_cache"].clone()
        wrong = {"k": k, "v": k, "cache_seqlens": 3, "alibi_slopes": torch.ones(4)}
        with pytest.raises(NotImplementedError):
            flash_cute.flash_attn_with_kvcache(**call | wrong)
        wrong = {"k": k, "v": k, "cache_seqlens": 3, "sparse": "none"}
        with pytest.raises(TypeError):
            flash_cute.flash_attn_with_kvcache(**call | wrong)
        wrong = {"k": k, "v": k.transpose(1, 2).contiguous().transpose(1, 2), "cache_seqlens": 3}
        wrong["v_cache"] = call["v_cache"].transpose(1, 2).contiguous().transpose(1, 2)
        with pytest.raises(ValueError, match="one layout"):
            flash_cute.flash_attn_with_kvcache(**call | wrong)
        assert torch.equal(call["k_cache"], before)


def test_in_a_graph():
    q = torch.randn(2, 1, 4, 8)
    k_cache, v_cache = torch.randn(2, 2, 256, 2, 8)
    sparse = Sparse.topk(torch.tensor([0, 2, 3, 3]).view(2, 1, 2, 1), 64, seqlen_k=256)

    def decode(q, lengths):
        return flash_cute.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, sparse=sparse
        )

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for lengths in ([200, 256], [10, 200]):
        lengths = torch.tensor(lengths, dtype=torch.int32)
        torch.testing.assert_close(compiled(q, lengths), decode(q, lengths))


def test_offsets_that_end_in_zeros(device):
    """As those of a batch that is padded; rows of no sequence see nothing, nor the sink."""
    q = torch.randn(5, 4, 64, device=device, dtype=torch.bfloat16)
    k_cache, v_cache = torch.randn(2, 4, 256, 2, 64, device=device, dtype=torch.bfloat16)
    sparse = Sparse.topk(torch.randint(0, 4, (4, 2, 2, 2), device=device), 64, seqlen_k=256)
    offsets = torch.tensor([0, 1, 3, 0, 0], dtype=torch.int32, device=device)
    arguments = {
        "cu_seqlens_q": offsets, "max_seqlen_q": 2, "learnable_sink": torch.randn(4, device=device),
        "return_softmax_lse": True, "sparse": sparse,
    }  # fmt: skip
    out, lse = flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    mask = mask_of(Sparse(sparse.tile_lists.cpu(), sparse.tile_bits.cpu(), 2, 256, "topk"))
    options = {
        "softmax_scale": 64**-0.5, "causal": False, "softcap": 0, "window_size": (-1, -1),
        "learnable_sink": arguments["learnable_sink"].cpu(),
    }  # fmt: skip
    for b, rows in enumerate((slice(0, 1), slice(1, 3))):
        keys = k_cache[b].cpu(), v_cache[b].cpu()
        seen = mask[b, :, : rows.stop - rows.start].repeat_interleave(2, 0)
        expected, expected_lse = expected_of(q[rows].cpu(), keys, seen, options, 0)
        torch.testing.assert_close(out[rows].cpu().double(), expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[:, rows].cpu().double(), expected_lse, atol=1e-3, rtol=1e-4)
    assert not out[3:].any() and (lse[:, 3:] == -torch.inf).all()


@pytest.mark.parametrize("heads_first", [False, True])
def test_pages_that_do_not_exist_are_zeros(device, heads_first):
    """As for calls without lists, whatever lies beside the cache."""
    shape = (1, 2, 64, 64) if heads_first else (1, 64, 2, 64)
    k_cache, v_cache = torch.randn(2, *shape, device=device, dtype=torch.bfloat16)
    if heads_first:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    q = torch.randn(3, 1, 4, 64, device=device, dtype=torch.bfloat16)
    table = torch.tensor([[0, -1], [1, 0], [-5, 99]], dtype=torch.int32, device=device)
    every = torch.arange(2, device=device).expand(3, 1, 2, 2)
    sparse = Sparse.topk(every, 64, seqlen_k=128)
    found, expected = (
        flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, block_table=table, sparse=x)
        for x in (sparse, None)
    )
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


def test_padding_ends_before_what_joins(device):
    """However much of it there is said to be."""
    q, new = torch.randn(2, 1, 1, 2, 64, device=device, dtype=torch.bfloat16)
    k_cache, v_cache = torch.randn(2, 1, 128, 2, 64, device=device, dtype=torch.bfloat16)
    lengths, leftpad = (torch.tensor([n], dtype=torch.int32, device=device) for n in (7, 99))
    every = torch.zeros(1, 1, 2, 1, dtype=torch.int32, device=device)
    arguments = {"cache_seqlens": lengths, "cache_leftpad": leftpad, "causal": True}
    found, expected = (
        flash_cute.flash_attn_with_kvcache(
            q, k_cache.clone(), v_cache.clone(), new, new, sparse=x, **arguments
        )
        for x in (Sparse.topk(every, seqlen_k=128), None)
    )
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found, new, atol=1e-2, rtol=1e-2)


def test_no_sequences_and_no_keys(device):
    q = torch.randn(3, 4, 64, device=device, dtype=torch.bfloat16)
    cache = torch.randn(2, 128, 2, 64, device=device, dtype=torch.bfloat16)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    sparse = Sparse.topk(torch.zeros(0, 1, 2, 1, device=device).int(), seqlen_k=128)
    out = flash_cute.flash_attn_with_kvcache(
        q, cache, cache, cu_seqlens_q=none, max_seqlen_q=1, sparse=sparse
    )
    assert out.shape == q.shape and not out.any()
    empty = cache[:, :0]
    sparse = Sparse.topk(torch.zeros(2, 1, 2, 1, device=device).int(), seqlen_k=0)
    out = flash_cute.flash_attn_with_kvcache(q[:2, None], empty, empty, sparse=sparse)
    assert not out.any()
