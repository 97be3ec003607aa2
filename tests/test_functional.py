"""The public functions: packed equals unpacked, what they return, dropout, no host sync."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flash_cute
from flash_cute.testing import bounds
from flash_cute.testing.cases import Case, VarlenCase, make_inputs

BF16 = torch.bfloat16
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 3), "softmax_scale": 0.3},
    "features": {"softcap": 5.0, "dropout_p": 0.2, "causal": True},
    "deterministic": {"deterministic": True, "causal": True},
}


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def generator(device: str, seed: int = 7) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def check_same_results(
    got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], deterministic: bool = False
) -> None:
    """Equal bits of (out, dq, dk, dv); on CUDA sums of dq have no fixed order by default."""
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        if x.is_cuda and i == 1 and not deterministic:
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-3)
        else:
            bounds.check_same_bits(f"result {i}", x, y)


@pytest.mark.parametrize("options", OPTIONS)
def test_qkvpacked(device, options):
    kwargs: dict[str, Any] = OPTIONS[options]
    inputs = make_inputs(Case(seqlen_q=70, seqlen_k=70, dtype=BF16), device)
    packed = leaf(torch.stack((inputs.q, inputs.k, inputs.v), 2))
    parts = [leaf(x) for x in (inputs.q, inputs.k, inputs.v)]
    got = flash_cute.flash_attn_qkvpacked_func(packed, **kwargs, generator=generator(device))
    expected = flash_cute.flash_attn_func(*parts, **kwargs, generator=generator(device))
    (dpacked,) = torch.autograd.grad(got, packed, inputs.dout)
    grads = torch.autograd.grad(expected, parts, inputs.dout)
    check_same_results((got, *dpacked.unbind(2)), (expected, *grads), "deterministic" in kwargs)


@pytest.mark.parametrize("options", OPTIONS)
def test_kvpacked(device, options):
    kwargs: dict[str, Any] = OPTIONS[options]
    inputs = make_inputs(Case(heads=4, heads_k=2, seqlen_q=40, seqlen_k=70, dtype=BF16), device)
    q, kv = leaf(inputs.q), leaf(torch.stack((inputs.k, inputs.v), 2))
    parts = [leaf(x) for x in (inputs.q, inputs.k, inputs.v)]
    got = flash_cute.flash_attn_kvpacked_func(q, kv, **kwargs, generator=generator(device))
    expected = flash_cute.flash_attn_func(*parts, **kwargs, generator=generator(device))
    dq, dkv = torch.autograd.grad(got, (q, kv), inputs.dout)
    grads = torch.autograd.grad(expected, parts, inputs.dout)
    check_same_results((got, dq, *dkv.unbind(2)), (expected, *grads), "deterministic" in kwargs)


@pytest.mark.parametrize("options", OPTIONS)
def test_varlen_packed(device, options):
    kwargs: dict[str, Any] = OPTIONS[options]
    lengths = (40, 0, 65, 1)
    case = VarlenCase(lengths_q=lengths, lengths_k=lengths, rows_after=2, dtype=BF16)
    inputs = make_inputs(case, device)
    offsets, longest = inputs.lengths["cu_seqlens_q"], inputs.lengths["max_seqlen_q"]
    sequences = (offsets, offsets, longest, longest)
    parts = [leaf(x) for x in (inputs.q, inputs.k, inputs.v)]
    expected = flash_cute.flash_attn_varlen_func(
        *parts, *sequences, **kwargs, generator=generator(device)
    )
    grads = torch.autograd.grad(expected, parts, inputs.dout)

    qkv = leaf(torch.stack((inputs.q, inputs.k, inputs.v), 1))
    got = flash_cute.flash_attn_varlen_qkvpacked_func(
        qkv, offsets, longest, **kwargs, generator=generator(device)
    )
    (dqkv,) = torch.autograd.grad(got, qkv, inputs.dout)
    check_same_results((got, *dqkv.unbind(1)), (expected, *grads), "deterministic" in kwargs)

    q, kv = leaf(inputs.q), leaf(torch.stack((inputs.k, inputs.v), 1))
    got = flash_cute.flash_attn_varlen_kvpacked_func(
        q, kv, *sequences, **kwargs, generator=generator(device)
    )
    dq, dkv = torch.autograd.grad(got, (q, kv), inputs.dout)
    check_same_results((got, dq, *dkv.unbind(1)), (expected, *grads), "deterministic" in kwargs)


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


def test_packed_sequences_that_are_used_in_part(device):
    qkv = torch.randn(60, 3, 4, 32, device=device, dtype=BF16)
    cu_seqlens = torch.tensor([0, 20, 60], dtype=torch.int32, device=device)
    used = torch.tensor([7, 33], dtype=torch.int32, device=device)
    q, k, v = qkv.unbind(1)
    lengths, both = (cu_seqlens, cu_seqlens, 40, 40), {"seqused_q": used, "seqused_k": used}
    expected = flash_cute.flash_attn_varlen_func(q, k, v, *lengths, **both)
    packed = flash_cute.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 40, seqused=used)
    bounds.check_same_bits("out", packed, expected)
    kv = torch.stack((k, v), 1)
    packed = flash_cute.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **both)
    bounds.check_same_bits("out", packed, expected)
    assert not expected[7:20].any() and not expected[53:].any()


def test_packed_q_of_its_own_needs_no_gradient(device):
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70, dtype=BF16), device)
    kv = leaf(torch.stack((inputs.k, inputs.v), 2))
    out = flash_cute.flash_attn_kvpacked_func(inputs.q, kv)
    (dkv,) = torch.autograd.grad(out, kv, inputs.dout)
    expected = inputs.backward(*inputs.forward()[:2])
    bounds.check_same_bits("dk", dkv[:, :, 0], expected["k"])
    bounds.check_same_bits("dv", dkv[:, :, 1], expected["v"])


def test_a_new_thread(device):
    """It has no CUDA context yet, as autograd's threads have none."""
    inputs = make_inputs(Case(dtype=BF16), device)
    expected = inputs.forward()[0]
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(lambda: inputs.forward()[0]).result()
    bounds.check_same_bits("out", got, expected)


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


