"""Where rows of 8-bit caches lie: pages, strides, runs of sparse calls, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from eight_bits import DTYPES, E4M3, INT8, bits
from quantized_caches import BF16, INT32, case_on, descale_of
from torch import Tensor

import flash_cute
from flash_cute import Sparse
from flash_cute.functional import quantized_kvcache

pytestmark = pytest.mark.filterwarnings("ignore:flash_cute. no kernel reads a cache")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["number", "tokens"])
def test_what_does_not_fit_is_dropped(device, dtype, kind):
    """Full caches, pages that do not exist; the rest of the rows is written."""
    caches = [torch.zeros(3, 4, 2, 8, device=device).to(dtype) for _ in range(2)]
    descales = [torch.full((3, 4, 2), 7.0, device=device) for _ in range(2)]
    table = torch.tensor([[0, 99], [-1, 1]], dtype=INT32, device=device)
    lengths = torch.tensor([3, 6], dtype=INT32, device=device)
    q = k = torch.ones(2, 3, 2, 8, device=device).to(BF16)

    def run(lengths):
        given = descales if kind == "tokens" else (0.5, 0.5)
        return flash_cute.flash_attn_with_kvcache(
            q, *caches, k, k, cache_seqlens=lengths, block_table=table, k_descale=given[0],
            v_descale=given[1],
        )  # fmt: skip

    run(lengths + 8)
    assert not any(bits(x).any() for x in caches)
    run(lengths)
    written = torch.zeros(3, 4, dtype=torch.bool)
    written[0, 3] = written[1, 2] = written[1, 3] = True
    for x, descale in zip(caches, descales, strict=True):
        assert torch.equal(bits(x).any(-1).all(-1), written)
        if kind == "tokens":
            assert torch.equal((descale != 7).all(-1).cpu(), written)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_page_of_two_sequences_has_each_one_s_descale(device, dtype):
    q = torch.randn(2, 1, 4, 16, device=device).to(BF16)
    k, v = (torch.randn(1, 8, 2, 16, device=device).mul(9).to(dtype) for _ in range(2))
    table = torch.zeros(2, 1, dtype=INT32, device=device)
    descales = torch.rand(2, 2, 2, device=device)
    out = flash_cute.flash_attn_with_kvcache(
        q, k, v, block_table=table, k_descale=descales[0], v_descale=descales[1]
    )
    for b in range(2):
        one = flash_cute.flash_attn_with_kvcache(
            q[b : b + 1], k, v, k_descale=descales[0, b], v_descale=descales[1, b]
        )
        assert torch.equal(out[b : b + 1], one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["packed", "heads_first", "slice"])
def test_caches_of_any_strides(device, dtype, layout):
    plain = case_on(device, 17, dtype, page=16, appends=True, k_kind="tokens")
    plain.run(device)
    strided = case_on(device, 17, dtype, page=16, appends=True, k_kind="tokens")
    for name in ("k_cache", "v_cache"):
        x = bits(strided.arguments[name])
        if layout == "packed":
            x = torch.cat((x, x), -1)[..., : x.shape[-1]]
        elif layout == "heads_first":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            x = torch.cat((x, x), 1)[:, : x.shape[1]]
        assert not x.is_contiguous()
        strided.arguments[name] = x.view(dtype)
    strided.run(device)
    for name in ("k_cache", "v_cache", "k_descale"):
        assert torch.equal(
            strided.ran[name].contiguous().view(INT8), plain.ran[name].contiguous().view(INT8)
        )
    strided.check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["number", "batch", "tokens"])
@pytest.mark.parametrize("page", [0, 16])
def test_sparse(device, dtype, kind, page):
    q, new = torch.randn(2, 1, 4, 32, device=device).to(BF16), {}
    shape = (2, 256, 2, 32) if not page else (40, 16, 2, 32)
    caches = [torch.randn(shape, device=device).mul(20).to(dtype) for _ in range(2)]
    caches[1] = caches[1].transpose(1, 2).contiguous().transpose(1, 2)  # another layout
    k, v = (torch.randn(2, 1, 2, 32, device=device).to(BF16) for _ in range(2))
    descales = [descale_of(kind, dtype, shape[:-1], 2) for _ in range(2)]
    descales = [x.to(device) if isinstance(x, Tensor) else x for x in descales]
    lengths = torch.tensor([200, 130], dtype=INT32, device=device)
    new = {"cache_seqlens": lengths, "k_descale": descales[0], "v_descale": descales[1]}
    if page:
        new["block_table"] = torch.randperm(40, device=device)[:32].view(2, 16).int()
    every = Sparse.topk(torch.arange(16, device=device).expand(2, 1, 2, 16), 16, seqlen_k=256)
    some = Sparse.topk(torch.tensor([[[[0, 3]] * 2]] * 2, device=device), 16, seqlen_k=256)
    dense = flash_cute.flash_attn_with_kvcache(q, *caches, k, v, **new, causal=True)
    again = flash_cute.flash_attn_with_kvcache(q, *caches, k, v, **new, causal=True, sparse=every)
    torch.testing.assert_close(dense, again, rtol=2e-2, atol=2e-2 * float(dense.abs().max()))
    few = flash_cute.flash_attn_with_kvcache(q, *caches, **new, sparse=some)
    assert not torch.allclose(few, dense)


@pytest.mark.parametrize("fits", [True, False])
def test_pages_in_use_alone_are_copied(device, fits):
    """As many as the table has entries, or if these are more than there are pages, all pages."""
    cache = torch.zeros(4 if fits else 2, 16, 2, 8, device=device).to(E4M3)
    table = torch.tensor([[0, 1, 1]], dtype=INT32, device=device)
    call = quantized_kvcache._widened(
        flash_cute.ops.typed.FwdKvcacheCall(
            torch.zeros(1, 1, 2, 8, device=device).to(BF16), cache, cache, block_table=table
        ),
        None,
        None,
    )
    assert len(call.k_cache) == len(call.v_cache) == (3 if fits else 2)


@pytest.mark.parametrize("pages", [3, 9])
@pytest.mark.parametrize("by_index", [False, True])
def test_pages_that_do_not_exist_read_as_in_16_bits(device, pages, by_index):
    q = torch.randn(2, 1, 4, 16, device=device).to(BF16)
    caches = [torch.randn(pages, 4, 2, 16, device=device).mul(30).to(E4M3) for _ in range(2)]
    if by_index:
        where = {"cache_batch_idx": torch.tensor([99, 1], dtype=INT32, device=device)}
    else:
        table = torch.tensor([[0, 99], [-1, 1]], dtype=INT32, device=device)
        where = {"block_table": table}
    expected = flash_cute.flash_attn_with_kvcache(q, *(x.to(BF16) for x in caches), **where)
    got = flash_cute.flash_attn_with_kvcache(q, *caches, **where)
    # CUDA's kernels of 16 bits round weights to bf16, those of 8 bits to fp16.
    off = 0.0 if device == "cpu" else 2**-8 * caches[1].float().abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0.0, atol=off)
