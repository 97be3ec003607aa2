"""Plain calls on the CPU, which ATen's flash kernel computes: which they are, and its traps."""

from __future__ import annotations

from typing import Any

import cpu_calls
import pytest
import torch
from cpu_oracle import (
    assert_bounded,
    assert_forward,
    assert_gradients,
    oracle_gradients,
    qkv,
    randn,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute import _torch_internals as internals
from flash_cute import flash_attn_func, flash_attn_with_kvcache, reference
from flash_cute.call import validate

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture
def calls(monkeypatch):
    """What ATen's kernels were called with: (forward or backward, dtype, is_causal)."""
    seen: list[tuple[str, torch.dtype, bool]] = []
    for name, place in (("flash_forward_on_cpu", 4), ("flash_backward_on_cpu", 7)):
        kernel = getattr(internals, name)

        def recorded(*args: Any, name: str = name, place: int = place, kernel=kernel, **named: Any):
            seen.append((name.split("_")[1], args[0].dtype, args[place]))
            return kernel(*args, **named)

        monkeypatch.setattr(internals, name, recorded)
    return seen


def both_ways(tensors: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv."""
    out, lse, *_ = cpu_calls.fwd(*tensors, **options)
    dout = randn(*out.shape, dtype=out.dtype, seed=4)
    return out, lse, *cpu_calls.bwd(dout, *tensors, out, lse, **options)[:3]


def check(tensors: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    """Forward and backward against the oracle, with all that a call may return."""
    q, k, v = tensors
    exact = reference.attention(q, k, v, **options)
    weighted = reference.attention(q, k, v.abs(), **options).out
    results = cpu_calls.fwd(q, k, v, **options, return_softmax=True, return_row_max=True)
    assert_forward(results, exact, weighted)
    out, lse, *gradients = both_ways(tensors, options)
    assert torch.equal(out, results[0]) and torch.equal(lse, results[1])
    assert all(x.is_contiguous() for x in (out, lse, *gradients))
    dout, dlse = randn(*out.shape, dtype=out.dtype, seed=4), torch.zeros_like(lse)
    expected = oracle_gradients(reference.attention, tensors, options, dout, dlse)
    assert_gradients(gradients, expected[:3], q.dtype)


PLAIN = {
    "full": ((2, 33, 70), {}),
    "causal": ((2, 65, 65), {"is_causal": True}),
    "blocks": ((1, 200, 530), {}),
    "causal_blocks": ((1, 600, 600), {"is_causal": True}),
    "grouped": ((2, 40, 40, 6, 2), {"is_causal": True}),
    "one_query": ((3, 1, 50, 6, 2), {"is_causal": True}),
    "two_keys": ((2, 20, 2, 4, 2), {}),
    "odd_dim": ((1, 20, 30, 2, 1, 13, 13), {}),
    "wide": ((1, 20, 30, 2, 2, 300, 300), {}),
    "open_window": ((1, 20, 30), {"window_size_left": 29, "window_size_right": 19}),
    "scale": ((1, 20, 20), {"is_causal": True, "softmax_scale": 1.3}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_calls(calls, name, dtype):
    """They reach ATen's kernels, and are right. But for out in bf16, products are fp32 or fp64."""
    shape, options = PLAIN[name]
    check(qkv(*shape, dtype=dtype), options)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    in_bf16 = set()
    if dtype == torch.bfloat16 and internals.has_bf16_products():
        in_bf16 = {("forward", torch.bfloat16)}
    assert {(way, kind) for way, kind, _ in calls} == in_bf16 | {
        ("forward", computed), ("backward", computed),
    }  # fmt: skip
    is_causal = options.get("is_causal", False) and shape[1] > 1
    assert {causal for _, _, causal in calls} == {is_causal}


OTHERS = {
    "lengths": ((1, 20, 30), {"is_causal": True}),
    "fewer_keys": ((1, 30, 20), {"is_causal": True}),
    "window": ((1, 20, 30), {"window_size_left": 28}),
    "window_right": ((1, 20, 30), {"window_size_right": 18}),
    "negative_scale": ((1, 20, 20), {"is_causal": True, "softmax_scale": -0.4}),
    "no_scale": ((1, 20, 20), {"is_causal": True, "softmax_scale": 0.0}),
    "tiny_scale": ((1, 20, 20), {"is_causal": True, "softmax_scale": 2.0**-149}),
    "dim_v": ((1, 20, 20, 2, 2, 8, 12), {}),
    "softcap": ((1, 20, 20), {"softcap": 3.0}),
    "alibi": ((1, 20, 20), {"alibi_slopes": torch.tensor([0.3, 1.0])}),
    "sink": ((1, 20, 20), {"sink": torch.tensor([0.3, -1.0])}),
    "dropout": ((1, 20, 20), {"dropout_p": 0.3, "rng": torch.tensor([7, 9])}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls(calls, name):
    """They do not, and are right too."""
    shape, options = OTHERS[name]
    check(qkv(*shape), options)
    assert calls == []


def test_a_gradient_of_lse_takes_tiles(calls):
    q, k, v = qkv(1, 20, 20)
    out, lse, *_ = cpu_calls.fwd(q, k, v)
    del calls[:]
    dout, dlse = randn(*out.shape, seed=4), randn(*lse.shape, seed=5)
    gradients = cpu_calls.bwd(dout, q, k, v, out, lse, dlse)[:3]
    expected = oracle_gradients(reference.attention, (q, k, v), {}, dout, dlse)
    assert_gradients(gradients, expected[:3], torch.float32)
    assert calls == []


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e38])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize(("heads", "causal"), [(2, False), (2, True), (4, True)])
def test_non_finite_numbers_follow_the_oracle(where, poison, heads, causal):
    """NaN, infinities and overflow where IEEE arithmetic over visible pairs has them; all else has
    the bits that it has where the odd row holds 0."""
    tensors = dict(zip("qkv", qkv(2, 48, 48, heads=heads), strict=True))
    clean = tensors | {where: tensors[where].clone()}
    clean[where][1, 29, 1] = 0
    tensors[where][1, 29, 1, 3] = poison
    options = {"is_causal": causal}
    out, lse, *gradients = both_ways(tuple(tensors.values()), options)
    exact = reference.attention(*tensors.values(), **options)
    close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    if poison != 1e38:  # which fp64 can multiply
        torch.testing.assert_close(out.double(), exact.out, **close)
        torch.testing.assert_close(lse.double(), exact.softmax_lse, **close)
    same = both_ways(tuple(clean.values()), options)
    group = slice(1, 2) if where == "q" and heads == 4 else slice(heads // 2, None)
    rows = slice(29, 30) if where == "q" else slice(29 if causal else 0, None)
    depends = torch.zeros(2, 48, heads, dtype=torch.bool)
    depends[1, rows, group] = True
    assert torch.equal(out[~depends], same[0][~depends])
    assert torch.equal(lse.transpose(1, 2)[~depends], same[1].transpose(1, 2)[~depends])
    assert torch.equal(gradients[0][~depends], same[2][~depends])
    by_key = torch.zeros(2, 48, 2, dtype=torch.bool)
    last = 48 if where != "q" else 30
    by_key[1, : last if causal else None, 0 if where == "q" and heads == 4 else 1] = True
    for got, expected in zip(gradients[1:], same[3:], strict=True):
        assert torch.equal(got[~by_key], expected[~by_key])


@pytest.mark.parametrize("causal", [False, True])
def test_non_finite_gradients_and_statistics_stay_in_their_rows(causal):
    """A dout that is not finite, and a row that forward says saw nothing."""
    q, k, v = qkv(2, 40, 40)
    out, lse, *_ = cpu_calls.fwd(q, k, v, is_causal=causal)
    dout = randn(*out.shape, seed=4)
    usual = cpu_calls.bwd(dout, q, k, v, out, lse, is_causal=causal)[:3]
    dout[0, 17, 1] = torch.nan
    lse[1, 0, 23] = -torch.inf
    dq, dk, dv = cpu_calls.bwd(dout, q, k, v, out, lse, is_causal=causal)[:3]
    assert dq[0, 17, 1].isnan().all() and not dq[1, 23, 0].any()
    others = torch.ones(2, 40, 2, dtype=torch.bool)
    others[0, 17, 1] = others[1, 23, 0] = False
    assert torch.equal(dq[others], usual[0][others])
    seen = torch.zeros(2, 40, 2, dtype=torch.bool)
    seen[0, : 18 if causal else None, 1] = seen[1, : 24 if causal else None, 0] = True
    for got, expected in zip((dk, dv), usual[1:], strict=True):
        assert torch.equal(got[~seen], expected[~seen])
        assert got[0, : 18 if causal else None, 1].isnan().all() and got[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_contiguous_whatever_the_layout(dtype):
    """Of heads in front, which ATen's results copy, and of slices of one packed tensor."""
    heads_first = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 9, 9, dtype=dtype)
    )
    packed = randn(2, 9, 3, 4, 8, dtype=dtype, seed=6).unbind(2)
    for tensors in (tuple(heads_first), packed):
        assert all(x.is_contiguous() for x in both_ways(tensors, {"is_causal": True}))
        assert flash_attn_func(*tensors).is_contiguous()


def test_a_batch_of_views_has_the_bits_of_its_parts():
    """Transposed, sliced and repeated views, without a copy of q, k and v by the caller."""
    q, k, v = qkv(3, 70, 70, heads=4, heads_k=2, dim=16, dim_v=16)
    whole = both_ways((q, k, v), {"is_causal": True})
    views = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    for x, y in zip(both_ways(views, {"is_causal": True}), whole, strict=True):
        assert torch.equal(x, y)
    for index in range(3):
        alone = both_ways(tuple(x[index, None] for x in (q, k, v)), {"is_causal": True})[:2]
        assert all(torch.equal(x[0], y[index]) for x, y in zip(alone, whole[:2], strict=True))


def test_varlen_has_the_bits_of_its_sequences():
    """Forward and backward, over a group of heads; rows between sequences hold NaN."""
    q, k, v = (x[0] for x in qkv(1, 60, 60, heads=4, heads_k=2))
    starts, stops = (3, 20, 21), (20, 21, 58)
    for x in (q, k, v):
        x[:3] = x[58:] = torch.nan
    offsets = torch.tensor((3, 20, 21, 58), dtype=torch.int32)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 60}
    lengths |= {"max_seqlen_k": 60, "is_causal": True}
    out, lse, *_ = cpu_calls.varlen_fwd(q, k, v, **lengths)
    dout = randn(*out.shape, seed=4)
    gradients = cpu_calls.varlen_bwd(dout, q, k, v, out, lse, **lengths)[:3]
    assert not out[:3].any() and not any(x[58:].any() for x in gradients)
    for start, stop in zip(starts, stops, strict=True):
        part = slice(start, stop)
        tensors = q[None, part], k[None, part], v[None, part]
        alone, alone_lse, *_ = cpu_calls.fwd(*tensors, is_causal=True)
        assert torch.equal(out[part], alone[0]) and torch.equal(lse[:, part], alone_lse[0])
        theirs = cpu_calls.bwd(dout[None, part], *tensors, alone, alone_lse, is_causal=True)[:3]
        for x, y in zip(gradients, theirs, strict=True):
            assert torch.equal(x[part], y[0])


def test_decoding_over_a_cache_is_plain(calls):
    """One query over caches of several lengths, whose unused rows hold NaN."""
    q, k, v = qkv(3, 1, 40, heads=6, heads_k=2)
    lengths = torch.tensor([40, 7, 1], dtype=torch.int32)
    for index, length in enumerate(lengths.tolist()):
        k[index, length:] = v[index, length:] = torch.nan
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    for index, length in enumerate(lengths.tolist()):
        part = q[index, None], k[index, None, :length], v[index, None, :length]
        weighted = reference.attention(*part[:2], part[2].abs()).out
        assert_bounded(out[index, None], reference.attention(*part).out, weighted)
    assert calls == [("forward", torch.float32, False)] * 3


@pytest.mark.parametrize("fast", [False, True])
def test_out_alone_has_the_bits_of_out_with_lse(monkeypatch, calls, fast):
    """bf16, where the CPU has products of it or not; odd numbers and other rules included."""
    monkeypatch.setattr(internals, "has_bf16_products", lambda: fast)
    q, k, v = qkv(2, 70, 70, heads=4, heads_k=2, dtype=torch.bfloat16)
    k[1, 30] = torch.nan
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    del calls[:]
    alone = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(alone.nan_to_num(), out.nan_to_num()) and alone[1, 30:].isnan().all()
    assert calls == [("forward", torch.bfloat16 if fast else torch.float32, True)]
    torch.testing.assert_close(
        lse.double(), reference.attention(q, k, v, is_causal=True).softmax_lse,
        rtol=2e-6, atol=1e-5, equal_nan=True,
    )  # fmt: skip
    grown = torch.ops.flash_cute.fwd(q, k, v, is_causal=True, return_row_max=True)
    assert torch.equal(grown[0].nan_to_num(), out.nan_to_num())
    given = torch.full_like(out, torch.nan)
    torch.ops.flash_cute.fwd.out(q, k, v, is_causal=True, out=given)
    assert torch.equal(given.nan_to_num(), out.nan_to_num())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = flash_attn_func(q.float(), k.float(), v.float(), causal=True)
    assert cast.dtype == torch.bfloat16 and torch.equal(cast.nan_to_num(), out.nan_to_num())
    leaf = q.clone().requires_grad_()
    assert torch.equal(flash_attn_func(leaf, k, v, causal=True).nan_to_num(), out.nan_to_num())


def test_modes_see_the_functional_op():
    """In bf16 too, where else a buffer is filled."""
    seen: list[str] = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = qkv(1, 16, 16, dtype=torch.bfloat16)
    with Ops():
        flash_attn_func(q, k, v)
    assert seen == ["flash_cute.fwd.default"]


def test_memory_of_results_is_not_of_inputs():
    """Results are new, also where there is nothing to convert or to copy."""
    tensors = qkv(1, 5, 5, heads=1, heads_k=1)
    results = both_ways(tensors, {})
    places = {x.untyped_storage().data_ptr() for x in (*tensors, *results)}
    assert len(places) == len(tensors) + len(results)


def test_calls_without_grad_are_validated_once(monkeypatch):
    """By the op; what it refuses is said in the function's words."""
    checked: list[int] = []
    dense = validate.dense
    monkeypatch.setattr(validate, "dense", lambda *args: checked.append(1) or dense(*args))
    q, k, v = qkv(1, 16, 16)
    flash_attn_func(q, k, v, causal=True)
    assert checked == [1]
    with pytest.raises(ValueError, match="q and k differ in head dim"):
        flash_attn_func(q, k[..., :7], v)
