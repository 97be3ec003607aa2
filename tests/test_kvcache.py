"""Attention over a key/value cache: appends, pages, rotary embedding, splits, bad indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_cute
from flash_cute import library, reference
from flash_cute.testing import bounds, memory
from flash_cute.testing.kernels import parse
from flash_cute.testing.kvcache import (
    CacheCase,
    CacheInputs,
    check,
    make_cache_inputs,
    unsupported_on_cuda,
)
from flash_cute.testing.pairwise import pairwise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
LONG = {"lengths": (257, 0, 1000, 64, 1), "heads": 8, "heads_k": 2, "dim": 128, "dtype": BF16}


@pytest.fixture
def make(device):
    """`make(case)`: inputs on `device`; a case without a CUDA kernel must be refused by name."""

    def make_supported(case: CacheCase, seed: int = 0) -> CacheInputs:
        inputs = make_cache_inputs(case, device, seed)
        missing = unsupported_on_cuda(case) if device == "cuda" else None
        if missing is not None:
            with pytest.raises(NotImplementedError, match=missing):
                call(inputs)
            with pytest.raises(RuntimeError, match=missing):
                inputs.run()
            pytest.skip(f"refused on CUDA, as it should be: {missing}")
        return inputs

    return make_supported


def call(inputs: CacheInputs, **extra: Any) -> Any:
    """What the public function answers."""
    arguments = dict(inputs.arguments)
    left, right = arguments.pop("window_size_left"), arguments.pop("window_size_right")
    arguments |= {"causal": arguments.pop("is_causal"), "window_size": (left, right)}
    return flash_cute.flash_attn_with_kvcache(**(arguments | extra))


def check_same(got: CacheInputs, expected: CacheInputs) -> None:
    """Both calls have the same bits as results and in the caches."""
    got, expected = got.fresh(), expected.fresh()
    names = ("out", "softmax_lse")
    for name, a, b in zip(names, got.run(), expected.run(), strict=True):
        bounds.check_same_bits(name, a, b)
    for name in ("k_cache", "v_cache"):
        bounds.check_same_bits(name, got[name], expected[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 80, 96, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 1), (48, 2)], ids=str)
def test_one_query(make, dtype, dim, heads):
    case = CacheCase(
        lengths=(33, 0, 130, 700), heads=heads[0], heads_k=heads[1], dim=dim, dtype=dtype
    )
    check(make(case))


FACTORS = {
    "dtype": DTYPES,
    "heads": [(4, 4), (8, 2), (20, 1)],
    "dim": [(64, 64), (128, 128), (128, 64), (40, 56), (192, 128), (256, 256)],
    "seqlens_q": [1, 3, 70, (1, 0, 5, 33)],
    "seqlens_new": [0, 1, 3, (1, 0, 5, 33)],
    "page_size": [None, 1, 16, 100, 256],
    "band": [{}, {"is_causal": True}, {"window": (40, 0)}, {"window": (7, 9)}],
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
def test_pairs(make, row):
    """Every pair of features meets."""
    row = dict(row)
    (heads, heads_k), (dim, dim_v) = row.pop("heads"), row.pop("dim")
    sizes = {"heads": heads, "heads_k": heads_k, "dim": dim, "dim_v": dim_v}
    merged = row.pop("band") | row.pop("rules") | row.pop("splits")
    check(make(CacheCase(lengths=(33, 0, 130, 301), **sizes, **merged, **row)))


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16, 64, 133])
@pytest.mark.parametrize("band", [{}, {"is_causal": True}, {"window": (100, 0)}], ids=str)
def test_splits(make, splits, band):
    check(make(CacheCase(**LONG, **band, seqlens_q=2, num_splits=splits)))


@pytest.mark.parametrize("size", [1, 64, 200, 10**6])
def test_split_sizes(make, size):
    check(make(CacheCase(**LONG, sink=True, split_size=size)))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("splits", [{"split_size": 256}, {"num_splits": 1}], ids=str)
def test_batch_invariance(make, splits, page_size):
    """A sequence's result has the same bits alone and among others, in any order."""
    lengths = tuple(37 * i % 3000 for i in range(1, 40))
    sizes = {"heads": 8, "heads_k": 2, "dim": 64, "dtype": BF16}
    inputs = make(CacheCase(lengths=lengths, page_size=page_size, **sizes, **splits))
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


