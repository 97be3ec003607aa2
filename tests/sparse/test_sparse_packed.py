"""``sparse=`` of functions that take qkv, or q and kv, in one tensor, against fp64."""

from __future__ import annotations

import pytest
import torch
from checks import leaf
from torch import Tensor

import flash_cute
from flash_cute import Sparse
from flash_cute.reference.masks import listed

LENGTHS = (130, 1, 200)


def blocks(heads: int, seqlen: int, device: str) -> Sparse:
    """Random blocks of 64 for each head, the own one among them."""
    count = -(-seqlen // 64)
    chosen = torch.rand(1, heads, count, count) < 0.5
    chosen |= torch.eye(count, dtype=torch.bool)
    return Sparse.from_block_map(chosen.to(device), (64, 64), seqlens=(seqlen, seqlen))


def attention_in_fp64(q: Tensor, k: Tensor, v: Tensor, sparse: Sparse, causal: bool) -> Tensor:
    """Of (seqlen, heads, dim)."""
    seqlen, group = len(q), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    shown = reference_mask(sparse, seqlen, q.shape[1])
    if causal:
        shown = shown & torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device).tril()
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~shown, -torch.inf).softmax(-1), v)


def reference_mask(sparse: Sparse, seqlen: int, heads: int) -> Tensor:
    seen = listed(sparse.tile_lists, sparse.tile_bits, sparse.seqlen_q, sparse.seqlen_k)
    return seen[0, :, :seqlen, :seqlen].repeat_interleave(heads // seen.shape[1], 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("is_varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("parts", [2, 3], ids=["kvpacked", "qkvpacked"])
def test_is_attention_of_the_parts(device, parts, is_varlen, causal):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    heads, heads_k, lengths = 4, 2 if parts == 2 else 4, LENGTHS if is_varlen else (200,) * 2
    shape = (sum(lengths),) if is_varlen else (2, 200)
    made = {"device": device, "dtype": dtype}
    packed = leaf(torch.randn(*shape, parts, heads_k, 64, **made))
    leaves = [packed] if parts == 3 else [leaf(torch.randn(*shape, heads, 64, **made)), packed]
    sparse = blocks(heads_k, 200, device)
    name = "varlen_" * is_varlen + ("kvpacked" if parts == 2 else "qkvpacked")
    function = getattr(flash_cute, f"flash_attn_{name}_func")
    given = []
    if is_varlen:
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        given = [offsets, offsets, 200, 200] if parts == 2 else [offsets, 200]
    out = function(*leaves, *given, causal=causal, sparse=sparse)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)

    exact = [x.detach().double().requires_grad_() for x in leaves]
    *q, k, v = exact[-1].unbind(-3)
    rows = [x.reshape(-1, *x.shape[-2:]).split(lengths) for x in (q[0] if q else exact[0], k, v)]
    expected = torch.cat(
        [attention_in_fp64(*one, sparse, causal) for one in zip(*rows, strict=True)]
    ).view(out.shape)
    right = torch.autograd.grad(expected, exact, dout.double())
    bound = 1e-4 if device == "cpu" else 0.05
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=bound)
    for got, wanted in zip(grads, right, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=bound * wanted.abs().max())


@pytest.mark.parametrize("name", ["qkvpacked", "kvpacked"])
def test_a_value_of_other_sizes_is_refused(device, name):
    qkv = torch.randn(1, 200, 3, 2, 64, device=device)
    given = [qkv] if name == "qkvpacked" else [qkv[:, :, 0], qkv[:, :, 1:]]
    function = getattr(flash_cute, f"flash_attn_{name}_func")
    with pytest.raises(ValueError, match="sparse is for 400"):
        function(*given, sparse=blocks(2, 400, device))
    with pytest.raises(TypeError, match="sparse is"):
        function(*given, sparse=torch.ones(200, 200))
