"""Gradients of the public functions: packed tensors, torch.func, forward mode and checkpoints."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from checks import leaf, same_results
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flash_cute
from flash_cute.testing import bounds
from flash_cute.testing.cases import Case, make_inputs

BF16 = torch.bfloat16


def test_packed_gradient_of_lse_and_sink(device):
    inputs = make_inputs(Case(seqlen_q=70, seqlen_k=70, sink=True, dtype=BF16), device)
    qkv, sink = leaf(torch.stack((inputs.q, inputs.k, inputs.v), 2)), leaf(inputs.options["sink"])
    out, lse = flash_cute.flash_attn_qkvpacked_func(qkv, sink=sink, return_lse=True)
    dqkv, dsink = torch.autograd.grad((out, lse), (qkv, sink), (inputs.dout, inputs.dlse))
    grads = dict(zip("qkv", dqkv.unbind(2), strict=True)) | {"sink": dsink}
    bounds.check_gradients(grads, inputs, out.detach(), with_dlse=True)


def test_a_sink_alone_has_its_gradient(device):
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70, sink=True, dtype=BF16), device)
    sink = leaf(inputs.options["sink"])
    dsinks = []
    for q in (inputs.q, leaf(inputs.q)):
        out = flash_cute.flash_attn_func(q, inputs.k, inputs.v, sink=sink, deterministic=True)
        dsinks += torch.autograd.grad(out, sink, inputs.dout)
    assert dsinks[0].any()
    bounds.check_same_bits("dsink", *dsinks)


def test_packed_q_of_its_own_needs_no_gradient(device):
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70, dtype=BF16), device)
    kv = leaf(torch.stack((inputs.k, inputs.v), 2))
    out = flash_cute.flash_attn_kvpacked_func(inputs.q, kv)
    (dkv,) = torch.autograd.grad(out, kv, inputs.dout)
    expected = inputs.backward(*inputs.forward()[:2])
    bounds.check_same_bits("dk", dkv[:, :, 0], expected["k"])
    bounds.check_same_bits("dv", dkv[:, :, 1], expected["v"])


def test_packed_double_backward_raises(device):
    """Also where the result depends on qkv in another way, and where dout does not."""
    inputs = make_inputs(Case(dtype=BF16), device)
    qkv = leaf(torch.stack((inputs.q, inputs.k, inputs.v), 2))
    out = flash_cute.flash_attn_qkvpacked_func(qkv)
    for loss in (out.sum(), out.square().sum()):
        (grad,) = torch.autograd.grad(loss, qkv, create_graph=True)
        (once,) = torch.autograd.grad(loss, qkv, retain_graph=True)
        bounds.check_same_bits("dqkv", grad.detach(), once)
        with pytest.raises(NotImplementedError, match="not differentiable again"):
            torch.autograd.grad(grad.square().sum() + (2 * qkv).sum(), qkv, retain_graph=True)


@pytest.mark.parametrize("name", ["cu_seqlens", "alibi_slopes"])
def test_packed_inputs_that_change_before_backward_are_noticed(device, name):
    qkv = leaf(torch.randn(60, 3, 4, 32, device=device, dtype=BF16))
    changing = {
        "cu_seqlens": torch.tensor([0, 20, 60], dtype=torch.int32, device=device),
        "alibi_slopes": torch.rand(4, device=device),
    }
    out = flash_cute.flash_attn_varlen_qkvpacked_func(
        qkv, changing["cu_seqlens"], 40, alibi_slopes=changing["alibi_slopes"]
    )
    changing[name].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_derivatives_in_forward_mode_are_refused(device):
    q, k, v = (torch.randn(1, 8, 2, 16, device=device, dtype=BF16) for _ in range(3))
    for attend in (flash_cute.flash_attn_func, torch.ops.flash_cute.fwd):
        with pytest.raises(NotImplementedError, match="forward mode"):
            torch.func.jvp(lambda q, f=attend: f(q, k, v), (q,), (q,))
    packed = torch.stack((q, k, v), 2)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(flash_cute.flash_attn_qkvpacked_func, (packed,), (packed,))


def test_derivatives_of_inference_in_forward_mode_are_refused(device):
    """They would be 0 without a word."""
    q = torch.randn(1, 1, 2, 16, device=device, dtype=BF16)
    cache = torch.randn(1, 8, 2, 16, device=device, dtype=BF16)
    partial = torch.randn(2, 3, 16, device=device)
    lse, out_lse = torch.randn(2, 3, device=device), torch.empty(1, 2, 1, device=device)
    calls = (
        (lambda q: flash_cute.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5), q),
        (lambda k: flash_cute.flash_attn_with_kvcache(q, k, cache, cache_seqlens=5), cache),
        (lambda x: flash_cute.flash_attn_combine(x, lse), partial),
        (lambda q: torch.ops.flash_cute.fwd.out(q, q, q, out=q.clone(), softmax_lse=out_lse), q),
    )
    for call, x in calls:
        with (
            forward_ad.dual_level(),
            pytest.raises(NotImplementedError, match="forward mode"),
        ):
            call(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("own_q", [False, True])
def test_packed_gradients_where_unpacked_ones_work(device, own_q):
    """Under a checkpoint whose gradient has a graph, and for several gradients of out at once."""
    inputs = make_inputs(Case(seqlen_q=20, seqlen_k=20, dtype=BF16), device)
    parts = (inputs.k, inputs.v) if own_q else (inputs.q, inputs.k, inputs.v)
    packed = leaf(torch.stack(parts, 2))

    def attend(packed):
        if own_q:
            return flash_cute.flash_attn_kvpacked_func(inputs.q, packed, deterministic=True)
        return flash_cute.flash_attn_qkvpacked_func(packed, deterministic=True)

    (expected,) = torch.autograd.grad(attend(packed), packed, inputs.dout)
    out = checkpoint(attend, packed, use_reentrant=False)
    (grad,) = torch.autograd.grad(out, packed, inputs.dout, create_graph=True)
    bounds.check_same_bits("dpacked", grad.detach(), expected)
    both = torch.stack((inputs.dout, 2 * inputs.dout))
    (grads,) = torch.autograd.grad(attend(packed), packed, both, is_grads_batched=True)
    bounds.check_same_bits("dpacked", grads[0], expected)
    bounds.check_same_bits("dpacked, doubled", grads[1], 2 * expected)


def test_mapped_inputs_keep_their_gradients(device):
    """Inside torch.func.vmap tensors do not say whether they need one."""
    x = leaf(torch.randn(3, 1, 8, 2, 16, device=device, dtype=BF16))
    mapped = torch.func.vmap(flash_cute.flash_attn_func)(x, x, x)
    one_by_one = torch.stack([flash_cute.flash_attn_func(y, y, y) for y in x])
    bounds.check_same_bits("out", mapped.detach(), one_by_one.detach())
    grads = [torch.autograd.grad(out.float().square().sum(), x)[0] for out in (mapped, one_by_one)]
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)
    leaves = [leaf(torch.randn(3, 1, 8, 2, 16, device=device, dtype=BF16)) for _ in "qkv"]
    mapped = torch.func.vmap(flash_cute.flash_attn_func)(*leaves)
    one_by_one = torch.stack([flash_cute.flash_attn_func(*x) for x in zip(*leaves, strict=True)])
    both = [torch.autograd.grad(out.float().square().sum(), leaves) for out in (mapped, one_by_one)]
    for name, got, expected in zip(("dq", "dk", "dv"), *both, strict=True):
        if device == "cpu" or name != "dq":
            bounds.check_same_bits(name, got, expected)


def attention_of_squares(q, k, v, sink):
    out, lse = flash_cute.flash_attn_func(q, k, v, causal=True, sink=sink, return_lse=True)
    return out.float().square().sum() + lse.sum()


def test_gradients_of_torch_func(device):
    """Of one call, of a mapped one, and mapped: as autograd's own, one by one."""
    torch.manual_seed(5)
    batches = [torch.randn(3, 1, 8, 2, 16, device=device) for _ in "qkv"]
    batches.append(torch.randn(3, 2, device=device))
    everything = {"argnums": (0, 1, 2, 3)}
    grad, vmap = partial(torch.func.grad, **everything), torch.func.vmap
    expected = []
    for args in zip(*batches, strict=True):
        leaves = [leaf(x) for x in args]
        expected.append(torch.autograd.grad(attention_of_squares(*leaves), leaves))
    one_by_one = [grad(attention_of_squares)(*args) for args in zip(*batches, strict=True)]
    mapped = vmap(grad(attention_of_squares))(*batches)
    of_mapped = grad(lambda *args: vmap(attention_of_squares)(*args).sum())(*batches)
    _, pullback = torch.func.vjp(vmap(attention_of_squares), *batches)
    for got in (
        [torch.stack(x) for x in zip(*one_by_one, strict=True)],
        mapped, of_mapped, pullback(torch.ones(3, device=device)),
    ):  # fmt: skip
        for x, *ys in zip(got, *expected, strict=True):
            torch.testing.assert_close(x, torch.stack(ys))