def test_every_share_of_a_long_row(make):
    """One sequence cut into as many parts as there are multiprocessors, and a little more."""
    for length in (128 * 264, 128 * 264 + 1, 4000):
        case = CacheCase(lengths=(length,), heads=2, heads_k=1, dim=64, dtype=BF16)
        check(make(case))


def test_many_short_sequences(make):
    lengths = tuple(i % 5 for i in range(1500))
    check(make(CacheCase(lengths=lengths, heads=2, dim=64, page_size=2, dtype=BF16)))


def test_no_sequence(make):
    inputs = make(CacheCase(lengths=(), dim=64, dtype=BF16, capacity=5))
    out, lse = inputs.run()
    assert out.shape == (0, 1, 2, 64) and lse.shape == (0, 2, 1)


def test_lengths_are_whole_without_cache_seqlens(make):
    inputs = make(CacheCase(lengths=(70, 70), capacity=70, dim=64, dtype=BF16))
    check_same(inputs.changed(cache_seqlens=None), inputs)


def test_append_to_a_full_cache_drops_what_does_not_fit(make):
    sizes = {"lengths": (60, 64, 30), "capacity": 64, "dim": 64, "dtype": BF16}
    check(make(CacheCase(**sizes, seqlens_q=10, seqlens_new=10, is_causal=True)))
    check(make(CacheCase(**sizes, seqlens_q=10, seqlens_new=10, page_size=16)))


BAD = [-1, -(2**31), 2**31 - 1]


@pytest.mark.parametrize("length", BAD)
def test_bad_lengths_are_clamped(make, length):
    sizes = {"lengths": (33, 64, 64), "capacity": 64, "dim": 64, "dtype": BF16}
    inputs = make(CacheCase(**sizes, seqlens_q=2, seqlens_new=2, rotary="halves"))
    meant = [33, 0 if length < 0 else 64, 64]
    check_same(inputs.changed(cache_seqlens=[33, length, 64]), inputs.changed(cache_seqlens=meant))


@pytest.mark.parametrize("length", BAD)
def test_bad_paddings_are_clamped(make, length):
    inputs = make(CacheCase(lengths=(33, 64), leftpad=True, dim=64, dtype=BF16))
    meant = inputs.changed(cache_leftpad=[0, 0 if length < 0 else 64])
    meant["k_cache"].nan_to_num_(), meant["v_cache"].nan_to_num_()
    check_same(inputs.changed(cache_leftpad=[0, length]), meant)


@pytest.mark.parametrize("page", [-1, -(2**31), 2**31 - 1, "pages"])
@pytest.mark.parametrize("new", [0, 3])
def test_bad_pages_read_as_zeros_and_are_not_written(make, page, new):
    case = CacheCase(
        lengths=(62, 100), page_size=16, seqlens_q=2, seqlens_new=new, dim=64, dtype=BF16
    )
    inputs = make(case)
    page = len(inputs["k_cache"]) if page == "pages" else page
    inputs["block_table"][0, 1] = page
    inputs["block_table"][1, 6] = page  # where new rows go
    check(inputs)


@pytest.mark.parametrize("row", [-1, 2**31 - 1, "rows"])
def test_bad_rows_of_the_cache_read_as_zeros_and_are_not_written(make, row):
    case = CacheCase(
        lengths=(62, 40), batch_idx=True, seqlens_q=2, seqlens_new=3, dim=64, dtype=BF16
    )
    inputs = make(case)
    inputs["cache_batch_idx"][1] = len(inputs["k_cache"]) if row == "rows" else row
    check(inputs)


def test_bad_offsets_of_queries_are_clamped(make):
    inputs = make(CacheCase(lengths=(62, 40), seqlens_q=(3, 4), dim=64, dtype=BF16))
    bad = inputs.changed(cu_seqlens_q=[-5, 3, 2**31 - 1])
    check_same(bad, inputs.changed(cu_seqlens_q=[0, 3, 7]))