@pytest.mark.parametrize("largest", [2**31 - 1, 2**63 - 1])
def test_windows_that_hide_nothing(device, largest):
    inputs = make_inputs(Case(seqlen_q=20, seqlen_k=30, dtype=BF16), device)
    qkv = inputs.q, inputs.k, inputs.v
    for window, same in (
        ((largest, 3), (-1, 3)),
        ((3, largest), (3, -1)),
        ((largest, largest), (-1, -1)),
    ):
        out = flash_cute.flash_attn_func(*qkv, window_size=window)
        expected = flash_cute.flash_attn_func(*qkv, window_size=same)
        bounds.check_same_bits("out", out, expected)


def test_mapped_inputs_keep_their_gradients(device):
    """Inside torch.func.vmap tensors do not say whether they need one."""
    x = leaf(torch.randn(3, 1, 8, 2, 16, device=device, dtype=BF16))
    mapped = torch.func.vmap(flash_cute.flash_attn_func)(x, x, x)
    one_by_one = torch.stack([flash_cute.flash_attn_func(y, y, y) for y in x])
    bounds.check_same_bits("out", mapped.detach(), one_by_one.detach())
    grads = [torch.autograd.grad(out.float().square().sum(), x)[0] for out in (mapped, one_by_one)]
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)


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
    """However they are asked for: none is zero by mistake."""
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


def test_results_asked_for(device):
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70, dtype=BF16), device)
    out = inputs.attend()
    assert isinstance(out, torch.Tensor)
    same, lse = inputs.attend(return_lse=True)
    bounds.check_same_bits("out", same, out)
    bounds.check_forward(out, lse, bounds.forward_oracle(inputs))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_attention_probabilities(make, dropout_p, dtype):
    """Signed probabilities rebuild out: dropped ones count as 0, others are rescaled."""
    inputs = make(Case(seqlen_q=40, seqlen_k=70, dtype=dtype))
    out, lse, probs = inputs.attend(return_attn_probs=True, dropout_p=dropout_p)
    assert lse.shape == (2, 2, 40) and probs.shape == (2, 2, 40, 70) and probs.dtype == dtype
    weights = probs.double().clamp(min=0) / (1 - dropout_p)
    rebuilt = torch.einsum("bhqk,bkhd->bqhd", weights, inputs.v.double())
    unit = 4 * bounds.ROUNDING_UNIT[dtype] + 1e-5  # of out, P in the product, and P
    scale = torch.einsum("bhqk,bkhd->bqhd", weights, inputs.v.double().abs())
    bounds.compare("out", out, rebuilt, unit * scale)
    sums = probs.double().abs().sum(-1)
    bounds.compare("sum", sums, torch.ones_like(sums), torch.full_like(sums, unit))


