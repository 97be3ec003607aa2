"""Calls over 8-bit caches: results beside fp64, and what is written bit by bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from eight_bits import DTYPES, E4M3, bits, codes_of, values_of
from quantized_caches import BF16, FP32, KINDS, case_on, descale_of, good
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flash_cute

pytestmark = pytest.mark.filterwarnings("ignore:flash_cute. no kernel reads a cache")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(150))
def test_is_attention_over_the_dequantised_cache(device, dtype, seed):
    case_on(device, seed, dtype).check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k_kind", KINDS)
@pytest.mark.parametrize("v_kind", KINDS)
def test_kinds_of_descales(device, dtype, k_kind, v_kind):
    """In fp32 on the CPU, where each of them is nearly exact."""
    fixed = {"k_kind": k_kind, "v_kind": v_kind, "q_dtype": FP32, "appends": True}
    case_on(device, 1000 + KINDS.index(k_kind), dtype, **fixed).check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [0, 7, 16])
@pytest.mark.parametrize("seed", range(6))
def test_rotary_embedding_comes_before_rounding(device, dtype, page, seed):
    fixed = {"rotary": True, "page": page, "appends": True}
    case_on(device, 2000 + seed, dtype, **fixed).check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_as_descales_round_out_alone(device, dtype):
    """The bits of the 16-bit call over the same numbers, whose out is multiplied once. CUDA's
    kernels round weights to fp16, not to bf16, and out once."""
    q = torch.randn(2, 3, 4, 64, device=device).to(BF16)
    caches = [torch.randn(2, 50, 2, 64, device=device).mul(30).to(dtype) for _ in range(2)]
    out, lse = flash_cute.flash_attn_with_kvcache(
        q, *caches, k_descale=0.03, v_descale=0.3, return_softmax_lse=True
    )
    expected, expected_lse = flash_cute.flash_attn_with_kvcache(
        q, *(x.to(BF16) for x in caches), softmax_scale=0.03 * 64**-0.5, return_softmax_lse=True
    )
    expected = (expected.float() * 0.3).to(BF16)
    if device == "cpu":
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    else:
        largest = 0.3 * caches[1].float().abs().max().item()
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-8 * largest)
        torch.testing.assert_close(lse, expected_lse)


class Ops(TorchDispatchMode):
    """The operators that a call runs, and the most bytes of a tensor that one of them makes, but
    for those in the memory of ``caches``."""

    def __init__(self, caches: Tensor) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.memory = caches.untyped_storage().data_ptr()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        for x in results if isinstance(results, tuple) else (results,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() != self.memory:
                self.largest = max(self.largest, x.numel() * x.element_size())
        return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["number", "one", "heads", "batch", "tokens"])
def test_an_op_reads_the_8_bits(dtype, kind):
    """Nothing is as large as the cache but the cache, whatever the descale."""
    caches = torch.zeros(2, 3, 4096, 2, 64, dtype=torch.int8).view(dtype)
    k, v = torch.randn(2, 3, 1, 2, 64).to(BF16)
    descales = [descale_of(kind, dtype, (3, 4096, 2), 3) for _ in range(2)]
    with Ops(caches) as seen:
        flash_cute.flash_attn_with_kvcache(
            torch.randn(3, 1, 4, 64).to(BF16), *caches, k, v, cache_seqlens=4000,
            k_descale=descales[0], v_descale=descales[1],
        )  # fmt: skip
    assert "flash_cute::attend_quantized_kvcache" in seen.names
    assert 0 < seen.largest < caches[0].nbytes / 8


@pytest.mark.parametrize("kind", ["heads", "tokens"])
def test_tensors_of_descales_round_nothing_but_out(kind):
    """Scores of bf16 queries are as good as those of fp32: on the CPU q is not rounded again."""
    q = torch.randn(2, 3, 4, 64).to(BF16)
    caches = (30 * torch.randn(2, 2, 50, 2, 64)).to(E4M3)
    k_descale = descale_of(kind, E4M3, (2, 50, 2), 2)
    run = partial(flash_cute.flash_attn_with_kvcache, k_descale=k_descale, return_softmax_lse=True)
    out, lse = run(q, *caches)
    wide, wide_lse = run(q.float(), *caches)
    assert torch.equal(out, wide.to(BF16)) and torch.equal(lse, wide_lse)


def append(dtype: torch.dtype, device: str, k: Tensor, v: Tensor, k_descale: Any, v_descale: Any):
    """Bytes of one row of caches (2, 4, 2, 8), which k and v (2, 1, 2, 8) join."""
    caches = [torch.zeros(2, 4, 2, 8, device=device).to(dtype) for _ in range(2)]
    flash_cute.flash_attn_with_kvcache(
        torch.ones_like(k), *caches, k, v, cache_seqlens=2, k_descale=k_descale, v_descale=v_descale
    )
    for x in caches:
        assert not bits(x)[:, [0, 1, 3]].any()
    return [bits(x)[:, 2:3] for x in caches]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_16_bit_number_is_rounded_to_the_nearest(device, dtype):
    """All that bf16 has: ties, subnormal, beyond the largest, inf and NaN."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16).view(-1, 1, 2, 8).to(device)
    for unit in (1.0, 0.37):
        caches = [torch.zeros(len(every), 1, 2, 8, device=device).to(dtype) for _ in range(2)]
        q = torch.zeros_like(every)
        flash_cute.flash_attn_with_kvcache(
            q, *caches, every, every, cache_seqlens=0, k_descale=unit, v_descale=unit
        )
        expected = codes_of(every.cpu(), torch.tensor(unit), dtype)
        is_nan = every.isnan().cpu()
        for x in caches:
            assert torch.equal(bits(x)[~is_nan], expected[~is_nan])
            assert bool((bits(x)[is_nan] & 127 == (127 if dtype == E4M3 else 0)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_of_zeros_nan_and_inf(device, dtype):
    k = torch.randn(2, 1, 2, 8, device=device).to(BF16)
    k[0, 0, 0], k[0, 0, 1, 3], k[1, 0, 0, 5] = 0, torch.nan, torch.inf
    v = torch.full_like(k, 1e-40)  # its descale is subnormal, or none is left
    descales = [torch.full((2, 4, 2), 7.0, device=device) for _ in range(2)]
    codes, _ = append(dtype, device, k, v, *descales)
    assert descales[0][0, 2, 0] == 1 and not codes[0, 0, 0].any()
    for descale in descales:
        assert bool((descale[:, [0, 1, 3]] == 7).all())
    dequantised = values_of(codes, dtype) * descales[0][:, 2:3].double().cpu()[..., None]
    assert bool(dequantised[0, 0, 1].isnan().all() and dequantised[1, 0, 0].isnan().all())
    assert bool(dequantised[1, 0, 1].isfinite().all() and descales[1].isfinite().all())


@pytest.mark.parametrize("used", [None, 0, 2])
def test_no_sequences_no_queries_no_new_rows(device, used):
    for batch, queries, new in ((0, 1, 1), (2, 0, 1), (2, 1, 0), (2, 1, None)):
        arguments = good(q=torch.zeros(batch, queries, 4, 8).to(BF16), cache_seqlens=used)
        for name in ("k", "v"):
            gone = new is None or used is None
            arguments[name] = None if gone else torch.ones(batch, new, 2, 8).to(BF16)
        arguments = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}
        out = flash_cute.flash_attn_with_kvcache(**arguments)
        assert out.shape == arguments["q"].shape