def test_positions_of_rotary_embedding_are_clamped(make):
    case = CacheCase(
        lengths=(62, 40), seqlens_q=2, seqlens_new=2, rotary="interleaved", rotary_seqlens=True,
        dim=64, dtype=BF16,
    )  # fmt: skip
    inputs = make(case)
    for position in BAD:
        check(inputs.changed(rotary_seqlens=[3, position]))


def test_status_names_what_is_clamped(make):
    case = CacheCase(lengths=(62, 40, 7), page_size=16, capacity=64, dim=64, dtype=BF16)
    inputs = make(case)
    inputs["block_table"][1, 2] = -1
    inputs["block_table"][2, 1] = 9999  # not in use

    def status(**changes: Any) -> list[int]:
        names = ("k_cache", "cache_seqlens", "cache_leftpad", "block_table")
        arguments = {name: inputs.changed(**changes)[name] for name in names}
        return flash_cute.kvcache_status(**arguments, seqlen_new=2).tolist()

    assert status() == [0, 2, 0]
    assert status(cache_seqlens=[63, -1, 15]) == [1, 1, 2]
    assert status(cache_leftpad=[63, 5, -1]) == [4, 2, 4]
    dense = make(CacheCase(lengths=(62, 40), batch_idx=True, dim=64, dtype=BF16))
    dense["cache_batch_idx"][0] = 2**30
    names = ("k_cache", "cache_seqlens", "cache_batch_idx")
    assert flash_cute.kvcache_status(**{name: dense[name] for name in names}).tolist() == [2, 0]


CHECKED = {
    "cache_seqlens[1] is 65": {"cache_seqlens": [3, 65, 0]},
    "cache_seqlens[2] is -1": {"cache_seqlens": [3, 60, -1]},
    "cache_leftpad[0] is 70": {"cache_leftpad": [70, 0, 0]},
    "block_table[1, 0] is 99": {"block_table": [[0, 1, 2, 3], [99, 0, 0, 0], [4, 5, 6, 7]]},
}


@pytest.mark.parametrize("message", CHECKED)
def test_checked_indices_raise_by_name(make, message):
    case = CacheCase(lengths=(62, 40, 7), page_size=16, capacity=64, dim=64, dtype=BF16)
    inputs = make(case)
    call(inputs, check_indices=True)
    with pytest.raises(ValueError) as caught:
        call(inputs.changed(**CHECKED[message]), check_indices=True)
    assert message in str(caught.value)


def test_nothing_else_of_the_cache_is_written(make, device):
    """Canaries around the caches, and every row that is not appended, keep their bits."""
    case = CacheCase(
        lengths=(62, 40, 0), seqlens_q=3, seqlens_new=3, page_size=16, rotary="halves", dim=64,
        dtype=BF16,
    )  # fmt: skip
    inputs = make(case)
    guards = {
        name: memory.GuardedTensor(inputs[name].shape, BF16, device)
        for name in ("k_cache", "v_cache")
    }
    for name, guard in guards.items():
        guard.tensor.copy_(inputs[name])
    guarded = inputs.changed(**{name: guard.tensor for name, guard in guards.items()})
    expected = inputs.fresh()
    for name, got, right in zip(("out", "softmax_lse"), guarded.run(), expected.run(), strict=True):
        bounds.check_same_bits(name, got, right)
    for name, guard in guards.items():
        guard.check(name)
        bounds.check_same_bits(name, guard.tensor, expected[name])


def test_uninitialized_memory_never_shows(make, device):
    case = CacheCase(**LONG, seqlens_q=(1, 3, 2, 0, 5), num_splits=7)
    inputs = make(case)
    if device == "cuda":
        memory.fill_freed_memory(device)
        check(inputs)
    else:
        with memory.uninitialized_is_nan():
            check(inputs)


