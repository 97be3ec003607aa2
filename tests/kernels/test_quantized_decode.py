"""Kernels that read caches of 8 bits, against fp64 over the numbers that these stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flash_cute
from flash_cute.functional import quantized_kvcache
from flash_cute.native import library
from flash_cute.testing import bounds
from flash_cute.testing.kernels import decode_kernels, parse
from flash_cute.testing.kvcache import CacheCase
from flash_cute.testing.pairwise import pairwise
from flash_cute.testing.quantized_kvcache import E4M3, INT8, check, make_quantized_inputs

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = [E4M3, INT8]
KERNELS = decode_kernels(eight_bits=True)
KINDS = [("heads", "heads"), ("tokens", "tokens"), ("heads", "tokens"), ("tokens", "heads")]


def kinds_of(dtype: torch.dtype) -> list[tuple[str, str]]:
    return [*KINDS, ("none", "none"), ("none", "tokens")] if dtype == E4M3 else KINDS


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("seqlens_q", [1, 16, 70])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(cuda, name, seqlens_q, kinds):
    """Every kernel, also those that this GPU or problem would not choose."""
    kernel = parse(name)
    case = CacheCase(
        lengths=(700, 3, 90), seqlens_q=seqlens_q, page_size=16, heads=8, heads_k=2,
        dim=kernel.dim, dim_v=kernel.dim_v, dtype=kernel.dtype, is_causal=True, softcap=20.0,
        alibi="batch", sink=True,
    )  # fmt: skip
    with library.only(name):
        check(make_quantized_inputs(case, cuda, kernel.cache_dtype, kinds))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("page_size", [None, 16])
def test_tiles_that_a_short_sequence_does_not_have(cuda, name, page_size):
    kernel = parse(name)
    case = CacheCase(
        lengths=(40, 90, 17, 3), seqlens_q=(1, 70, 0, 5), page_size=page_size, heads=8, heads_k=2,
        dim=kernel.dim, dim_v=kernel.dim_v, dtype=kernel.dtype, is_causal=True,
    )  # fmt: skip
    with library.only(name):
        for seed in range(3):
            check(make_quantized_inputs(case, cuda, kernel.cache_dtype, KINDS[seed], seed))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_long_sequences(cuda, name, kinds):
    """Several tiles of each team, and parts of keys of several CTAs."""
    kernel = parse(name)
    case = CacheCase(
        lengths=(9000, 0, 65, 2300), seqlens_q=(1, 2, 0, 3), heads=5, heads_k=1, dim=kernel.dim,
        dim_v=kernel.dim_v, dtype=kernel.dtype, is_causal=True, page_size=16, sink=True,
    )  # fmt: skip
    with library.only(name):
        check(make_quantized_inputs(case, cuda, kernel.cache_dtype, kinds))
        check(make_quantized_inputs(replace(case, page_size=None), cuda, kernel.cache_dtype, kinds))


FACTORS = {
    "dtype": DTYPES,
    "q_dtype": [BF16, FP16],
    "kinds": ["heads heads", "tokens tokens", "heads tokens", "tokens heads"],
    "heads": [(4, 4), (8, 2), (20, 1)],
    "dim": [(64, 64), (128, 128), (128, 64), (48, 80), (192, 128), (256, 256), (16, 16)],
    "seqlens_q": [1, 3, 20, (1, 0, 5, 33)],
    "page_size": [None, 1, 16, 100, 256],
    "band": [{}, {"is_causal": True}, {"window": (40, 0)}, {"window": (7, 9)}, {"window": (40, -1)},
             {"window": (-1, 9)}],
    "rules": [{}, {"softcap": 5.0}, {"alibi": "batch"}, {"sink": True},
              {"softcap": 20.0, "alibi": "heads", "sink": True, "softmax_scale": -0.1}],
    "leftpad": [False, True],
    "batch_idx": [False, True],
    "splits": [{}, {"num_splits": 1}, {"num_splits": 5}, {"split_size": 128}],
}  # fmt: skip


def excluded(pair: Any) -> bool:
    if pair.keys() == {"batch_idx", "page_size"}:
        return pair["batch_idx"] and pair["page_size"] is not None
    return False


@pytest.mark.parametrize("row", pairwise(FACTORS, excluded), ids=str)
def test_pairs(device, row):
    """Every pair of features meets."""
    row = dict(row)
    (heads, heads_k), (dim, dim_v) = row.pop("heads"), row.pop("dim")
    dtype, kinds = row.pop("dtype"), tuple(row.pop("kinds").split())
    sizes = {"heads": heads, "heads_k": heads_k, "dim": dim, "dim_v": dim_v}
    merged = row.pop("band") | row.pop("rules") | row.pop("splits")
    case = CacheCase(lengths=(33, 0, 130, 301), dtype=row.pop("q_dtype"), **sizes, **merged, **row)
    check(make_quantized_inputs(case, device, dtype, kinds))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_dtype", [BF16, FP16], ids=str)
def test_descales_that_differ_much(device, q_dtype, dtype):
    """Weights times descales of tokens stay within fp16, whatever comes first."""
    case = CacheCase(lengths=(900, 300), heads=8, heads_k=2, dim=64, dtype=q_dtype, page_size=16)
    inputs = make_quantized_inputs(case, device, dtype, ("tokens", "tokens"))
    for order in (1, -1):
        powers = torch.linspace(-order, order, 16, device=device)
        factor = (2.0 ** (20 * powers)).view(1, 16, 1) if q_dtype == BF16 else 1.0
        arguments = inputs.arguments | {"v_descale": inputs.arguments["v_descale"] * factor}
        wide = inputs.wide.changed(
            v_cache=arguments["v_cache"].double() * arguments["v_descale"].double()[..., None]
        )
        out, _ = replace(inputs, arguments=arguments).run()
        expected = wide.reference().out
        error = (out.double() - expected).abs().max()
        assert error <= 2.0**-7 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_of_any_size(cuda, dtype):
    """bf16 has more exponents than the f16 of products: each row is scaled by a power of two."""
    case = CacheCase(lengths=(200, 77), seqlens_q=4, heads=2, heads_k=2, dim=128, dtype=BF16)
    inputs = make_quantized_inputs(case, cuda, dtype)
    q, descale = inputs.arguments["q"], inputs.arguments["k_descale"]
    for power in (-60, -20, 20, 60):
        scaled = inputs.arguments | {"q": q * 2.0**power, "k_descale": descale * 2.0**-power}
        keys = inputs.wide["k_cache"] * 2.0**-power
        wide = inputs.wide.changed(q=scaled["q"], k_cache=keys)
        check(replace(inputs, arguments=scaled, wide=wide))
    # One number of a row is far above the others, which still count.
    loud = q.clone()
    loud[..., 5] = 2.0**20
    arguments = inputs.arguments | {"q": loud}
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].clone()
    arguments["k_cache"].view(INT8)[..., 5] = 0
    keys = inputs.wide["k_cache"].clone()
    keys[..., 5] = 0
    wide = inputs.wide.changed(q=loud, k_cache=keys)
    check(replace(inputs, arguments=arguments, wide=wide))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_number_is_widened_exactly(cuda, dtype, dim):
    """The values of all codes come back through one key that is seen alone."""
    codes = torch.arange(-128, 128, device=cuda).to(INT8).view(1, 256 // dim, 1, dim)
    codes = codes if dtype == INT8 else codes.masked_fill((codes & 127) == 127, 0)
    for row in range(256 // dim):
        v = codes[:, row : row + 1].contiguous().view(dtype)
        q = torch.zeros(1, 1, 1, dim, dtype=FP16, device=cuda)
        descale = torch.full((1, 1), 0.25, device=cuda)
        out, _ = torch.ops.flash_cute.attend_quantized_kvcache(q, v, v, None, descale)
        expected = v.float() * 0.25
        assert torch.equal(out.float(), expected)


@pytest.mark.parametrize("position", [0, 5])
def test_a_number_in_use_that_is_nan_reaches_its_outputs(cuda, position):
    case = CacheCase(lengths=(40,), heads=2, heads_k=1, dim=64, dtype=BF16)
    inputs = make_quantized_inputs(case, cuda, E4M3)
    v = inputs.arguments["v_cache"].view(INT8).clone()
    v[0, 3, 0, position] = 127
    out, _ = replace(inputs, arguments=inputs.arguments | {"v_cache": v.view(E4M3)}).run()
    assert out[..., position].isnan().all()
    others = [i for i in range(64) if i != position]
    assert out[..., others].isfinite().all()


def test_results_are_the_same_from_run_to_run(cuda):
    case = CacheCase(lengths=(4000, 77), heads=8, heads_k=2, dim=128, dtype=BF16, page_size=16)
    inputs = make_quantized_inputs(case, cuda, E4M3, ("tokens", "tokens"))
    out, lse = inputs.run()
    for _ in range(20):
        again = inputs.run()
        bounds.check_same_bits("out", again[0], out)
        bounds.check_same_bits("softmax_lse", again[1], lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_function_reads_8_bits_where_it_can(cuda, dtype, recwarn):
    """More rows a kv head than kernels take, and odd head dims, are read from a copy."""
    for dim, queries, is_copied in (
        (64, 1, False),
        (128, 16, False),
        (64, 17, True),
        (40, 1, True),
    ):
        quantized_kvcache._say.cache_clear()
        recwarn.clear()
        case = CacheCase(
            lengths=(99, 7), seqlens_q=queries, heads=8, heads_k=2, dim=dim, dtype=BF16
        )
        inputs = make_quantized_inputs(case, cuda, dtype)
        names = ("q", "k_cache", "v_cache", "cache_seqlens", "k_descale", "v_descale")
        given = {name: inputs.arguments[name] for name in names}
        got = flash_cute.flash_attn_with_kvcache(**given)
        expected = inputs.wide.reference().out
        assert (got.double() - expected).abs().max() < 0.03 * expected.abs().max()
        said = [x for x in recwarn if "no kernel reads a cache" in str(x.message)]
        assert bool(said) == is_copied


def test_head_dims_without_kernels_are_refused(cuda):
    q = torch.zeros(1, 1, 1, 40, dtype=BF16, device=cuda)
    cache = torch.zeros(1, 8, 1, 40, dtype=INT8, device=cuda)
    with pytest.raises(RuntimeError, match="multiples of 16"):
        torch.ops.flash_cute.attend_quantized_kvcache(q, cache, cache)