@pytest.mark.parametrize("causal", [False, True])
def test_float_window_bound_equals_causal(device, causal):
    """causal is window_size=(-1, 0), bit for bit."""
    inputs = make_inputs(Case(seqlen_q=70, seqlen_k=130, dtype=BF16), device)
    window = inputs.attend(window_size=(-1, 0), causal=causal)
    bounds.check_same_bits("out", window, inputs.attend(causal=True))


def test_generator_sets_the_dropout_mask(device):
    inputs = make_inputs(Case(dtype=BF16), device)
    first, second, other = (
        inputs.attend(dropout_p=0.3, generator=generator(device, seed)) for seed in (1, 1, 2)
    )
    bounds.check_same_bits("out", first, second)
    assert not torch.equal(first, other)
    one = generator(device)
    calls = [inputs.attend(dropout_p=0.3, generator=one) for _ in range(2)]
    assert not torch.equal(*calls)
    torch.manual_seed(3)
    before = inputs.attend(dropout_p=0.3)
    torch.manual_seed(3)
    bounds.check_same_bits("out", inputs.attend(dropout_p=0.3), before)


def test_no_dropout_draws_no_random_number(device):
    inputs = make_inputs(Case(dtype=BF16), device)
    state = torch.get_rng_state()
    inputs.attend()
    assert torch.equal(state, torch.get_rng_state())


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
    check_same_results(*results)


def test_autocast(device):
    """The functions keep the dtype they are given; what autocast produces around them fits."""
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70, dtype=BF16), device)
    expected = inputs.attend()
    with torch.autocast(device, dtype=BF16):
        out = inputs.attend()
        projected = torch.nn.functional.linear(out, torch.eye(64, device=device))
        again = flash_cute.flash_attn_func(projected, inputs.k, inputs.v)
    bounds.check_same_bits("out", out, expected)
    assert again.dtype == BF16 and again.isfinite().all()


def test_autocast_leaves_fp32_alone():
    """Autocast must not reach the matrix products inside of the CPU implementation."""
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70), "cpu")
    leaves = [leaf(x) for x in (inputs.q, inputs.k, inputs.v)]
    with torch.autocast("cpu", dtype=BF16):
        out, lse = flash_cute.flash_attn_func(*leaves, return_lse=True)
        grads = torch.autograd.grad(out, leaves, inputs.dout)
    bounds.check_forward(out.detach(), lse.detach(), bounds.forward_oracle(inputs))
    bounds.check_gradients(dict(zip("qkv", grads, strict=True)), inputs, out.detach())


def test_mixed_dtypes_under_autocast_are_refused(device):
    inputs = make_inputs(Case(dtype=BF16), device)
    with torch.autocast(device, dtype=BF16), pytest.raises(TypeError, match="dtypes differ"):
        flash_cute.flash_attn_func(inputs.q.float(), inputs.k, inputs.v)


def test_inference_mode(device):
    inputs = make_inputs(Case(dtype=BF16), device)
    expected = inputs.attend()
    with torch.inference_mode():
        bounds.check_same_bits("out", inputs.attend(), expected)


def test_inputs_are_not_changed(device):
    inputs = make_inputs(Case(seqlen_q=70, seqlen_k=130, dtype=BF16, is_causal=True), device)
    before = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    inputs.backward(*inputs.forward()[:2])
    after = (inputs.q, inputs.k, inputs.v, inputs.dout)
    for name, x, y in zip(("q", "k", "v", "dout"), after, before, strict=True):
        bounds.check_same_bits(name, x, y)


@pytest.mark.parametrize("options", OPTIONS)
def test_no_host_sync(cuda, options):
    """Neither forward nor backward, dense or varlen, waits for the device."""
    dense = make_inputs(Case(seqlen_q=70, seqlen_k=130, sink=True, dtype=BF16), cuda)
    varlen = make_inputs(VarlenCase(used_q=(60, 0, 1, 9), alibi="batch", dtype=BF16), cuda)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs in (dense, varlen):
            leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
            torch.autograd.grad(inputs.attend(**OPTIONS[options]), leaves, inputs.dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lse_of_a_row_without_keys(device):
    inputs = make_inputs(Case(seqlen_q=70, seqlen_k=3, dtype=BF16), device)
    out, lse = inputs.attend(causal=True, return_lse=True)
    assert (lse[..., :67] == -math.inf).all() and not out[:, :67].any()
