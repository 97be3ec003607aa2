"""Decoding appends one token to each sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvcache_calls import check_order, check_same

from flash_cute.native import library
from flash_cute.testing.kernels import decode_kernels, parse
from flash_cute.testing.kvcache import CacheCase, CacheInputs, check, make_cache_inputs

BF16 = torch.bfloat16
# Around multiples of 16, 64, 128 and 256 keys: the token begins or ends a block.
LENGTHS = (33, 0, 130, 301, 127, 128, 63, 64, 15, 16, 255, 256, 700)


def with_offsets(inputs: CacheInputs) -> CacheInputs:
    """The same call with new keys packed, and their offsets."""
    k, v = inputs["k"], inputs["v"]
    rows = list(range(len(k) + 1))
    return inputs.changed(k=k.flatten(0, 1), v=v.flatten(0, 1), cu_seqlens_k_new=rows)


@pytest.mark.parametrize("dim", [(64, 64), (128, 128), (128, 64), (96, 96), (40, 56), (256, 256)])
@pytest.mark.parametrize("rotary", ["", "interleaved", "halves"])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (32, 1)], ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
def test_append_of_a_token(make_cache, dim, rotary, heads, page_size):
    sizes = {"heads": heads[0], "heads_k": heads[1], "dim": dim[0], "dim_v": dim[1], "dtype": BF16}
    case = CacheCase(
        lengths=LENGTHS, seqlens_new=1, page_size=page_size, rotary=rotary, is_causal=True, **sizes
    )
    inputs = make_cache(case)
    check(inputs)
    check_same(inputs, with_offsets(inputs))


OPTIONS: list[dict[str, Any]] = [
    {"seqlens_q": 2},
    {"seqlens_q": 4, "is_causal": True},
    {"seqlens_q": 5, "is_causal": True},  # 20 rows a kv head
    {"seqlens_q": 9, "is_causal": True},  # 36 rows
    {"seqlens_q": 3, "window": (40, 0)},
    {"window": (0, 0)},
    {"window": (200, 9)},
    {"leftpad": True},
    {"batch_idx": True},
    {"packed_cache": True},
    {"rotary_seqlens": True, "seqlens_q": 2, "is_causal": True},
    {"rotary_dim": 128},
    {"rotary_dim": 12},
    {"num_splits": 1},
    {"num_splits": 5},
    {"split_size": 64},
    {"softcap": 20.0, "alibi": "heads", "sink": True, "softmax_scale": -0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
def test_append_of_a_token_with_options(make_cache, options, rotary):
    sizes = {"heads": 8, "heads_k": 2, "dim": 128, "dtype": torch.float16}
    inputs = make_cache(
        CacheCase(lengths=LENGTHS, seqlens_new=1, **sizes, **({"rotary": rotary} | options))
    )
    check(inputs)
    check_same(inputs, with_offsets(inputs))


@pytest.mark.parametrize("name", decode_kernels())
def test_append_of_a_token_in_every_kernel(cuda, name):
    kernel = parse(name)
    sizes = {"heads": 8, "heads_k": 2, "dim": kernel.dim, "dim_v": kernel.dim_v}
    case = CacheCase(
        lengths=LENGTHS, seqlens_new=1, **sizes, rotary="halves", dtype=kernel.dtype, page_size=16
    )
    with library.only(name):
        check(make_cache_inputs(case, cuda))


@pytest.mark.parametrize("page_size", [None, 2, 16])
def test_append_to_many_short_sequences(make_cache, device, page_size):
    """A CTA has splits of many sequences, some of a single tile; the CPU has none."""
    lengths = tuple(i * 37 % 290 for i in range(400 if device == "cuda" else 60))
    case = CacheCase(
        lengths=lengths, seqlens_new=1, page_size=page_size, rotary="halves", heads=4, heads_k=2,
        dim=64, is_causal=True, dtype=BF16,
    )  # fmt: skip
    inputs = make_cache(case)
    check(inputs)
    check_same(inputs, with_offsets(inputs))


@pytest.mark.parametrize("aligned", [True, False])
def test_append_to_a_full_cache(make_cache, aligned):
    capacity = 128 if aligned else 100
    case = CacheCase(
        lengths=(capacity, capacity - 1, 30), capacity=capacity, seqlens_new=1, rotary="halves",
        dim=64, dtype=BF16,
    )  # fmt: skip
    inputs = make_cache(case)
    check(inputs)
    check_same(inputs, with_offsets(inputs))


def test_appends_in_stream_order(cuda):
    """Each call reads what earlier calls appended, and appends rows of the last call's result."""
    case = CacheCase(
        lengths=(900, 5, 300, 0), seqlens_new=1, capacity=1000, rotary="halves", heads=8, heads_k=2,
        dim=128, is_causal=True, dtype=BF16,
    )  # fmt: skip
    inputs = make_cache_inputs(case, cuda)
    positions = torch.rand(2, 1000, 16, device=cuda).to(BF16)
    inputs = inputs.changed(rotary_cos=positions[0], rotary_sin=positions[1], softmax_scale=1.0)

    def steps(pause: Any) -> list[torch.Tensor]:
        cache, outs = inputs.fresh(), []
        cache = cache.changed(cache_seqlens=cache["cache_seqlens"].clone())
        for _ in range(60):
            out = cache.run()[0]
            outs.append(out)
            pause()
            cache["cache_seqlens"].add_(1)
            pause()
            cache = cache.changed(q=out, k=out[:, :, ::4], v=out[:, :, 1::4])
        return [*outs, cache["k_cache"], cache["v_cache"]]

    check_order(steps)
