"""Training with attention of e4m3 q, k and v: results and gradients against fp64 of the rounded
values, and what is kept, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_bounds import relative
from torch import Tensor

from flash_cute import flash_attn_func
from flash_cute.attention import FP8Attention, FP8AttentionConfig
from flash_cute.attention.fp8 import RoundToFP8
from flash_cute.functional.kept import attention
from flash_cute.functional.kept_autograd import Fp8Form
from flash_cute.ops.typed import OPS

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
pytestmark = pytest.mark.usefixtures("served")
OPTIONS: dict[str, Any] = {
    "causal": False, "window_size": (-1, -1), "softmax_scale": None, "softcap": 0.0,
    "deterministic": True, "dropout_p": 0.0,
}  # fmt: skip


def rounded(device: str, dtype: torch.dtype, scaling: str, form: Fp8Form) -> list[Tensor]:
    found = []
    for rows, heads in ((70, 4), (90, 2), (90, 2)):
        x = torch.randn(2, rows, heads, 32) * torch.randn(heads, 1).exp()
        x = RoundToFP8.apply(x.to(device, dtype), form.dtype, form.shared(x))
        found.append(x.requires_grad_())
    return found


def scores_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 32**-0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(hidden.triu(90 - 70 + 1), -torch.inf)
    return scores


def error(x: Tensor, expected: Tensor) -> float:
    return ((x.detach().cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "head"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gradients_against_fp64(device, dtype, scaling, causal):
    """Of weights that are not rounded, and of out as it was: sums of dout * out are of that."""
    torch.manual_seed(0)
    form = Fp8Form(E4M3, (-2,) * (scaling == "head"))
    tensors = rounded(device, dtype, scaling, form)
    out = attention(tuple(tensors), form, {}, **OPTIONS | {"causal": causal})
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, dout)
    assert out.dtype == dtype and all(x.dtype == dtype for x in grads)
    q, k, v = (x.detach().cpu().double().requires_grad_() for x in tensors)
    p = scores_of(q, k, causal).softmax(-1)
    expected = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(2, 2))
    assert error(out, expected) < relative(device, 5e-3, *(x.to(E4M3) for x in tensors))
    exact_weights = flash_attn_func(*(x.detach() for x in tensors), causal=causal)
    assert not torch.equal(out, exact_weights)
    assert dtype == BF16 or error(out, expected) > 2 * error(exact_weights, expected)
    wide = dout.cpu().double()
    exact = torch.autograd.grad(expected, (q, k, v), wide, retain_graph=True)
    for x, y in zip(grads, exact, strict=True):
        assert error(x, y) < 0.04
    shift = (wide * (out.detach().cpu().double() - expected.detach())).sum(-1)  # of dout * out
    ds_off = -p.detach() * shift.transpose(1, 2)[..., None] * 32**-0.5
    k_of_each = k.detach().repeat_interleave(2, 2)
    dq = exact[0] + torch.einsum("bhij,bjhd->bihd", ds_off, k_of_each)
    dk = torch.einsum("bhij,bihd->bjhd", ds_off, q.detach()).unflatten(2, (2, 2)).sum(3)
    for x, y in zip(grads, (dq, exact[1] + dk, exact[2]), strict=True):
        assert error(x, y) < 0.01


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "head"])
def test_evaluated_trained_and_compiled_are_the_same(device, scaling, grouped):
    """To the bit, dense and with a mask, and gradients, too."""
    torch.manual_seed(0)
    config = FP8AttentionConfig(
        64, 4, num_kv_heads=2 if grouped else 4, scaling=scaling, pattern="causal", device=device,
        dtype=BF16, deterministic=True,
    )  # fmt: skip
    layer = FP8Attention(config)
    x = torch.randn(2, 20, 64, device=device, dtype=BF16, requires_grad=True)
    mask = torch.arange(20, device=device) < torch.tensor([[20], [9]], device=device)
    for args in ((x,), (x, mask)):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        found = []
        for call in (layer, compiled):
            out = call(*args)
            grads = torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])
            with torch.no_grad():
                assert torch.equal(call(*args), out)
            found.append((out, *grads))
        assert all(map(torch.equal, *found))


def test_compiled_for_dynamic_lengths_and_exported(device):
    torch._dynamo.reset()
    layer = FP8Attention(FP8AttentionConfig(64, 4, device=device, dtype=BF16))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (20, 33, 47):
        x = torch.randn(2, seqlen, 64, device=device, dtype=BF16, requires_grad=True)
        found = [torch.autograd.grad(call(x).sum(), x)[0] for call in (layer, compiled)]
        assert torch.equal(*found)
    exported = torch.export.export(layer, (x.detach(),)).module()
    assert torch.equal(exported(x.detach()), layer(x))


def test_dropout_and_softcap_attend_in_16_bits(device):
    """Which the ops do not have: compiled, too."""
    torch._dynamo.reset()
    x = torch.randn(2, 20, 64, device=device, dtype=BF16)
    for options in ({"softcap": 5.0}, {"dropout": 0.2}):
        layer = FP8Attention(FP8AttentionConfig(64, 4, device=device, dtype=BF16, **options))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for call in (layer, compiled):
            torch.manual_seed(1)
            assert call(x).isfinite().all()
        if "softcap" in options:
            torch.testing.assert_close(compiled(x), layer(x))


def test_the_op_is_called_once_a_forward(device, monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    layer = FP8Attention(FP8AttentionConfig(64, 4, device=device, dtype=BF16))
    x = torch.randn(2, 20, 64, device=device, dtype=BF16)
    with Names():
        layer(x)
    assert seen.count(str(OPS.fp8_fwd.default)) == 1  # type: ignore[attr-defined]
    assert not any(".fwd." in name for name in seen)
