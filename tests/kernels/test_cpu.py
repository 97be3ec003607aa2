"""The CPU ops against the oracle, over block borders, bad indices, hidden bits and gradients."""

from __future__ import annotations

import inspect
import random
from typing import Any

import cpu_calls
import pytest
import torch
from cpu_oracle import (
    ULP,
    assert_forward,
    assert_gradients,
    oracle_gradients,
    qkv,
    randn,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute import cpu, reference
from flash_cute.cpu import tiles
from flash_cute.ops.schema import CALLS

NO_KEYS = -torch.inf


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 8 queries and 16 keys, so that short sequences cross their borders."""
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 8)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 16)


def make_case(seed: int) -> dict[str, Any]:
    """A random combination of shape, dtype and options."""
    pick = random.Random(seed)
    batch, heads_k, group = pick.randint(1, 2), pick.randint(1, 2), pick.randint(1, 3)
    lengths = (0, 1, 7, 8, 9, 15, 16, 17, 33, 40)
    seqlen_q, seqlen_k = pick.choice(lengths), pick.choice(lengths)
    heads, dtype = heads_k * group, pick.choice(tuple(ULP))
    shape = (batch, seqlen_q, seqlen_k, heads, heads_k, pick.choice((8, 20)), pick.choice((8, 12)))
    options: dict[str, Any] = {"softmax_scale": pick.choice((None, None, 0.5, -1.0, 0.0))}
    options["is_causal"] = pick.random() < 0.4
    if pick.random() < 0.5:
        sides = (-1, 0, 1, 5, 20)
        options |= {f"window_size_{side}": pick.choice(sides) for side in ("left", "right")}
    if pick.random() < 0.4:
        options["softcap"] = pick.choice((0.5, 3.0))
    if pick.random() < 0.4:
        slopes = torch.rand(batch, heads, generator=torch.Generator().manual_seed(seed))
        options["alibi_slopes"] = slopes if pick.random() < 0.5 else slopes[0]
    if pick.random() < 0.4:
        options["sink"] = randn(heads, seed=seed)
    if pick.random() < 0.4:
        dropped = {"dropout_p": pick.choice((0.1, 0.5, 1.0)), "rng": torch.tensor([seed, 1 << 33])}
        options |= dropped
    return {"tensors": qkv(*shape, dtype=dtype), "options": options, "dtype": dtype}


@pytest.mark.parametrize("seed", range(80))
def test_random_options(small_blocks, seed):
    case = make_case(seed)
    (q, k, v), options, dtype = case["tensors"], case["options"], case["dtype"]
    exact = reference.attention(q, k, v, **options)
    weighted = reference.attention(q, k, v.abs(), **options).out
    results = cpu_calls.fwd(q, k, v, **options, return_softmax=True, return_row_max=True)
    assert_forward(results, exact, weighted)

    out, lse = results[:2]
    dout, dlse = randn(*out.shape, dtype=dtype, seed=4), randn(*lse.shape, seed=5).to(lse.dtype)
    *gradients, dsink, softmax_d = cpu_calls.bwd(dout, q, k, v, out, lse, dlse, **options)
    expected = oracle_gradients(reference.attention, (q, k, v), options, dout, dlse)
    assert_gradients(gradients, expected[:3], dtype)
    row_dots = (dout.double() * out.double()).sum(-1).transpose(1, 2) - dlse
    torch.testing.assert_close(softmax_d.double(), row_dots, rtol=1e-5, atol=1e-5)
    if options.get("sink") is None:
        assert dsink is None
    else:
        assert dsink.dtype == torch.float32
        loose = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
        assert_gradients((dsink,), expected[3:], loose)


@pytest.mark.parametrize("heads_k", [1, 4])
def test_default_blocks(heads_k):
    q, k, v = qkv(1, 130, 700, heads=4, heads_k=heads_k)
    options = {"is_causal": True, "window_size_left": 620}
    exact = reference.attention(q, k, v, **options)
    weighted = reference.attention(q, k, v.abs(), **options).out
    assert_forward(
        cpu_calls.fwd(q, k, v, **options, return_softmax=True, return_row_max=True), exact, weighted
    )


@pytest.mark.parametrize("lengths", [(11, 20), (17, 17), (20, 9)])
def test_window_truth_table(small_blocks, lengths):
    q, k, v = (x.double() for x in qkv(1, *lengths, heads=1, heads_k=1))
    dout = randn(*q.shape, seed=4).double()
    sides = (-1, 0, 1, lengths[1] - 1, lengths[1], 2**31 - 1)
    for left in sides:
        for right in sides:
            options = {"window_size_left": left, "window_size_right": right}
            out, lse, _, softmax = cpu_calls.fwd(q, k, v, **options, return_softmax=True)
            seen = reference.visible(*lengths, False, left, right)
            assert torch.equal(softmax[0, 0] > 0, seen)
            exact = reference.attention(q, k, v, **options)
            torch.testing.assert_close((out, lse), exact[:2])
            gradients = cpu_calls.bwd(dout, q, k, v, out, lse, **options)[:3]
            zeros = torch.zeros_like(lse)
            expected = oracle_gradients(reference.attention, (q, k, v), options, dout, zeros)
            torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize(
    "shape",
    [(0, 3, 3, 2, 2), (2, 0, 3, 2, 2), (2, 3, 0, 2, 2), (2, 3, 3, 0, 0), (1, 2, 2, 2, 1, 0)],
)
def test_empty_dimensions(shape):
    q, k, v = qkv(*shape)
    rng = torch.tensor([1, 2])
    out, lse, row_max, softmax = cpu_calls.fwd(q, k, v, dropout_p=0.5, rng=rng)
    assert out.shape == (*q.shape[:3], v.shape[-1]) and lse.shape == q.shape[:3:2] + q.shape[1:2]
    assert row_max is None and softmax is None
    if shape[2] == 0:
        assert not out.any() and (lse == NO_KEYS).all()
    dout = torch.ones_like(out)
    dq, dk, dv, _, softmax_d = cpu_calls.bwd(dout, q, k, v, out, lse, dropout_p=0.5, rng=rng)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert softmax_d.shape == lse.shape and not dq.any()


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -torch.inf])])
def test_rows_without_keys(small_blocks, sink):
    q, k, v = qkv(1, 20, 5)
    out, lse, row_max, _ = cpu_calls.fwd(q, k, v, is_causal=True, sink=sink, return_row_max=True)
    assert not out[:, :15].any() and not out.signbit()[:, :15].any()
    expected = torch.full((2, 15), NO_KEYS) if sink is None else sink[:, None].expand(2, 15)
    assert torch.equal(lse[0, :, :15], expected)
    assert (row_max[0, :, :15] == NO_KEYS).all()
    dout = torch.ones_like(out)
    dout[:, :15] = torch.nan
    dq, dk, dv, *_ = cpu_calls.bwd(dout, q, k, v, out, lse, is_causal=True, sink=sink)
    assert not dq[:, :15].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_scores_of_minus_infinity_are_no_keys(small_blocks):
    q, k, v = qkv(1, 9, 20)
    q = q.abs()
    k[:, :, 0] = -torch.inf
    out, lse, *_ = cpu_calls.fwd(q, k, v)
    assert not out[:, :, 0].any() and (lse[:, 0] == NO_KEYS).all() and lse[:, 1].isfinite().all()
    dq, dk, dv, *_ = cpu_calls.bwd(torch.ones_like(out), q, k, v, out, lse)
    assert not any(x[:, :, 0].any() for x in (dq, dk, dv))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_visible_nonfinite_values_follow_the_oracle(small_blocks, which, poison):
    tensors = qkv(1, 20, 24)
    tensors[which][0, 13, 1, 3] = poison
    options = {"is_causal": True, "window_size_left": 6}
    out, lse, *_ = cpu_calls.fwd(*tensors, **options)
    exact = reference.attention(*tensors, **options)
    torch.testing.assert_close(out.double(), exact.out, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(
        lse.double(), exact.softmax_lse, rtol=1e-5, atol=1e-5, equal_nan=True
    )


@pytest.mark.parametrize("group", [1, 2])
def test_hidden_bits_change_nothing(small_blocks, group):
    """Bitwise: rows that do not see a poisoned key, and keys that a poisoned row does not see."""
    q, k, v = qkv(1, 24, 24, heads=2 * group)
    dout = randn(*q.shape, seed=4)

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        out, lse, *_ = cpu_calls.fwd(q, k, v, is_causal=True)
        return out, lse, *cpu_calls.bwd(dout, q, k, v, out, lse, is_causal=True)[:3]

    def planted(x: Tensor, index: int, value: float) -> Tensor:
        x = x.clone()
        x[:, index] = value
        return x

    for poison in (torch.nan, torch.inf):
        clean, other = (run(q, planted(k, 13, x), planted(v, 13, x), dout) for x in (0.0, poison))
        assert torch.equal(clean[0][:, :13], other[0][:, :13])  # out
        assert torch.equal(clean[1][:, :, :13], other[1][:, :, :13])  # lse
        assert torch.equal(clean[2][:, :13], other[2][:, :13])  # dq
        assert not other[0][:, 13:].isfinite().all() and not other[2][:, 13:].isfinite().all()
        clean, other = (run(planted(q, 5, x), k, v, planted(dout, 5, x)) for x in (0.0, poison))
        assert torch.equal(clean[3][:, 6:], other[3][:, 6:])  # dk
        assert torch.equal(clean[4][:, 6:], other[4][:, 6:])  # dv
        assert not other[3][:, :6].isfinite().all() and not other[4][:, :6].isfinite().all()


class Attend(torch.autograd.Function):
    """cpu_calls.fwd and cpu_calls.bwd as one differentiable function of q, k, v and sink."""

    @staticmethod
    def forward(ctx, q, k, v, sink, options, varlen):
        ctx.options, ctx.varlen = options, varlen
        forward = cpu_calls.varlen_fwd if varlen else cpu_calls.fwd
        out, lse, *_ = forward(q, k, v, **varlen, **options, sink=sink)
        ctx.save_for_backward(q, k, v, out, lse, sink)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        *saved, sink = ctx.saved_tensors
        backward = cpu_calls.varlen_bwd if ctx.varlen else cpu_calls.bwd
        results = backward(dout, *saved, **ctx.varlen, dlse=dlse, sink=sink, **ctx.options)
        dq, dk, dv, dsink, _ = results
        return dq, dk, dv, dsink, None, None


GRADCHECKS = {
    "plain": {},
    "window": {"window_size_left": 1, "window_size_right": 2},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": torch.tensor([[0.3, 1.0]]), "softmax_scale": -0.4},
    "dropout": {"dropout_p": 0.4, "rng": torch.tensor([7, 9])},
    "sink": {"sink": torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True)},
}
GRADCHECKS["all"] = {k: v for options in GRADCHECKS.values() for k, v in options.items()}
VARLEN = {
    "cu_seqlens_q": torch.tensor([0, 3, 3, 5]),
    "cu_seqlens_k": torch.tensor([0, 4, 5, 7]),
    "max_seqlen_q": 3,
    "max_seqlen_k": 4,
}


@pytest.mark.parametrize("varlen", [{}, VARLEN], ids=["dense", "varlen"])
@pytest.mark.parametrize("options", GRADCHECKS.values(), ids=GRADCHECKS.keys())
def test_gradcheck(monkeypatch, options, varlen):
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 2)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 3)
    tensors = [x.double() for x in qkv(1, 5, 7, heads_k=1, dim=2, dim_v=3)]
    tensors = [(x[0] if varlen else x).requires_grad_() for x in tensors]
    options = dict(options)
    sink = options.pop("sink", None)
    slopes = options.get("alibi_slopes")
    if varlen and slopes is not None:
        options["alibi_slopes"] = slopes * torch.tensor([[1.0], [2.0], [3.0]])

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return Attend.apply(*tensors, options, varlen)

    assert torch.autograd.gradcheck(attend, (*tensors, sink), fast_mode=True)


def test_results_are_new_contiguous_and_without_grad():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 6, 6))
    leaves = [x.requires_grad_() for x in (q, k, v, randn(2))]
    out, lse, row_max, softmax = cpu_calls.fwd(
        *leaves[:3], sink=leaves[3], return_softmax=True, return_row_max=True
    )
    dout = randn(1, 1, 1, 1).expand(out.shape)
    gradients = cpu_calls.bwd(dout, *leaves[:3], out, lse, sink=leaves[3])
    results = (out, lse, row_max, softmax, *gradients)
    assert not any(x.requires_grad for x in results)
    assert all(x.is_contiguous() for x in results)
    places = {x.untyped_storage().data_ptr() for x in (*results, *leaves, dout)}
    assert len(places) == len(results) + 5


def test_repeats_bitwise_whatever_the_strides(small_blocks):
    q, k, v = qkv(2, 17, 33, heads=4)
    packed = torch.zeros(2, 33, 3, 4, 9)
    views = []
    for index, x in enumerate((q, k, v)):
        view = packed[:, : x.shape[1], index, : x.shape[2], 1:]
        views.append(view.copy_(x))
    results = []
    for tensors in ((q, k, v), (q, k, v), views):
        options = {"is_causal": True, "sink": torch.ones(4)}
        out, lse, *_ = cpu_calls.fwd(*tensors, **options)
        results.append(
            (out, lse, *cpu_calls.bwd(torch.ones_like(out), *tensors, out, lse, **options))
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_memory_is_linear_in_the_lengths():
    seqlen, heads = 1024, 4
    q, k, v = qkv(1, seqlen, seqlen, heads=heads, heads_k=1)
    options = {
        "softcap": 2.0,
        "alibi_slopes": torch.ones(heads),
        "window_size_left": 400,
        "dropout_p": 0.1,
        "rng": torch.tensor([1, 2]),
    }
    with Largest() as largest:
        out, lse, *_ = cpu_calls.fwd(q, k, v, **options)
        cpu_calls.bwd(torch.ones_like(out), q, k, v, out, lse, **options)
    assert largest.numel <= 2 * max(q.numel(), heads * tiles.QUERY_BLOCK * tiles.KEY_BLOCK)
    assert largest.numel <= heads * seqlen**2 / 8  # whatever the blocks are


@pytest.mark.parametrize("name", cpu.__all__)
def test_signature_is_the_schema(name):
    op = getattr(torch.ops.flash_cute, name).default
    schema, parameters = op._schema.arguments, inspect.signature(CALLS[op]).parameters.values()
    expected = [(a.name, a.default_value) for a in schema if a.has_default_value()]
    defaults = [(p.name, p.default) for p in parameters if p.default is not p.empty]
    assert [p.name for p in parameters] == [a.name for a in schema] and defaults == expected


def test_dropout_needs_rng():
    q, k, v = qkv(1, 2, 2)
    with pytest.raises(ValueError, match="rng"):
        cpu_calls.fwd(q, k, v, dropout_p=0.5)
