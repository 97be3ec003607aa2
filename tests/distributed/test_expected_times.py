"""Which strategy `auto` takes: expected times, part by part, and the limits of each strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_cute.distributed import Links
from flash_cute.distributed.costs import Sizes
from flash_cute.distributed.strategies import expected_times, fastest

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = Sizes(total=4096, pairs=4096 * 2048, heads=24, heads_k=6, head_dim=128, dtype=BF16)
NO_LIMIT = 1e30
FREE = Links(gb_s=NO_LIMIT, tflops=NO_LIMIT, memory_gb_s=NO_LIMIT)


def test_links_are_those_of_a_hopper():
    assert Links() == Links(gb_s=360.0, tflops=600.0, memory_gb_s=3000.0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_products_are_shared_by_all_ranks(ranks: int):
    """Two of forward and five of backward, of 2 flops a pair and column of head dim."""
    times = expected_times(SIZES, ranks, replace(FREE, tflops=2.0))
    flops = (2 + 5) * 2 * SIZES.pairs * SIZES.heads * SIZES.head_dim / ranks
    assert times == pytest.approx(dict.fromkeys(("ring", "all_gather", "ulysses"), flops / 2e12))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("ranks", [2, 4])
def test_keys_and_values_travel_twice_and_their_gradients_in_fp32(ranks: int, dtype: torch.dtype):
    sizes = replace(SIZES, dtype=dtype)
    times = expected_times(sizes, ranks, replace(FREE, gb_s=3.0))
    element = {BF16: 2, FP32: 4}[dtype]
    sent = (ranks - 1) / ranks * sizes.total * 2 * sizes.heads_k * sizes.head_dim
    both = sent * (element + element + 4) / 3e9
    assert times["ring"] == times["all_gather"] == pytest.approx(both)
    # Of a rank's tokens q, out and all of k and v go to others, there and back again.
    mine = sizes.total / ranks * (ranks - 1) / ranks
    columns = (2 * sizes.heads + 2 * sizes.heads_k) * sizes.head_dim
    assert times["ulysses"] == pytest.approx(2 * element * mine * columns / 3e9)


def test_kv_heads_are_copied_to_more_ranks_than_there_are():
    links = replace(FREE, gb_s=3.0)
    few = replace(SIZES, heads_k=2)
    times = [expected_times(replace(few, heads_k=n), 8, links)["ulysses"] for n in (2, 8)]
    assert times[0] == pytest.approx(times[1])  # 8 of either are sent


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_merges_outputs_in_memory(ranks: int):
    times = expected_times(SIZES, ranks, replace(FREE, memory_gb_s=5.0))
    merged = (ranks - 1) / ranks * SIZES.total * SIZES.heads * SIZES.head_dim * 24 / 5e9
    none = pytest.approx(0, abs=1e-12)
    assert times == {"ring": pytest.approx(merged), "all_gather": none, "ulysses": none}


def test_communication_overlaps_products():
    """The ring's altogether, half of all_gather's, nothing of ulysses."""
    slow, fast = replace(FREE, tflops=1e-3), replace(FREE, gb_s=3.0)
    products = expected_times(SIZES, 2, slow)["ring"]
    travels = expected_times(SIZES, 2, fast)
    both = expected_times(SIZES, 2, Links(gb_s=3.0, tflops=1e-3, memory_gb_s=NO_LIMIT))
    assert both["ring"] == pytest.approx(products) and products > travels["ring"]
    assert both["all_gather"] == pytest.approx(products + travels["all_gather"] / 2)
    assert both["ulysses"] == pytest.approx(products + travels["ulysses"])


def test_all_gather_holds_16_gib_of_keys_and_values():
    fitting = Sizes(2**23, 2**40, 4, 4, 128, BF16)  # 2^23 x 2 x 4 x 128 x 2 bytes
    assert "all_gather" in expected_times(fitting, 4, Links())
    assert "all_gather" not in expected_times(replace(fitting, total=2**23 + 1), 4, Links())
    assert "all_gather" not in expected_times(replace(fitting, dtype=FP32), 4, Links())
    assert "ring" in expected_times(replace(fitting, total=2**30), 4, Links())


def test_ulysses_wants_heads_that_ranks_divide():
    for ranks in range(1, 9):
        assert ("ulysses" in expected_times(SIZES, ranks, Links())) is (24 % ranks == 0)


def test_the_least_time_is_taken_all_gather_in_doubt():
    """Where others are no faster than by one part in a hundred."""
    assert fastest(SIZES, 4, replace(FREE, tflops=1.0)) == "all_gather"  # all are alike
    assert fastest(SIZES, 4, replace(FREE, memory_gb_s=1.0)) == "all_gather"
    assert fastest(SIZES, 4, replace(FREE, gb_s=1.0)) == "ulysses"
    assert fastest(replace(SIZES, heads=23, heads_k=23), 4, replace(FREE, tflops=1.0)) == (
        "all_gather"
    )
    long = Sizes(2**26, 2**51, 23, 23, 128, BF16)
    assert fastest(long, 4, Links()) == "ring"
    balanced = Links(gb_s=3.0, tflops=1e-3, memory_gb_s=NO_LIMIT)
    odd = replace(SIZES, heads=23, heads_k=23)
    times = expected_times(odd, 2, balanced)
    assert (fastest(odd, 2, balanced) == "ring") is (times["all_gather"] > 1.01 * times["ring"])
