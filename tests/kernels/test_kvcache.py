"""Attention over a key/value cache: appends, pages, rotary embedding, splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvcache_calls import check_order, check_same

from flash_cute.native import library
from flash_cute.testing import bounds
from flash_cute.testing.kernels import decode_kernels, parse
from flash_cute.testing.kvcache import CacheCase, check, make_cache_inputs
from flash_cute.testing.pairwise import pairwise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
LONG = {"lengths": (257, 0, 1000, 64, 1), "heads": 8, "heads_k": 2, "dim": 128, "dtype": BF16}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 80, 96, 192, 256, 59, 1])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 1), (48, 2)], ids=str)
def test_one_query(make_cache, dtype, dim, heads):
    case = CacheCase(
        lengths=(33, 0, 130, 700), heads=heads[0], heads_k=heads[1], dim=dim, dtype=dtype
    )
    check(make_cache(case))


FACTORS = {
    "dtype": DTYPES,
    "heads": [(4, 4), (8, 2), (20, 1)],
    "dim": [(64, 64), (128, 128), (128, 64), (40, 56), (192, 128), (256, 256), (59, 111)],
    "seqlens_q": [1, 3, 70, (1, 0, 5, 33)],
    "seqlens_new": [0, 1, 3, (1, 0, 5, 33)],
    "page_size": [None, 1, 16, 100, 256],
    "band": [{}, {"is_causal": True}, {"window": (40, 0)}, {"window": (7, 9)}, {"window": (40, -1)},
             {"window": (-1, 9)}],
    "rules": [{}, {"softcap": 5.0}, {"alibi": "batch"}, {"sink": True},
              {"softcap": 20.0, "alibi": "heads", "sink": True, "softmax_scale": -0.1}],
    "rotary": ["", "interleaved", "halves"],
    "leftpad": [False, True],
    "batch_idx": [False, True],
    "packed_cache": [False, True],
    "rotary_seqlens": [False, True],
    "splits": [{}, {"num_splits": 1}, {"num_splits": 5}, {"split_size": 128}],
}  # fmt: skip


def excluded(pair: Any) -> bool:
    names = pair.keys()
    if names == {"batch_idx", "page_size"}:
        return pair["batch_idx"] and pair["page_size"] is not None
    if names == {"rotary", "seqlens_new"}:
        return pair["rotary"] != "" and pair["seqlens_new"] == 0
    if names == {"rotary_seqlens", "seqlens_new"}:
        return pair["rotary_seqlens"] and pair["seqlens_new"] == 0
    if names == {"rotary_seqlens", "rotary"}:
        return pair["rotary_seqlens"] and pair["rotary"] == ""
    return False


@pytest.mark.parametrize("row", pairwise(FACTORS, excluded), ids=str)
def test_pairs(make_cache, row):
    """Every pair of features meets."""
    row = dict(row)
    (heads, heads_k), (dim, dim_v) = row.pop("heads"), row.pop("dim")
    sizes = {"heads": heads, "heads_k": heads_k, "dim": dim, "dim_v": dim_v}
    merged = row.pop("band") | row.pop("rules") | row.pop("splits")
    check(make_cache(CacheCase(lengths=(33, 0, 130, 301), **sizes, **merged, **row)))


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16, 64, 133])
@pytest.mark.parametrize("band", [{}, {"is_causal": True}, {"window": (100, 0)}], ids=str)
def test_splits(make_cache, splits, band):
    check(make_cache(CacheCase(**LONG, **band, seqlens_q=2, num_splits=splits)))


def chunks_of_prompts(dim: int, seqlens_q: Any, new: bool, **options: Any) -> CacheCase:
    """Queries so long that a GPU may take them for an ordinary forward."""
    sizes = {"lengths": (257, 0, 700, 64, 1), "capacity": 900, "heads": 8, "heads_k": 2, "dim": dim}
    joining = {"seqlens_new": seqlens_q, "rotary": "halves"} if new else {}
    return CacheCase(**sizes, dtype=BF16, seqlens_q=seqlens_q, **joining, **options)


CHUNKS = [(64, (300, 0, 129, 1, 64)), (128, 300)]
CHUNK_RULES = [{}, {"is_causal": True}, {"window": (100, 0), "sink": True}]


@pytest.mark.parametrize(("dim", "seqlens_q"), CHUNKS, ids=str)
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("rules", CHUNK_RULES, ids=str)
def test_chunks_of_prompts(make_cache, dim, seqlens_q, new, rules):
    check(make_cache(chunks_of_prompts(dim, seqlens_q, new, **rules)))


PAGES = [{"batch_idx": True}, *({"page_size": size} for size in (1, 16, 48, 100, 256))]


@pytest.mark.parametrize(("dim", "seqlens_q"), CHUNKS, ids=str)
@pytest.mark.parametrize("rules", [*CHUNK_RULES, {"softcap": 9.0, "alibi": "batch"}], ids=str)
@pytest.mark.parametrize("pages", PAGES, ids=str)
def test_chunks_of_prompts_in_pages(cuda, dim, seqlens_q, rules, pages):
    for new in (False, True):
        case = chunks_of_prompts(dim, seqlens_q, new, packed_cache=new, **rules, **pages)
        check(make_cache_inputs(case, cuda))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlens_q", [40, (64, 200), 20, (30, 7)], ids=str)
def test_short_chunks_of_long_sequences(cuda, seqlens_q, page_size):
    """So few tiles of queries that their keys are cut into parts."""
    sizes = {"lengths": (5000, 3333), "heads": 8, "heads_k": 2, "dim": 128, "dtype": BF16}
    rules = {"is_causal": True, "sink": True}
    check(
        make_cache_inputs(
            CacheCase(**sizes, seqlens_q=seqlens_q, page_size=page_size, **rules), cuda
        )
    )


@pytest.mark.parametrize("size", [1, 64, 200, 10**6])
def test_split_sizes(make_cache, size):
    check(make_cache(CacheCase(**LONG, sink=True, split_size=size)))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("seqlens_q", [1, 20, 70])
@pytest.mark.parametrize("splits", [{}, {"num_splits": 1}, {"num_splits": 3}], ids=str)
def test_sink_that_outweighs_all_keys(make_cache, dim, seqlens_q, splits):
    """The keys' share, e^-90, is less than the smallest normal fp32; outputs are not."""
    sizes = {"lengths": (300, 40, 0, 2000), "heads": 8, "heads_k": 2, "dim": dim, "dtype": BF16}
    inputs = make_cache(CacheCase(**sizes, seqlens_q=seqlens_q, sink=True, **splits))
    loud = inputs.changed(
        sink=torch.full_like(inputs["sink"], 95.0), v_cache=inputs["v_cache"] * 10000
    )
    out, _ = check(loud)
    assert (out[[0, 1, 3]] != 0).double().mean() > 0.9


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("splits", [{"split_size": 256}, {"num_splits": 1}], ids=str)
def test_batch_invariance(make_cache, splits, page_size):
    """A sequence's result has the same bits alone and among others, in any order."""
    lengths = tuple(37 * i % 3000 for i in range(1, 40))
    sizes = {"heads": 8, "heads_k": 2, "dim": 64, "dtype": BF16}
    inputs = make_cache(CacheCase(lengths=lengths, page_size=page_size, **sizes, **splits))
    out, lse = inputs.fresh().run()
    for order in ([5], [38, 3], list(range(38, -1, -1))):
        places = {
            name: None if inputs[name] is None else inputs[name][order].contiguous()
            for name in ("q", "cache_seqlens", "block_table")
        }
        if page_size is None:
            places["cache_batch_idx"] = order
        part_out, part_lse = inputs.changed(**places).fresh().run()
        bounds.check_same_bits("out", part_out, out[order])
        bounds.check_same_bits("softmax_lse", part_lse, lse[order])


