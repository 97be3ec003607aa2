"""The public functions: packed equals unpacked, what they return, dropout, no host sync."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from checks import leaf, same_results

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


def generator(device: str, seed: int = 7) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


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
    same_results((got, *dpacked.unbind(2)), (expected, *grads), "deterministic" in kwargs)


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
    same_results((got, dq, *dkv.unbind(2)), (expected, *grads), "deterministic" in kwargs)


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
    same_results((got, *dqkv.unbind(1)), (expected, *grads), "deterministic" in kwargs)

    q, kv = leaf(inputs.q), leaf(torch.stack((inputs.k, inputs.v), 1))
    got = flash_cute.flash_attn_varlen_kvpacked_func(
        q, kv, *sequences, **kwargs, generator=generator(device)
    )
    dq, dkv = torch.autograd.grad(got, (q, kv), inputs.dout)
    same_results((got, dq, *dkv.unbind(1)), (expected, *grads), "deterministic" in kwargs)


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


def test_forward_in_a_new_thread(device):
    """A new thread has no CUDA context, as autograd's threads have none."""
    inputs = make_inputs(Case(dtype=BF16), device)
    expected = inputs.forward()[0]
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(lambda: inputs.forward()[0]).result()
    bounds.check_same_bits("out", got, expected)


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


def test_return_lse(device):
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
def test_a_window_that_ends_at_the_query_is_causal(device, causal):
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
    state_of = torch.cuda.get_rng_state if device == "cuda" else torch.get_rng_state
    state = state_of()
    inputs.attend()
    assert torch.equal(state, state_of())
    inputs.attend(dropout_p=0.1)
    assert not torch.equal(state, state_of())


def test_autocast(device):
    """Inputs in its dtype are not cast, and results of layers under autocast are accepted."""
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70, dtype=BF16), device)
    expected = inputs.attend()
    with torch.autocast(device, dtype=BF16):
        out = inputs.attend()
        projected = torch.nn.functional.linear(out, torch.eye(64, device=device))
        again = flash_cute.flash_attn_func(projected, inputs.k, inputs.v)
    bounds.check_same_bits("out", out, expected)
    assert again.dtype == BF16 and again.isfinite().all()


def test_autocast_leaves_fp32_of_backward_alone():
    """Autocast must not reach the matrix products inside of the CPU implementation."""
    inputs = make_inputs(Case(seqlen_q=40, seqlen_k=70), "cpu")
    leaves = [leaf(x) for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = flash_cute.flash_attn_func(*leaves, return_lse=True)
    with torch.autocast("cpu", dtype=BF16):
        grads = torch.autograd.grad(out, leaves, inputs.dout)
        halves = flash_cute.flash_attn_func(*leaves)
    bounds.check_forward(out.detach(), lse.detach(), bounds.forward_oracle(inputs))
    bounds.check_gradients(dict(zip("qkv", grads, strict=True)), inputs, out.detach())
    expected = flash_cute.flash_attn_func(*(x.bfloat16() for x in leaves))
    bounds.check_same_bits("out", halves.detach(), expected.detach())


def test_fp64_among_others_under_autocast_is_refused(device):
    inputs = make_inputs(Case(dtype=BF16), device)
    with torch.autocast(device, dtype=BF16), pytest.raises(TypeError, match="dtypes differ"):
        flash_cute.flash_attn_func(inputs.q.double(), inputs.k, inputs.v)


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