def test_gradients_of_torch_func_of_packed_and_varlen(device):
    qkv = torch.randn(8, 3, 2, 16, device=device, dtype=BF16)
    offsets = torch.tensor([0, 3, 8], device=device, dtype=torch.int32)

    def packed(qkv):
        return flash_cute.flash_attn_varlen_qkvpacked_func(qkv, offsets, 5, deterministic=True)

    x = leaf(qkv)
    (expected,) = torch.autograd.grad(packed(x).sum(), x)
    bounds.check_same_bits("dqkv", torch.func.grad(lambda x: packed(x).sum())(qkv), expected)
    x = leaf(qkv)
    out, _ = torch.func.vjp(packed, x)
    (through,) = torch.autograd.grad(out.sum(), x)
    bounds.check_same_bits("dqkv", through, expected)


def test_second_derivatives_of_torch_func_are_refused(device):
    """For every way to request them, and none is zero by mistake."""
    q, k, v = (torch.randn(1, 8, 2, 16, device=device, dtype=BF16) for _ in range(3))

    def loss(q):
        return flash_cute.flash_attn_func(q, k, v).square().sum()

    grad, x = torch.func.grad(loss), leaf(q)
    for ask in (
        lambda: torch.func.grad(lambda q: grad(q).sum())(q),
        lambda: torch.func.vjp(grad, q)[1](q),
        lambda: torch.autograd.grad(grad(x).sum(), x),
    ):
        with pytest.raises(NotImplementedError, match="not differentiable again"):
            ask()
    for ask in (lambda: torch.func.jvp(grad, (q,), (q,)), lambda: torch.func.hessian(loss)(q)):
        with pytest.raises(NotImplementedError, match="forward mode"):
            ask()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpoint_replays_dropout(device, dropout_p, use_reentrant):
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70, dtype=BF16), device)

    def attend(q, k, v):
        return flash_cute.flash_attn_func(q, k, v, dropout_p=dropout_p)

    results = []
    for run in (attend, lambda *args: checkpoint(attend, *args, use_reentrant=use_reentrant)):
        leaves = [leaf(x) for x in (inputs.q, inputs.k, inputs.v)]
        torch.manual_seed(11)
        out = run(*leaves)
        out.backward(inputs.dout)
        results.append((out, *(x.grad for x in leaves)))
    same_results(*results)


@pytest.mark.parametrize("transform", [False, True], ids=["backward", "grad"])
def test_ops_refuse_slopes_that_want_a_gradient(device, transform):
    q = torch.randn(1, 5, 2, 8, device=device, dtype=torch.float32)
    slopes = torch.ones(2, device=device)

    def attend(slopes):
        return torch.ops.flash_cute.fwd(q, q, q, alibi_slopes=slopes)[0].sum()

    with pytest.raises(NotImplementedError, match="alibi_slopes requires grad"):
        if transform:
            torch.func.grad(attend)(slopes)
        else:
            attend(slopes.requires_grad_())


def test_tensors_that_outlive_a_transform_are_what_they_hold():
    """Also where they are saved for backward."""
    q, k, v = torch.randn(3, 1, 9, 2, 16).unbind()
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(k)
    q.requires_grad_()
    expected, found = (
        torch.autograd.grad(flash_cute.flash_attn_func(q, x, v).square().sum(), q)
        for x in (k, *kept)
    )
    assert torch.equal(*expected, *found)