@pytest.mark.parametrize("dim", [64, 128])
def test_batch_invariance_among_many(cuda, dim):
    """So many sequences that, if the caller did not say how keys are parted, others would have
    another kernel than one alone."""
    sizes = {"heads": 32, "heads_k": 32, "dim": dim, "dtype": BF16}
    inputs = make_cache_inputs(CacheCase(lengths=(600,) * 70, **sizes, split_size=256), cuda)
    out, lse = inputs.fresh().run()
    alone = {"q": inputs["q"][5:6], "cache_seqlens": [600], "cache_batch_idx": [5]}
    part_out, part_lse = inputs.changed(**alone).fresh().run()
    bounds.check_same_bits("out", part_out, out[5:6])
    bounds.check_same_bits("softmax_lse", part_lse, lse[5:6])


def test_every_share_of_a_long_row(make_cache):
    """One sequence cut into as many parts as there are multiprocessors, and a little more."""
    for length in (128 * 264, 128 * 264 + 1, 4000):
        case = CacheCase(lengths=(length,), heads=2, heads_k=1, dim=64, dtype=BF16)
        check(make_cache(case))


@pytest.mark.parametrize("seqlens_q", [3, 300])
def test_queries_are_rotated_without_new_rows(make_cache, seqlens_q):
    sizes = {"lengths": (400, 0, 333), "capacity": 500, "heads": 8, "heads_k": 2, "dim": 64}
    rules = {"seqlens_q": seqlens_q, "rotary": "halves", "is_causal": True, "dtype": BF16}
    inputs = make_cache(CacheCase(**sizes, **rules))
    no_rows = inputs["q"].new_empty(3, 0, 2, 64)
    check(inputs.changed(k=no_rows, v=no_rows))


