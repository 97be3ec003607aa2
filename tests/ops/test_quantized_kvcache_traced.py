"""Calls over 8-bit caches in graphs, mapped, on tensors without values, and under autocast."""

from __future__ import annotations

import pytest
import torch
from eight_bits import DTYPES, E4M3, INT8, bits
from quantized_caches import BF16, INT32, Case, descale_of, good
from torch import Tensor

import flash_cute

pytestmark = pytest.mark.filterwarnings("ignore:flash_cute. no kernel reads a cache")


@pytest.mark.parametrize("kind", ["number", "batch", "tokens"])
def test_compiled(device, kind):
    torch.manual_seed(0)
    descales = [descale_of(kind, E4M3, (3, 4, 2), 2) for _ in range(2)]
    lengths = torch.tensor([1, 2], dtype=INT32)
    eager = good(k_descale=descales[0], v_descale=descales[1], cache_seqlens=lengths)
    eager = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in eager.items()}
    traced = {n: x.clone() if isinstance(x, Tensor) else x for n, x in eager.items()}
    expected = flash_cute.flash_attn_with_kvcache(**eager)
    call = torch.compile(flash_cute.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(**traced), expected)
    for name in ("k_cache", "v_cache", "k_descale"):
        if isinstance(eager[name], Tensor):
            assert torch.equal(eager[name].view(INT8), traced[name].view(INT8))


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_read_by_the_host(seed):
    """The tensors have no values."""
    case = Case(seed, DTYPES[seed % 2])
    moved = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in case.arguments.items()}
    out = flash_cute.flash_attn_with_kvcache(**moved)
    assert out.device.type == "meta" and out.dtype == case.q_dtype
    assert out.shape == (*moved["q"].shape[:-1], moved["v_cache"].shape[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vmap_appends(dtype):
    q, k = torch.randn(3, 2, 1, 4, 16).to(BF16), torch.randn(3, 2, 1, 2, 16).to(BF16)
    caches = (50 * torch.randn(3, 2, 8, 2, 16)).to(dtype)
    mapped, looped = caches.clone(), caches.clone()

    def call(q, k, cache):
        return flash_cute.flash_attn_with_kvcache(
            q, cache, cache.clone(), k, k, cache_seqlens=3, k_descale=0.02, v_descale=0.02
        )

    try:
        out = torch.vmap(call)(q, k, mapped)
    except RuntimeError as error:  # of torch 2.10, for fp8
        assert dtype == E4M3 and "Batching rule not implemented for aten::view.dtype" in str(error)
        assert torch.equal(bits(mapped), bits(looped))
        return
    for i in range(3):
        torch.testing.assert_close(out[i], call(q[i], k[i], looped[i]))
    assert torch.equal(bits(mapped), bits(looped))


def test_autocast_casts_q_and_new_keys(device):
    arguments = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in good().items()}
    expected = flash_cute.flash_attn_with_kvcache(**arguments)
    wide = {n: arguments[n].float() for n in ("q", "k", "v")}
    with torch.autocast(device, torch.bfloat16):
        out = flash_cute.flash_attn_with_kvcache(**(arguments | wide))
    assert out.dtype == BF16 and torch.equal(out, expected)
