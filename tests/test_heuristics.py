"""The choice among kernels for the same problem: from sizes alone, and near the best measured."""

from __future__ import annotations

import os
import random

import pytest
import torch

from benchmarks import rivals, timing
from benchmarks.suites import SUITES, Case, make_inputs
from flash_cute import library

preferred = torch.ops.flash_cute.preferred_forward
D128 = "fwd_sm90_bf16_plain_d128x128_"


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        # Long sequences: fewest loads. Lengths that larger tiles would overshoot: smaller ones.
        ((1, 16, 16384, 16384, 128), {}, D128 + "m192_n80_s2_w12_c1_x2"),
        ((1, 16, 16384, 16384, 128), {"window_size_right": 0}, D128 + "m192_n80_s2_w12_c1_x2"),
        ((16, 16, 1024, 1024, 128), {}, D128 + "m128_n128_s2_w8_c1_x2"),
        ((16, 16, 1024, 1024, 128), {"window_size_right": 0}, D128 + "m128_n128_s2_w8_c1_x1"),
        # Head dims that the row does not fill.
        ((16, 16, 1024, 1024, 104), {}, D128 + "m128_n128_s2_w8_c1_x2"),
        # Many sequences of one query: a cluster would leave half of its CTAs idle.
        ((1024, 16, 1, 4096, 128), {}, D128 + "m128_n128_s2_w8_c1_x1"),
        # A window: tiles are short.
        ((4, 16, 4096, 4096, 256), {"window_size_left": 64, "window_size_right": 0},
         "fwd_sm90_bf16_plain_d256x256_m128_n80_s2_w8_c1_x1"),
        ((4, 8, 4096, 4096, 256), {}, "fwd_sm90_bf16_plain_d256x256_m128_n80_s2_w8_c1_x2"),
        # No alternative.
        ((4, 32, 4096, 4096, 64), {}, "fwd_sm90_bf16_plain_d64x64_m192_n128_s2_w12_c1_x1"),
        ((4, 32, 4096, 4096, 257), {}, ""),
    ],
)  # fmt: skip
def test_picks(sizes, options, expected):
    assert preferred(*sizes, **options) == expected


def test_any_sizes_have_a_kernel_and_sequences_end_to_end_none_with_clusters():
    draw = random.Random(7)
    for _ in range(500):
        sizes = (draw.randint(0, 64), draw.randint(1, 64), draw.randint(0, 70000),
                 draw.randint(0, 70000), draw.randint(1, 256))  # fmt: skip
        left, right = draw.choice([-1, 0, 1, 300, 2**31 - 1]), draw.choice([-1, 0, 5])
        window = {"window_size_left": left, "window_size_right": right}
        for sms in (1, 2, 132):
            assert preferred(*sizes, **window, sms=sms).startswith("fwd_sm90_bf16_plain_d")
            assert preferred(*sizes, **window, sms=sms, varlen=True).endswith("_x1")


@pytest.mark.skipif(
    "FLASH_CUTE_TIMING" not in os.environ, reason="times kernels: needs a GPU alone"
)
@pytest.mark.parametrize("name", [str(c) for c in SUITES["train"] if "d64" not in str(c)])
def test_the_pick_is_within_3_percent_of_the_best(cuda, name):
    case, device = Case.parse(name), torch.device(cuda, 0)
    x = make_inputs(case, device, seed=3)
    rows = [
        id for id in library.kernels()
        if id.startswith(f"fwd_sm90_{case.dtype}_plain_d{case.dim}x{case.dim_v}_")
    ]  # fmt: skip
    works = {id: rivals.FlashCute(device, id).forward(case, x) for id in rows}
    works["pick"] = rivals.FlashCute(device).forward(case, x)
    measured = timing.interleave(works, 5, 60.0, device, timing.Monitor(device))
    ms = {name: turn.median_ms for name, turn in measured.items()}
    assert ms["pick"] <= 1.03 * min(ms.values()), ms