SAMPLES = {
    "contiguous": CacheCase(lengths=(33, 20), dim=64, dtype=BF16, num_splits=3),
    "paged": CacheCase(
        lengths=(33, 20), seqlens_q=3, seqlens_new=3, page_size=16, rotary="halves",
        is_causal=True, heads=4, heads_k=2, dim=64, dtype=BF16,
    ),
    "packed": CacheCase(
        lengths=(33, 20), seqlens_q=(3, 1), seqlens_new=(3, 1), batch_idx=True, leftpad=True,
        sink=True, alibi="batch", dim=64, dtype=FP16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(make, name):
    inputs = make(SAMPLES[name])
    for cache in ("k_cache", "v_cache"):
        inputs[cache].nan_to_num_()
    torch.library.opcheck(torch.ops.flash_cute.fwd_kvcache.default, (), inputs.arguments)


@pytest.mark.parametrize("name", SAMPLES)
def test_compile(make, name):
    """One full graph; the caches are written as in eager."""
    torch._dynamo.reset()
    expected, got = make(SAMPLES[name]), make(SAMPLES[name])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        results = (
            compiled(got, return_softmax_lse=True), call(expected, return_softmax_lse=True)
        )  # fmt: skip
        for a, b in zip(*results, strict=True):
            bounds.check_same_bits("out", a, b)
        for cache in ("k_cache", "v_cache"):
            bounds.check_same_bits(cache, got[cache], expected[cache])


def test_function_is_the_op(make):
    inputs = make(SAMPLES["paged"])
    out, lse = inputs.fresh().run()
    ran = inputs.fresh()
    got = call(ran, return_softmax_lse=True, block_table=None, page_table=inputs["block_table"])
    for name, a, b in zip(("out", "softmax_lse"), got, (out, lse), strict=True):
        bounds.check_same_bits(name, a, b)


def test_one_length_for_all(make):
    inputs = make(CacheCase(lengths=(40, 40), dim=64, dtype=BF16))
    bounds.check_same_bits("out", call(inputs, cache_seqlens=40), call(inputs))


def test_gradients_are_refused(make):
    inputs = make(SAMPLES["contiguous"])
    leaf = inputs.changed(q=inputs["q"].clone().requires_grad_())
    with pytest.raises(RuntimeError, match=r"requires grad, and this op is for inference"):
        leaf.run()
    with torch.no_grad():
        leaf.run()


@pytest.mark.parametrize("parts", [1, 2, 17, 133])
@pytest.mark.parametrize("dim", [8, 64, 100, 256])
@pytest.mark.parametrize("dtype", [None, BF16, FP16], ids=str)
def test_combine(device, parts, dim, dtype):
    generator = torch.Generator().manual_seed(parts)
    out = torch.randn(parts, 2, 5, 3, dim, generator=generator).to(device)
    lse = (4 * torch.randn(parts, 2, 5, 3, generator=generator)).to(device)
    empty = torch.rand(lse.shape, generator=generator).to(device) < 0.3
    empty[:, 0, 0] = True
    lse[empty] = -torch.inf
    out[empty] = float("nan")
    expected, expected_lse = reference.combine(out, lse)
    got, got_lse = flash_cute.flash_attn_combine(out, lse, out_dtype=dtype)
    assert got.dtype == (dtype or FP32)
    unit = bounds.ROUNDING_UNIT[got.dtype]
    size, _ = reference.combine(out.abs(), lse)
    bounds.compare("out", got, expected, (unit + 2e-6) * size + 2**-25)
    bounds.check_lse("lse", got_lse, expected_lse)
    into = torch.empty_like(got)
    assert flash_cute.flash_attn_combine(out, lse, out=into, return_lse=False) is into
    bounds.check_same_bits("out", into, got)


def test_combine_is_the_whole(make):
    """Attention over two halves of the keys, combined, is that over all of them."""
    inputs = make(CacheCase(lengths=(64, 64), capacity=64, dim=64, dtype=FP16))
    whole, whole_lse = inputs.run()
    halves = [
        inputs.changed(cache_seqlens=None, k_cache=inputs["k_cache"][:, rows],
                       v_cache=inputs["v_cache"][:, rows]).run()
        for rows in (slice(0, 40), slice(40, 64))
    ]  # fmt: skip
    out = torch.stack([x.float() for x, _ in halves])
    lse = torch.stack([x.transpose(1, 2) for _, x in halves]).contiguous()
    got, got_lse = flash_cute.flash_attn_combine(out, lse)
    torch.testing.assert_close(got, whole.float(), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(got_lse.transpose(1, 2), whole_lse)


@pytest.mark.parametrize("name", [k for k in library.kernels() if k.startswith("decode")])
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


def test_more_elements_than_int32_counts(cuda):
    """Pages that start behind 2^31 elements."""
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
