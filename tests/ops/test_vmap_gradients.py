"""Gradients under torch.vmap, and is_grads_batched: each takes one call of backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from checks import leaf
from vmap_calls import (
    BATCH,
    DIM,
    DIM_V,
    HEADS,
    HEADS_K,
    ROWS_K,
    SAMPLES,
    calls_of_the_op,
    dense,
    randn,
)

import flash_cute


def attention(q, k, v, sink):
    out, lse = flash_cute.flash_attn_func(q, k, v, causal=True, sink=sink, return_lse=True)
    return out.square().sum() + lse.sum()


def test_mapped_gradients_are_one_call(device):
    """Per-sample gradients, of sinks too, and those of autograd outside of vmap."""
    args = (*dense(device, {"q": 0, "k": 0, "v": 0}, "q k v").values(), randn(device, HEADS))
    mapped = torch.vmap(torch.func.grad(attention, (0, 1, 2, 3)), (0, 0, 0, None))
    with calls_of_the_op(2):  # forward and backward
        grads = mapped(*args)
    leaves = [leaf(x) for x in args]
    with calls_of_the_op(2):
        sums = torch.vmap(attention, (0, 0, 0, None))(*leaves)
        total = torch.autograd.grad(sums.sum(), leaves)
    torch.testing.assert_close(grads[:3], total[:3])
    torch.testing.assert_close(grads[3].sum(0), total[3])
    for i in range(SAMPLES):
        leaves = [leaf(x) for x in (*(x[i] for x in args[:3]), args[3])]
        expected = torch.autograd.grad(attention(*leaves), leaves)
        torch.testing.assert_close(tuple(x[i] for x in grads), expected)


def test_vmap_in_vmap(device):
    x = randn(device, 2, SAMPLES, BATCH, ROWS_K, HEADS_K, DIM)
    shared = x[0, 0]

    def attend(q, k):
        return flash_cute.flash_attn_func(q, k, shared)

    twice = torch.vmap(torch.vmap(attend, (0, None)), (0, 0))
    with calls_of_the_op(1):
        got = twice(x, x[:, 0])
    for i in range(2):
        for j in range(SAMPLES):
            torch.testing.assert_close(got[i, j], attend(x[i, j], x[i, 0]))


def test_jacobians_are_one_call_backward(device):
    """By torch.func, and by autograd with several gradients at once."""
    q, k, v = dense(device, {}, "q k v").values()
    q, k = q[:, :3], k[:, :, :1]

    def attend(q):
        return flash_cute.flash_attn_func(q[:, :, :2], k, v[:, :, :1]).sum((1, 2))

    x = leaf(q)
    rows = [torch.autograd.grad(y, x, retain_graph=True)[0] for y in attend(x).flatten()]
    expected = torch.stack(rows).view(BATCH, DIM_V, *q.shape)
    vectorized = partial(torch.autograd.functional.jacobian, attend, vectorize=True)
    for jacobian in (torch.func.jacrev(attend), vectorized):
        with calls_of_the_op(2):
            got = jacobian(q)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("form", ["dense", "packed", "varlen", "varlen_packed"])
def test_several_gradients_at_once(device, form):
    """``is_grads_batched``: one call of backward, of sinks and lse, too."""
    qkv = randn(device, BATCH * ROWS_K, 3, HEADS_K, DIM)
    sink = leaf(randn(device, HEADS_K))
    offsets = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * ROWS_K
    asked = {"sink": sink, "return_lse": True, "deterministic": True}
    x = leaf(qkv if "varlen" in form else qkv.unflatten(0, (BATCH, ROWS_K)))
    if form == "dense":
        results = flash_cute.flash_attn_func(*x.unbind(-3), **asked)
    elif form == "packed":
        results = flash_cute.flash_attn_qkvpacked_func(x, **asked)
    elif form == "varlen":
        both = (offsets, offsets, ROWS_K, ROWS_K)
        results = flash_cute.flash_attn_varlen_func(*x.unbind(-3), *both, **asked)
    else:
        results = flash_cute.flash_attn_varlen_qkvpacked_func(x, offsets, ROWS_K, **asked)
    several = [randn(device, SAMPLES, *y.shape) for y in results]
    grad = partial(torch.autograd.grad, results, (x, sink), retain_graph=True)
    with calls_of_the_op(1):
        got = grad(several, is_grads_batched=True)
    for i in range(SAMPLES):
        torch.testing.assert_close(tuple(y[i] for y in got), grad([y[i] for y in several]))


def test_nested_is_grads_batched_is_refused(device):
    q, k, v = dense(device, {}, "q k v").values()
    x = leaf(q)
    inner, outer = (flash_cute.flash_attn_func(x, k, v) for _ in range(2))
    several = partial(torch.autograd.grad, inputs=x, is_grads_batched=True)
    outer.register_hook(lambda dout: several(inner, grad_outputs=torch.stack([dout, dout]))[0][0])
    # On CUDA torch itself may refuse before: autograd's thread counts levels of its own.
    with pytest.raises((NotImplementedError, RuntimeError), match=r"inside of itself|prev_level"):
        several(outer, grad_outputs=randn(device, SAMPLES, *outer.shape))


def test_compiled_vmap(device):
    torch._dynamo.reset()
    args = tuple(dense(device, {"q": 0, "k": 0, "v": 0}, "q k v").values())
    for function in (
        flash_cute.flash_attn_func,
        torch.func.grad(lambda q, k, v: flash_cute.flash_attn_func(q, k, v).square().sum()),
    ):
        mapped = torch.vmap(function)
        compiled = torch.compile(mapped, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*args), mapped(*args))
