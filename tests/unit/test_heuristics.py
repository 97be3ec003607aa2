"""The heuristics that choose kernels, splits and orders from a problem's sizes."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random

import pytest
import torch
from planned import plan

from benchmarks import rivals, timing
from benchmarks.suites import SUITES, Case, make_inputs
from flash_cute import kernels
from flash_cute.native import library

D128 = "fwd_sm90_bf16_plain_d128x128_"


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        # Long sequences: fewest loads. Lengths that larger tiles would overshoot: smaller ones.
        ((1, 16, 16384, 16384, 128), {}, D128 + "m192_n80_s2_w12_c1_x2"),
        ((1, 16, 16384, 16384, 128), {"right": 0}, D128 + "m192_n80_s2_w12_c1_x1"),
        ((16, 16, 1024, 1024, 128), {}, D128 + "m128_n128_s2_w8_c1_x2"),
        ((16, 16, 1024, 1024, 128), {"right": 0}, D128 + "m128_n128_s2_w8_c1_x1"),
        # Head dims that the row does not fill.
        ((16, 16, 1024, 1024, 104), {}, D128 + "m128_n128_s2_w8_c1_x2"),
        # Few queries: a cluster would leave half of its CTAs idle.
        ((1024, 16, 1, 4096, 128), {}, D128 + "m128_n128_s2_w8_c1_x1"),
        ((1, 32, 128, 2048, 128), {}, D128 + "m128_n128_s2_w8_c1_x1"),
        ((1, 64, 99, 99, 256), {}, "fwd_sm90_bf16_plain_d256x256_m128_n64_s2_w8_c1_x1"),
        # A window: tiles are short.
        ((4, 16, 4096, 4096, 256), {"left": 64, "right": 0},
         "fwd_sm90_bf16_plain_d256x256_m128_n64_s2_w8_c1_x1"),
        ((4, 8, 4096, 4096, 256), {}, "fwd_sm90_bf16_plain_d256x256_m128_n64_s2_w8_c1_x2"),
        # Softcap or ALiBi.
        ((1, 16, 16384, 16384, 128), {"softcap": True},
         "fwd_sm90_bf16_rich_d128x128_m192_n80_s2_w12_c1_x1"),
        ((4, 32, 4096, 4096, 64), {"softcap": True},
         "fwd_sm90_bf16_rich_d64x64_m192_n96_s2_w12_c1_x1"),
        # No alternative.
        ((4, 32, 4096, 4096, 64), {}, "fwd_sm90_bf16_plain_d64x64_m192_n128_s4_w12_c1_x1"),
        ((4, 32, 4096, 4096, 257), {}, None),
    ],
)  # fmt: skip
def test_preferred_kernels(sizes, options, expected):
    found = plan("fwd", *sizes, **options)
    assert (found and found.kernel.id) == expected


@pytest.mark.parametrize(
    ("heads", "heads_k", "seqlen_q", "head_dim", "expected"),
    [
        (32, 8, 64, 128, 2),
        (32, 8, 33, 128, 2),
        (32, 8, 32, 128, 4),
        (32, 8, 1, 64, 4),
        (64, 8, 16, 256, 8),
        (64, 8, 17, 128, 4),
        (64, 1, 1, 128, 64),  # rows of tokens: a warp's rows are else those of one head
        (24, 8, 4, 128, 3),  # rows of tokens: groups of 3
        (48, 8, 4, 128, 6),  # of 6
        (32, 8, 65, 128, 1),
        (32, 32, 1, 128, 1),
    ],
)
def test_heads_that_share_a_tile(heads, heads_k, seqlen_q, head_dim, expected):
    found = plan("fwd", 1, heads, seqlen_q, 4096, head_dim, heads_k=heads_k)
    assert found.pack_gqa == expected


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        # As many tiles as SMs, or more: no splits.
        ((4, 16, 4096, 4096, 128), {}, {1}),
        ((1, 32, 512, 32768, 128), {}, {1}),
        ((1, 132, 1, 32768, 128), {}, {1}),
        # So few keys that combining the splits costs more than it saves.
        ((1, 8, 512, 512, 128), {"right": 0}, {1}),
        ((1, 8, 128, 4096, 128), {"left": 128, "right": 0}, {1}),
        # As many splits as fill the SMs.
        ((1, 32, 256, 32768, 128), {"right": 0}, {2}),
        ((1, 32, 128, 32768, 128), {}, {4}),
        ((1, 32, 1, 32768, 64), {}, {4}),
        ((1, 1, 1, 65536, 128), {}, range(64, 129)),
        # Packed sequences count with their mean lengths.
        ((4, 4, 128, 8192, 128), {"varlen": True}, range(5, 9)),
        ((0, 8, 128, 8192, 128), {"varlen": True}, {1}),
    ],
)  # fmt: skip
def test_splits_of_keys(sizes, options, expected):
    assert plan("fwd", *sizes, **options).num_splits in expected


def test_every_split_has_keys():
    draw = random.Random(11)
    for _ in range(500):
        sizes = (draw.randint(1, 4), draw.randint(1, 16), draw.randint(1, 600))
        seqlen_k, dim = (
            draw.choice([0, 1, 200, 3000, 100_000]),
            draw.choice([40, 64, 128, 192, 256]),
        )
        found = plan("fwd", *sizes, seqlen_k, dim)
        assert 1 <= found.num_splits <= max(1, -(-seqlen_k // found.kernel.block_n))


def test_kernels_of_random_sizes():
    """All sizes have a kernel, that of packed sequences without clusters. Dense ones have Hopper's
    if there are queries and keys, and head dims above 32 that are multiples of 8."""
    draw = random.Random(7)
    for _ in range(500):
        sizes = (draw.randint(0, 64), draw.randint(1, 64), draw.randint(0, 70000),
                 draw.randint(0, 70000), draw.randint(1, 256))  # fmt: skip
        window = {"left": draw.choice([-1, 0, 1, 300, 2**31 - 1]), "right": draw.choice([-1, 0, 5])}
        *lengths, head_dim = sizes
        for sms in (1, 2, 132):
            dense, varlen = (
                plan("fwd", *sizes, **window, sms=sms, varlen=v).kernel for v in (False, True)
            )
            if min(lengths) > 0 and head_dim % 8 == 0 and head_dim > 32:
                assert dense.id.startswith("fwd_sm90_bf16_plain_d")
            assert varlen.cluster == 1


@pytest.mark.parametrize(
    ("gpu", "dims", "options", "family"),
    [
        ("h100", (64, 64), {}, "sm90"),
        ("h100", (128, 128), {"softcap": True, "alibi": True, "dropout": True}, "sm90"),
        ("h100", (256, 256), {"softcap": True}, "sm90"),
        ("h100", (192, 192), {"softcap": True}, "sm90"),
        ("h100", (192, 128), {}, "sm90"),
        ("h100", (192, 128), {"alibi": True}, "sm90"),
        # What Hopper's own kernels over lists do not do.
        ("h100", (256, 256), {"dropout": True}, "sm80"),
        ("h100", (128, 128), {"unaligned": True}, "sm80"),
        ("h100", (128, 128), {"dropout": True, "left": 100}, "sm80"),
        ("a100", (1, 1), {}, "sm80"),
        ("a100", (96, 128), {"varlen": True}, "sm80"),
        ("a10", (256, 256), {"softcap": True, "dropout": True}, "sm80"),
    ],
)
def test_families_of_sparse_calls(gpu, dims, options, family):
    problem = {"gpu": gpu, "lists": True, "head_dim_v": dims[1], **options}
    found = plan("fwd", 2, 8, 1000, 2000, dims[0], **problem).kernel.id
    assert found.startswith(f"fwd_{family}_") and found.endswith("_list")


def test_backward_of_sparse_calls_is_hoppers_alone():
    sizes = (2, 8, 8, 1000, 2000, 128, 128)
    assert plan("bwd", *sizes, lists=True).kernel.id.startswith("bwd_sm90_")
    assert plan("bwd", *sizes, lists=True, gpu="a100") is None


def test_backward_over_lists_keeps_announced_lengths():
    """The op does: a window of no keys before a query hides one of two keys, be there one alone."""
    problem = kernels.Problem(
        "bwd", heads=4, seqlen_q=2, seqlen_k=2, total_q=1, total_k=1, varlen=True,
        window_size=(0, -1), deterministic=True,
    )  # fmt: skip
    assert kernels.supports(problem, "h200")
    assert not kernels.supports(dataclasses.replace(problem, lists=True), "h200")
    assert kernels.supports(dataclasses.replace(problem, lists=True, window_size=(1, -1)), "h200")


def test_deterministic_walks_over_lists_are_of_four_heads_at_a_time():
    """Fewer tiles of one head run at once, and fewer wait for each other."""
    sizes, options = (1, 8, 8, 32768, 32768, 128, 128), {"deterministic": True}
    assert plan("bwd", *sizes, lists=True, **options).key_order.heads_together == 4
    assert plan("bwd", *sizes, lists=True).key_order.heads_together == 1
    assert plan("bwd", *sizes, **options).key_order.heads_together == 1


CAUSAL = {"right": 0}


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        # Enough key tiles, or so many that the last wave matters little.
        ((2, 16, 16, 4096, 4096, 128, 128), {}, (1, 1, 0)),
        ((2, 16, 16, 4096, 4096, 128, 128), CAUSAL, (1, 1, 0)),
        ((1, 16, 16, 1024, 1024, 128, 128), {}, (1, 1, 0)),
        ((1, 32, 8, 8192, 8192, 128, 128), {}, (1, 1, 0)),
        # Heads are split first: into as many splits as there are idle SMs for.
        ((1, 32, 1, 4096, 4096, 128, 128), {}, (4, 1, 0)),
        ((1, 32, 1, 4096, 4096, 128, 128), CAUSAL, (8, 1, 0)),
        ((1, 8, 1, 1024, 1024, 128, 128), {}, (8, 2, 0)),
        ((1, 48, 2, 4096, 4096, 128, 128), {}, (2, 1, 0)),
        ((1, 16, 1, 1024, 1024, 256, 256), {}, (8, 1, 0)),
        # Queries are split if a kv head has only one query head.
        ((1, 8, 8, 1024, 1024, 128, 128), {}, (1, 2, 0)),
        ((1, 8, 8, 1024, 1024, 128, 128), CAUSAL, (1, 2, 0)),
        ((1, 1, 1, 4096, 128, 128, 128), {}, (1, 16, 0)),
        # Too little work to split: a few queries, a narrow window.
        ((1, 1, 1, 128, 4096, 128, 128), {}, (1, 1, 0)),
        ((1, 2, 2, 4096, 4096, 128, 128), {"left": 128, **CAUSAL}, (1, 1, 0)),
        # Packed sequences count with their mean length.
        ((4, 32, 1, 1024, 1024, 128, 128), {"varlen": True}, (4, 1, 0)),
        ((64, 32, 1, 1024, 1024, 128, 128), {"varlen": True}, (1, 1, 0)),
        # Only the tiles of the last wave are split, if tiles are equally long and dense.
        ((1, 32, 32, 16384, 16384, 64, 64), {}, (1, 16, 4092)),
        ((1, 16, 16, 16384, 16384, 128, 128), {}, (1, 7, 1980)),
        ((1, 8, 8, 16384, 16384, 256, 256), {}, (1, 7, 990)),
        ((4, 32, 8, 4096, 4096, 128, 128), {}, (1, 5, 924)),
        ((1, 32, 32, 16384, 16384, 64, 64), CAUSAL, (1, 1, 0)),
        ((1, 32, 32, 16384, 16384, 64, 64), {"varlen": True}, (1, 1, 0)),
        # A smaller GPU is busy sooner.
        ((1, 32, 1, 4096, 4096, 128, 128), {"sms": 32}, (1, 1, 0)),
        ((1, 32, 1, 4096, 4096, 257, 257), {}, None),
    ],
)  # fmt: skip
def test_splits_of_backward(sizes, options, expected):
    found = plan("bwd", *sizes, **options)
    splits = found and (found.splits_of_heads, found.splits_of_queries, found.whole_tiles)
    assert splits == expected


def test_splits_of_backward_divide_the_heads_and_are_few():
    draw = random.Random(7)
    for _ in range(2000):
        heads_k, group = draw.choice([1, 1, 2, 3, 16]), draw.choice([1, 2, 6, 7, 32])
        sizes = (draw.choice([0, 1, 1, 4]), heads_k * group, heads_k, draw.randint(0, 9000),
                 draw.randint(0, 9000), draw.randint(1, 256), draw.randint(1, 256))  # fmt: skip
        window = {"left": draw.choice([-1, 0, 300]), "right": 0}
        for sms in (1, 2, 132):
            options = {**window, "varlen": draw.random() < 0.5, "sms": sms}
            found = plan("bwd", *sizes, **options)
            heads, queries = found.splits_of_heads, found.splits_of_queries
            whole = found.whole_tiles
            assert found.num_splits == heads * queries
            assert group % heads == 0 and queries >= 1 and heads * queries <= 16
            waves = [max(1, sms // pair) for pair in (1, 2)]
            assert whole == 0 or (heads * queries > 1 and 0 in [whole % wave for wave in waves])


@pytest.mark.skipif(
    "FLASH_CUTE_TIMING" not in os.environ, reason="times kernels: needs a GPU alone"
)
@pytest.mark.parametrize("name", list(map(str, SUITES["train"])))
def test_the_preferred_kernel_is_within_3_percent_of_the_fastest(cuda, name):
    case, device = Case.parse(name), torch.device(cuda, 0)
    x = make_inputs(case, device, seed=3)
    rows = [
        id for id in library.kernels()
        if id.startswith(f"fwd_sm90_{case.dtype}_plain_d{case.dim}x{case.dim_v}_")
    ]  # fmt: skip
    works = {id: rivals.FlashCute(id).forward(case, x) for id in rows}
    works["pick"] = rivals.FlashCute().forward(case, x)
    measured = timing.interleave(works, 5, 60.0, device, timing.Monitor(device))
    ms = {name: turn.median_ms for name, turn in measured.items()}
    assert ms["pick"] <= 1.03 * min(ms.values()), ms


def shares_l2(*sizes, **options):
    return plan("bwd", *sizes, **options).shares_l2


def test_only_long_walks_share_l2():
    """Above 64 MB of queries, dO and sums of dQ of a kv head, in dense calls without a mask that
    are not deterministic, sparse or not."""
    sizes = (1, 64, 8, 8193, 8192, 128, 128)
    assert shares_l2(*sizes)
    assert not shares_l2(1, 64, 8, 8192, 8192, 128, 128)
    assert shares_l2(1, 1, 1, 65537, 64, 128, 128)
    assert shares_l2(1, 64, 8, 16385, 16385, 64, 64)
    assert not shares_l2(1, 64, 8, 16384, 16384, 64, 64)
    assert shares_l2(*sizes, left=8192, right=8193)
    for options in (
        {"right": 0},
        {"right": 8191},
        {"left": 8190},
        {"varlen": True},
        {"deterministic": True},
    ):
        assert not shares_l2(*sizes, **options)
    assert not shares_l2(1, 64, 8, 32768, 32768, 256, 256)  # pairs of CTAs
    assert shares_l2(*sizes, lists=True)
    assert not shares_l2(1, 64, 8, 8192, 8192, 128, 128, lists=True)
    assert not shares_l2(*sizes, lists=True, deterministic=True)
    assert not shares_l2(*sizes, lists=True, right=0)


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        # Short sequences; longer ones under a causal mask.
        ((4, 16, 16, 4096, 4096, 128, 128), {}, "first_stores"),
        ((4, 16, 16, 4097, 4097, 128, 128), {}, "atomic"),
        ((2, 16, 16, 8192, 8192, 64, 64), {"right": 0}, "first_stores"),
        ((2, 16, 16, 8193, 8193, 64, 64), {"right": 0}, "atomic"),
        ((1, 8, 8, 65536, 1024, 128, 128), {}, "first_stores"),
        ((1, 8, 8, 65537, 1024, 128, 128), {}, "atomic"),  # whose CTAs are kept near each other
        # Pairs of CTAs.
        ((32, 8, 8, 512, 512, 256, 256), {}, "first_stores"),
        ((32, 8, 8, 513, 513, 256, 256), {}, "atomic"),
        ((16, 8, 8, 1024, 1024, 192, 128), {"right": 0}, "first_stores"),
        ((16, 8, 8, 1025, 1025, 192, 128), {"right": 0}, "atomic"),
        # Grouped heads, under a mask half of it, and windows that hide nothing.
        ((4, 32, 8, 4096, 4096, 128, 128), {}, "first_stores"),
        ((4, 32, 8, 4096, 4096, 128, 128), {"right": 0}, "first_stores"),
        ((4, 32, 8, 4098, 4098, 128, 128), {"right": 0}, "atomic"),
        ((4, 32, 8, 4096, 4096, 128, 128), {"right": 4095}, "first_stores"),
        ((4, 32, 8, 4096, 4096, 128, 128), {"right": 4094}, "atomic"),
        ((4, 32, 8, 4096, 4096, 128, 128), {"left": 4095, "right": 0},
         "first_stores"),
        ((4, 32, 8, 4096, 4096, 128, 128), {"left": 4094, "right": 0},
         "atomic"),
        ((2, 16, 16, 8192, 8192, 64, 64), {"left": 8191, "right": 0},
         "first_stores"),
        # Queries that all see nearly all keys, or come after all keys.
        ((1, 16, 16, 128, 8192, 128, 128), {"right": 0}, "atomic"),
        ((1, 16, 16, 8192, 8192, 128, 128), {"right": 8190}, "atomic"),
        ((1, 16, 16, 16384, 8192, 128, 128), {"right": 0}, "first_stores"),
        # Windows: of few keys, and with grouped heads of fewer.
        ((1, 16, 16, 8192, 8192, 128, 128), {"left": 2048, "right": 2047},
         "first_stores"),
        ((1, 16, 16, 8192, 8192, 128, 128), {"left": 2048, "right": 2048},
         "atomic"),
        ((1, 16, 16, 8192, 8192, 128, 128), {"left": 2048}, "atomic"),
        ((1, 16, 4, 8192, 8192, 128, 128), {"left": 1023, "right": 0},
         "first_stores"),
        ((1, 16, 4, 8192, 8192, 128, 128), {"left": 1024, "right": 0},
         "atomic"),
        ((1, 8, 8, 8192, 8192, 256, 256), {"left": 511, "right": 0},
         "first_stores"),
        ((1, 8, 2, 8192, 8192, 256, 256), {"left": 511, "right": 0},
         "atomic"),
        ((4, 16, 16, 2048, 2048, 128, 128), {"varlen": True}, "first_stores"),
        ((4, 16, 16, 2048, 2048, 128, 128), {"deterministic": True}, "serialized"),
        ((1, 64, 8, 32768, 32768, 128, 128), {"deterministic": True}, "serialized"),
    ],
)  # fmt: skip
def test_order_of_dq(sizes, options, expected):
    assert plan("bwd", *sizes, **options).dq_accumulate == expected


@pytest.mark.parametrize(
    ("sizes", "options", "by_default", "serialized"),
    [
        # The fields of KeyOrder: tiles_of_set, heads_together, late_first, heads_inside,
        # down_and_up. Serialized twice as many heads alternate, except for short sequences.
        ((4, 16, 16, 4096, 4096, 128, 128), CAUSAL,
         (128, 4, True, True, True), (128, 8, True, True, False)),
        ((1, 16, 16, 16384, 16384, 128, 128), CAUSAL,
         (128, 1, False, True, True), (128, 2, True, True, False)),
        ((16, 16, 16, 1024, 1024, 128, 128), CAUSAL,
         (128, 16, True, True, True), (128, 16, True, True, False)),
        ((16, 32, 32, 1024, 1024, 64, 64), CAUSAL,
         (128, 16, True, True, True), (128, 32, True, True, False)),
        ((4, 8, 8, 4096, 4096, 256, 256), CAUSAL,
         (64, 2, False, True, True), (64, 4, True, True, False)),
        ((1, 8, 8, 16384, 16384, 256, 256), CAUSAL,
         (64, 1, False, True, True), (64, 1, True, True, False)),
        # Under a mask grouped heads have down_and_up if the L2 cache does not hold their queries.
        ((4, 32, 8, 4096, 4096, 128, 128), CAUSAL,
         (128, 4, False, True, True), (128, 8, False, True, False)),
        ((8, 64, 8, 2048, 2048, 128, 128), CAUSAL,
         (128, 8, False, True, True), (128, 16, False, True, True)),
        ((16, 32, 8, 1024, 1024, 128, 128), CAUSAL,
         (128, 16, False, True, True), (128, 16, False, True, True)),
        ((16, 32, 8, 1024, 1024, 64, 64), CAUSAL,
         (128, 16, False, True, True), (128, 32, False, True, False)),
        ((5, 32, 8, 3072, 3072, 128, 128), CAUSAL,
         (120, 5, False, True, True), (120, 10, False, True, False)),
        # Without a mask the L2 cache holds the queries of the heads that alternate.
        ((4, 16, 16, 4096, 4096, 128, 128), {},
         (128, 4, True, True, True), (128, 8, True, True, False)),
        ((4, 32, 8, 4096, 4096, 128, 128), {},
         (128, 4, False, True, True), (128, 2, False, True, False)),
        ((2, 64, 8, 8192, 8192, 128, 128), {},
         (128, 2, False, True, True), (128, 1, False, True, False)),
        # In windows a tile of keys visits one query head after the other.
        ((4, 32, 8, 4096, 4096, 128, 128), {"left": 1024, "right": 0},
         (128, 4, False, False, False), (128, 8, False, False, False)),
        ((4, 32, 8, 4096, 4096, 128, 128), {"left": 3500, "right": 0},
         (128, 4, False, False, False), (128, 8, False, True, False)),
    ],
)  # fmt: skip
def test_order_of_keys(sizes, options, by_default, serialized):
    for deterministic, expected in ((False, by_default), (True, serialized)):
        order = plan("bwd", *sizes, **options, deterministic=deterministic).key_order
        *found, last_set = dataclasses.astuple(order)
        assert tuple(found) == expected
        batch, _, heads, _, seqlen_k = sizes[:5]
        pair = 2 if sizes[5] > 128 else 1
        tiles, resident = -(-seqlen_k // 128), 132 // pair
        in_last, least = batch * heads - last_set, -(-3 * resident // tiles) if options else 1
        assert last_set % found[1] == 0 and min(least, batch * heads) <= in_last < least + found[1]


def test_serialized_adds_never_share_l2():
    """Semaphores and the counter of those that do are in the same memory."""
    seen = set()
    for seqlen_q, seqlen_k, right, deterministic in itertools.product(
        (4096, 70_000), (512, 8192), (-1, 0), (False, True)
    ):
        sizes = (1, 8, 8, seqlen_q, seqlen_k, 128, 128)
        options = {"right": right, "deterministic": deterministic}
        found = plan("bwd", *sizes, **options)
        seen.add((found.dq_accumulate, found.shares_l2))
    assert seen == {
        ("atomic", False),
        ("atomic", True),
        ("first_stores", False),
        ("serialized", False),
    }
