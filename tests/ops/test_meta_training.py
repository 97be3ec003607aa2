"""Training steps of tensors without memory, on meta and under FakeTensorMode: each tensor has its
own place there, though all of them say that they begin at one address."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_results_in_place import FUNCTIONS
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute

WAYS = ["meta", "fake", "fake, mode left"]
if torch.cuda.is_available():  # autograd asks for a stream of the device
    WAYS.append("fake cuda")
OPS = torch.ops.flash_cute


def place(way: str) -> tuple[Any, str]:
    """The mode, and the device of tensors that are made inside of it."""
    if way == "meta":
        return nullcontext(), "meta"
    return FakeTensorMode(allow_non_fake_inputs=True), "cuda" if "cuda" in way else "cpu"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [x for x in FUNCTIONS if x != "sdpa"])
def test_functions(name, way):
    mode, device = place(way)
    if name in ("tiled", "module") and "cuda" in way:
        pytest.skip("asks the GPU for its shared memory")
    with mode:
        tensors = [torch.randn(2, 9, 4, 16, device=device, requires_grad=True) for _ in "qkv"]
    with nullcontext() if "left" in way else mode:
        found = FUNCTIONS[name](*tensors)
        out = found[0] if isinstance(found, tuple) else found
        out.sum().backward()
    for x in tensors:
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.device == x.device


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("packed", ["qkv", "kv"])
@pytest.mark.parametrize("is_varlen", [False, True])
def test_leaves_that_are_packed(packed, is_varlen, way):
    mode, device = place(way)
    parts = len(packed)
    with mode:
        shape = (18, parts, 4, 16) if is_varlen else (2, 9, parts, 4, 16)
        leaf = torch.randn(shape, device=device, requires_grad=True)
        q = torch.randn(*shape[:-3], 4, 16, device=device)
        cu = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    first = (leaf,) if packed == "qkv" else (q, leaf)
    lengths = ((cu, 9) if packed == "qkv" else (cu, cu, 9, 9)) if is_varlen else ()
    name = f"flash_attn_{'varlen_' if is_varlen else ''}{packed}packed_func"
    with nullcontext() if "left" in way else mode:
        getattr(flash_cute, name)(*first, *lengths).sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_out_overloads_into_parts_of_one_tensor(way, dtype):
    """dq, dk and dv, in fp32 also of 16 bits, are slices, as q, k and v are."""
    mode, device = place(way)
    with mode:
        qkv = torch.randn(2, 9, 3, 4, 16, device=device, dtype=torch.bfloat16)
        grads = torch.empty(2, 9, 3, 4, 16, device=device, dtype=dtype)
        out, lse, _, _ = OPS.fwd(*qkv.unbind(2))
        written = dict(zip(("dq", "dk", "dv"), grads.unbind(2), strict=True))
        OPS.bwd.out(out, *qkv.unbind(2), out, lse, **written)
        OPS.fwd.out(*qkv.unbind(2), out=out, softmax_lse=lse)
        flash_cute.mha.mha_fwd(*qkv.unbind(2), out_=torch.empty_like(out))
        flash_cute.flash_attn_func(*qkv.unbind(2), out=torch.empty_like(out))


@pytest.mark.parametrize("way", ["meta", "fake"])
def test_caches_that_are_parts_of_one_tensor(way):
    mode, device = place(way)
    with mode:
        caches = torch.zeros(2, 3, 16, 2, 16, device=device)
        q, new = (torch.zeros(3, 1, n, 16, device=device) for n in (4, 2))
        out = flash_cute.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=5)
    assert out.shape == q.shape


def test_real_tensors_still_have_places():
    qkv = torch.randn(2, 9, 3, 4, 16)
    out, lse, _, _ = OPS.fwd(*qkv.unbind(2))
    q, k, v = qkv.unbind(2)
    with pytest.raises(ValueError, match="dk shares memory with k"):
        OPS.bwd.out(out, q, k, v, out, lse, dq=torch.empty_like(q), dk=k, dv=torch.empty_like(v))
