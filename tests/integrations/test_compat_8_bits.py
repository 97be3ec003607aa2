"""FlashAttention-3's descales over a cache of 8 bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flash_cute
from flash_cute.compat import flash_attn_3_raw, flash_attn_interface


@pytest.mark.filterwarnings("ignore:flash_cute. no kernel reads a cache")
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("of_k", [None, "heads"])
@pytest.mark.parametrize("raw", [False, True])
def test_flash_attn_3_s_descales_over_an_fp8_cache(device, q_dtype, packed, of_k, raw):
    """Scores are multiplied by those of q and of k, (batch, heads_k) both, beside fp64."""
    q = torch.randn(2, 3, 4, 16, device=device).to(q_dtype)
    caches = torch.randn(2, 2, 40, 2, 16, device=device).to(torch.float8_e4m3fn)
    lengths = torch.tensor([33, 40], dtype=torch.int32, device=device)
    q_descale, k_descale, v_descale = torch.rand(3, 2, 2, device=device) + 0.5
    given = {"q_descale": q_descale, "v_descale": v_descale}
    if of_k == "heads":
        given["k_descale"] = k_descale
    else:
        k_descale = torch.ones_like(q_descale)
    if packed:
        offsets = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
        given |= {"cu_seqlens_q": offsets, "max_seqlen_q": 3}
    of_call = q.flatten(0, 1) if packed else q
    if raw:
        out, lse, *_ = flash_attn_3_raw._flash_attn_forward(
            of_call, *caches, seqused_k=lengths, softmax_scale=0.3, causal=True, **given
        )
    else:
        out, lse, *_ = flash_attn_interface.flash_attn_with_kvcache(
            of_call, *caches, cache_seqlens=lengths, softmax_scale=0.3, causal=True,
            return_softmax_lse=True, **given,
        )  # fmt: skip
    assert out.dtype == (torch.float16 if q_dtype == torch.float16 else torch.bfloat16)
    lse = lse.unflatten(1, (2, 3)).transpose(0, 1) if packed else lse
    for b, n in enumerate(lengths.tolist()):
        k, v = (caches[i, b, :n].double() for i in range(2))
        k, v = k * (q_descale * k_descale)[b, :, None], v * v_descale[b, :, None]
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = 0.3 * torch.einsum("ihd,jhd->hij", q[b].double(), k)
        hidden = torch.ones(3, n, dtype=torch.bool, device=device).triu(n - 2)
        p = scores.masked_fill(hidden, -torch.inf)
        expected = torch.einsum("hij,jhd->ihd", p.softmax(-1), v)
        got = out.view(2, 3, 4, 16)[b].double()
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[b].double(), p.logsumexp(-1), rtol=1e-2, atol=2e-2)


def test_flash_attn_3_s_descales_that_are_refused():
    q = torch.randn(2, 1, 4, 16).bfloat16()
    cache = torch.randn(2, 6, 2, 16).to(torch.float8_e4m3fn)
    call = partial(flash_attn_interface.flash_attn_with_kvcache, q, cache, cache)
    for wrong, match in (
        (torch.ones(2, 4), r"q_descale has shape \(2, 4\)"),
        (torch.ones(2, 2).bfloat16(), "q_descale has dtype torch.bfloat16"),
        (0.0, "q_descale is 0.0"),
        (torch.ones(2, 2, device="meta"), "q_descale is on meta"),
    ):
        with pytest.raises(RuntimeError, match=match):
            call(q_descale=wrong)


@pytest.mark.filterwarnings("ignore:flash_cute. no kernel reads a cache")
@pytest.mark.parametrize("queries", [2, 50])  # of few and of many rows a kv head
@pytest.mark.parametrize("raw", [False, True])
def test_flash_attn_3_s_queries_of_e4m3(device, raw, queries):
    """They and their descales reach the function as they are; new keys are not divided by them."""
    q = torch.randn(2, queries, 4, 16, device=device).to(torch.float8_e4m3fn)
    caches = torch.randn(2, 2, 90, 2, 16, device=device).to(torch.float8_e4m3fn).unbind()
    new = torch.randn(2, 2, 3, 2, 16, device=device).bfloat16().unbind()
    lengths = torch.tensor([73, 80], dtype=torch.int32, device=device)
    descales = torch.rand(3, 2, 2, device=device) + 0.5
    given = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    copies = [x.clone() for x in caches]
    if raw:
        out, lse, *_ = flash_attn_3_raw._flash_attn_forward(
            q, *caches, *new, seqused_k=lengths, softmax_scale=0.3, causal=True, **given
        )
    else:
        out, lse, *_ = flash_attn_interface.flash_attn_with_kvcache(
            q, *caches, *new, cache_seqlens=lengths, softmax_scale=0.3, causal=True,
            return_softmax_lse=True, **given,
        )  # fmt: skip
    expected = flash_cute.flash_attn_with_kvcache(
        q, *copies, *new, cache_seqlens=lengths, softmax_scale=0.3, causal=True,
        return_softmax_lse=True, **given,
    )  # fmt: skip
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for x, copy, row, descale in zip(caches, copies, new, descales[1:], strict=True):
        assert torch.equal(x.view(torch.int8), copy.view(torch.int8))
        stored = x[0, 73:76].float() * descale[0, :, None]
        torch.testing.assert_close(stored, row[0].float(), rtol=2**-4, atol=2**-9)