@pytest.mark.parametrize(
    ("dim", "dim_v", "rotary_dim"),
    [(128, 128, 128), (128, 64, 48), (96, 96, 96), (96, 96, 12), (40, 56, 32), (64, 64, 2)],
)
@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
@pytest.mark.parametrize("aligned", [True, False])
def test_rows_that_join(make_cache, dim, dim_v, rotary_dim, rotary, aligned):
    """Vectors of new rows, and of angles, in all sizes; they may start on any boundary."""
    sizes = {"heads": 6, "heads_k": 3, "dim": dim, "dim_v": dim_v, "dtype": BF16}
    rows = {"lengths": (33, 0, 130), "seqlens_q": 2, "seqlens_new": 5, "page_size": 16}
    case = CacheCase(**sizes, **rows, rotary=rotary, rotary_dim=rotary_dim, is_causal=True)
    inputs = make_cache(case)
    if not aligned:
        names = ("q", "k", "v", "rotary_cos", "rotary_sin")
        inputs = inputs.changed(**{name: off_boundary(inputs[name]) for name in names})
    check(inputs)


def off_boundary(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, contiguous, starting one element after a 16-byte boundary."""
    moved = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    assert moved.data_ptr() % 16 != 0
    return moved


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 100, 256])
def test_pages_of_a_long_part(make_cache, dim, page_size):
    sizes = {"lengths": (9001, 4500), "heads": 4, "heads_k": 2, "dim": dim, "dtype": BF16}
    check(make_cache(CacheCase(**sizes, page_size=page_size, num_splits=1)))


def test_many_short_sequences(make_cache):
    lengths = tuple(i % 5 for i in range(1500))
    check(make_cache(CacheCase(lengths=lengths, heads=2, dim=64, page_size=2, dtype=BF16)))


def test_no_sequence(make_cache):
    inputs = make_cache(CacheCase(lengths=(), dim=64, dtype=BF16, capacity=5))
    out, lse = inputs.run()
    assert out.shape == (0, 1, 2, 64) and lse.shape == (0, 2, 1)


def test_lengths_are_whole_without_cache_seqlens(make_cache):
    inputs = make_cache(CacheCase(lengths=(70, 70), capacity=70, dim=64, dtype=BF16))
    check_same(inputs.changed(cache_seqlens=None), inputs)


def test_append_to_a_full_cache_drops_what_does_not_fit(make_cache):
    sizes = {"lengths": (60, 64, 30), "capacity": 64, "dim": 64, "dtype": BF16}
    check(make_cache(CacheCase(**sizes, seqlens_q=10, seqlens_new=10, is_causal=True)))
    check(make_cache(CacheCase(**sizes, seqlens_q=10, seqlens_new=10, page_size=16)))


@pytest.mark.parametrize("name", decode_kernels())
@pytest.mark.parametrize("seqlens_q", [1, 70])
def test_kernel(cuda, name, seqlens_q):
    """Every kernel, also those that this GPU or problem would not choose."""
    kernel = parse(name)
    case = CacheCase(
        lengths=(700, 3, 90), seqlens_q=seqlens_q, seqlens_new=seqlens_q, page_size=16, heads=8,
        heads_k=2, dim=kernel.dim, dim_v=kernel.dim_v, dtype=kernel.dtype, is_causal=True,
        softcap=20.0, alibi="batch", sink=True,
    )  # fmt: skip
    with library.only(name):
        check(make_cache_inputs(case, cuda))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("name", decode_kernels())
def test_tiles_that_a_short_sequence_does_not_have(cuda, name, page_size):
    """Nothing is written for them: their rows are those of the next sequences, or of none."""
    kernel = parse(name)
    case = CacheCase(
        lengths=(40, 90, 17, 3), seqlens_q=(1, 70, 0, 5), page_size=page_size, heads=8, heads_k=2,
        dim=kernel.dim, dim_v=kernel.dim_v, dtype=kernel.dtype, is_causal=True,
    )  # fmt: skip
    with library.only(name):
        for _ in range(5):
            check(make_cache_inputs(case, cuda))


CLUSTERED = [k for k in decode_kernels() if k.startswith("decode_sm90")]


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlens_new", [0, (3, 1, 0, 2)], ids=str)
@pytest.mark.parametrize("name", CLUSTERED)
def test_several_clusters_of_a_work_tile(cuda, name, seqlens_new, page_size):
    """More than a short sequence has keys for, and than a packed one has queries for."""
    kernel = parse(name)
    case = CacheCase(
        lengths=(9000, 0, 65, 2300), seqlens_q=(1, 2, 0, 3), seqlens_new=seqlens_new, heads=5,
        heads_k=1, dim=kernel.dim, dim_v=kernel.dim_v, dtype=kernel.dtype, is_causal=True,
        page_size=page_size, sink=True,
    )  # fmt: skip
    with library.only(name):
        for _ in range(3):
            check(make_cache_inputs(case, cuda))


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize(
    ("heads_k", "keys", "dim", "bytes_of_cta"),
    [(2, 33_008, 64, 9e6), (8, 17_008, 128, 16e6), (3, 12_000, 128, 9e6), (4, 1024, 64, 4.3e6)],
)
@pytest.mark.parametrize("page_size", [None, 16])
def test_many_keys(cuda, heads_k, keys, dim, bytes_of_cta, page_size):
    """So many, in sequences known to be alike, that CTAs which come late take some of them, or that
    each sequence's head has one."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB")
    sms = torch.cuda.get_device_properties(cuda).multi_processor_count
    batch = -(-int(bytes_of_cta * sms) // (keys * heads_k * dim * 4))
    case = CacheCase(
        lengths=(16,), heads=4 * heads_k, heads_k=heads_k, dim=dim, dtype=BF16, page_size=page_size
    )
    torch.manual_seed(5)
    k, v = torch.randn(2, batch, keys, heads_k, dim, dtype=BF16, device=cuda)
    changes = {"q": torch.randn(batch, 1, 4 * heads_k, dim, dtype=BF16, device=cuda)}
    if page_size is not None:
        k, v = (x.view(-1, page_size, heads_k, dim) for x in (k, v))
        table = torch.randperm(len(k), device=cuda).int().view(batch, -1)
        changes["block_table"] = table
    inputs = make_cache_inputs(case, cuda)
    check(inputs.changed(cache_seqlens=None, k_cache=k, v_cache=v, **changes))


@pytest.mark.xdist_group("memory")
def test_more_elements_than_int32_counts(cuda):
    """Pages that start after 2^31 elements."""
    pages, page_size = 2**31 // (16 * 8 * 128) + 50, 16
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GB")
    cache = torch.full((2, pages, page_size, 8, 128), float("nan"), dtype=BF16, device=cuda)
    inputs = make_cache_inputs(
        CacheCase(lengths=(200, 77), page_size=16, heads=16, heads_k=8, dim=128, dtype=BF16), cuda
    )
    far = pages - 1 - inputs["block_table"]
    for name, whole in zip(("k_cache", "v_cache"), cache, strict=True):
        whole[far.flatten().long()] = inputs[name][inputs["block_table"].flatten().long()]
    moved = inputs.changed(k_cache=cache[0], v_cache=cache[1], block_table=far)
    for a, b in zip(moved.run(), inputs.run(), strict=True):
        bounds.check_same_bits("out", a, b)


@pytest.mark.parametrize("splits", [{}, {"num_splits": 4}, {"split_size": 512}], ids=str)
def test_graph_replays_follow_the_lengths(cuda, splits):
    """One capture, then 1000 steps of decoding with other lengths and pages, as in eager."""
    case = CacheCase(
        lengths=(900, 5, 300, 0), seqlens_q=1, seqlens_new=1, page_size=16, capacity=1200,
        rotary="halves", heads=8, heads_k=2, dim=128, dtype=BF16, **splits,
    )  # fmt: skip
    inputs = make_cache_inputs(case, cuda)
    positions = torch.rand(2, 1300, 16, device=cuda).to(BF16)
    inputs = inputs.changed(rotary_cos=positions[0], rotary_sin=positions[1]).fresh()
    eager = inputs.fresh()
    eager.run()  # what is made once a device, outside of the capture
    eager = inputs.fresh()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = inputs.run()
    generator = torch.Generator().manual_seed(1)
    for step in range(1000):
        order = torch.randperm(inputs["block_table"].numel(), generator=generator)
        lengths = torch.randint(0, 1199, (4,), generator=generator, dtype=torch.int32)
        for each in (inputs, eager):
            each["cache_seqlens"].copy_(lengths)
            if step % 10 == 0:
                each["block_table"].copy_(order.view_as(each["block_table"]))
        graph.replay()
        for name, a, b in zip(("out", "softmax_lse"), (out, lse), eager.run(), strict=True):
            bounds.check_same_bits(name, a, b)
    bounds.check_same_bits("k_cache", inputs["k_cache"], eager["k_cache"])


@pytest.mark.parametrize("splits", [{}, {"num_splits": 4}, {"split_size": 512}], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["lengths", "whole"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_calls_wait_for_the_previous_kernel(cuda, page_size, given, splits):
    """Kernels start while the one before ends: that which wrote their queries, keys, lengths or
    pages."""
    batch = 48 if page_size else 4  # pages are looked at early where CTAs have many keys
    case = CacheCase(
        lengths=(4000,) * batch, capacity=4000, page_size=page_size, heads=8, heads_k=2, dim=128,
        dtype=BF16, **splits,
    )  # fmt: skip
    inputs = make_cache_inputs(case, cuda).changed(softmax_scale=3.0)
    if not given:
        inputs = inputs.changed(cache_seqlens=None)

    def steps(pause: Any) -> list[torch.Tensor]:
        cache, outs = inputs.fresh(), []
        if given:
            cache = cache.changed(cache_seqlens=cache["cache_seqlens"].clone())
        if page_size:
            cache = cache.changed(block_table=cache["block_table"].clone())
        for _ in range(20):
            cache["v_cache"].neg_()
            pause()
            if page_size:
                cache["block_table"].copy_(cache["block_table"].roll(1, 0))
            pause()
            if given:
                cache["cache_seqlens"].sub_(150)
            pause()
            for _ in range(2):
                outs.append(cache.run()[0])
                cache = cache.changed(q=outs[-1])
                pause()
        return outs

    check_order(steps)


@pytest.mark.parametrize("name", decode_kernels())
def test_lengths_come_from_the_call_right_before(cuda, name):
    """A kernel looks at lengths before it may rely on them, while the one before still writes them:
    its LSE, whose bits are beyond the capacity where it is positive, and below 0 where it is
    not."""
    kernel, batch, keys = parse(name), 6, 3000
    sizes = {"lengths": (keys,) * batch, "capacity": keys, "dim": kernel.dim, "dim_v": kernel.dim_v}
    before, after = (
        make_cache_inputs(CacheCase(heads=h, heads_k=h_k, dtype=kernel.dtype, **sizes), cuda)
        for h, h_k in ((1, 1), (8, 2))
    )
    key = before["k_cache"][:, :1].clone()
    alike = key.expand_as(before["k_cache"]).contiguous()
    before = before.changed(k_cache=alike, softmax_scale=1.0)
    signs = torch.randint(0, 2, (20, batch, 1, 1, 1), device=cuda).to(kernel.dtype) * 2 - 1

    def steps(pause: Any) -> list[torch.Tensor]:
        outs = []
        for sign in signs:
            lse = before.changed(q=sign * key).run()[1]
            pause()
            outs.append(after.changed(cache_seqlens=lse.view(torch.int32).flatten()).run()[0])
            pause()
        return outs

    with library.only(name):
        check_order(steps)
        outs = steps(torch.cuda.synchronize)
    for sign, out in zip(signs, outs, strict=True):
        assert torch.equal(out.flatten(1).any(1), sign.flatten() > 0)
