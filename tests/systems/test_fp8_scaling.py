"""Options of scaling: formats' constants, delayed scales and their history, margin."""

from __future__ import annotations

import pytest
import torch
from fp8_cases import decibels
from torch.utils.checkpoint import checkpoint

from flash_cute.precision import FP8Config, FP8Format, FP8LinearLayer
from flash_cute.precision.fp8_products import round_to_fp8

E4M3, E5M2 = FP8Format.E4M3, FP8Format.E5M2


def test_formats():
    assert {fmt.name: fmt.value for fmt in FP8Format} == {"E4M3": "e4m3", "E5M2": "e5m2"}
    assert [torch.finfo(fmt.dtype).max for fmt in FP8Format] == [448, 57344]


@pytest.mark.parametrize("fmt", FP8Format)
@pytest.mark.parametrize("margin", [0, 2])
def test_the_largest_value_takes_the_formats_largest(fmt, margin):
    x = torch.linspace(-3.0, 2.0, 1001)
    rounded = round_to_fp8(x, fmt.dtype, margin)
    assert rounded.data.float().abs().max() == torch.finfo(fmt.dtype).max / 2**margin
    values = rounded.data.float() * rounded.inverse_scale
    exact = x.abs() > 1e-2
    step = 2.0 ** -(4 if fmt is E4M3 else 3)
    assert ((values - x).abs() / x.abs())[exact].max() == pytest.approx(step, rel=0.2)


def test_margin_and_history_length_reach_the_layer():
    config = FP8Config(scaling="delayed", history_length=3, margin=4)
    layer = FP8LinearLayer(8, 8, config=config)
    assert layer.scales.input_history.shape == (3,)
    other = FP8LinearLayer(8, 8, config=FP8Config(margin=0))
    # With 16 spare powers of two, small numbers are lost that are kept without.
    coarse = FP8LinearLayer.from_linear(other, FP8Config(margin=16))
    x = torch.randn(64, 8)
    exact = torch.nn.functional.linear(x, other.weight, other.bias)
    assert decibels(coarse(x), exact) < decibels(other(x), exact) - 5


def test_the_first_delayed_step_is_the_dynamic_one():
    torch.manual_seed(0)
    delayed = FP8LinearLayer(32, 16, config=FP8Config(scaling="delayed"))
    dynamic = FP8LinearLayer.from_linear(delayed)
    x = torch.randn(8, 32) * 100
    results = []
    for layer in (delayed, dynamic):
        layer.zero_grad()
        y = layer(x)
        (y * 1e-4).sum().backward()
        results.append((y.detach(), layer.weight.grad.clone()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_delayed_scales_refuse_checkpoints(reentrant):
    x = torch.randn(3, 8, requires_grad=True)
    layer = FP8LinearLayer(8, 4, config=FP8Config(scaling="delayed"))
    out = checkpoint(layer, x, use_reentrant=reentrant)
    with pytest.raises(NotImplementedError, match="use FP8Config\\(scaling='dynamic'\\)"):
        out.sum().backward()
    dynamic = FP8LinearLayer(8, 4)
    plain = torch.autograd.grad(dynamic(x).sum(), [x, dynamic.weight])
    out = checkpoint(dynamic, x, use_reentrant=False)
    again = torch.autograd.grad(out.sum(), [x, dynamic.weight])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_eval_writes_no_history():
    layer = FP8LinearLayer(8, 4, config=FP8Config(scaling="delayed")).eval()
    layer(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert all(not history.any() for history in layer.scales.buffers())
    layer.train()(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert all(history.any() for history in layer.scales.buffers())


def test_history_remembers_then_forgets():
    """A spike is clamped once, and sets the scale until it leaves the history."""
    history = torch.zeros(3)
    x = torch.tensor([1.0, -0.5])

    def roundtrip(size):
        rounded = round_to_fp8(x * size, E4M3.dtype, history=history)
        return float(rounded.data[0].float() * rounded.inverse_scale), float(rounded.scale)

    assert roundtrip(1) == (1, 448)
    assert roundtrip(1) == (1, 448)
    assert roundtrip(1000) == (1, 448)  # clamped: its scale is that of the past
    assert history.tolist() == [1000, 1, 1]
    for _ in range(3):
        assert roundtrip(1)[1] == pytest.approx(0.448)
    assert roundtrip(1) == (1, 448)


def test_the_history_holds_no_inf():
    history = torch.zeros(2)
    round_to_fp8(torch.tensor([2.0]), E4M3.dtype, history=history)
    spoilt = round_to_fp8(torch.tensor([torch.inf]), E4M3.dtype, history=history)
    assert spoilt.inverse_scale.isnan()
    assert history.tolist() == [0, 2]
    assert float(round_to_fp8(torch.tensor([2.0]), E4M3.dtype, history=history).scale) == 224


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_histories_that_follow_the_models_dtype(dtype):
    layer = FP8LinearLayer(8, 4, config=FP8Config(scaling="delayed")).to(dtype)
    x = torch.full((2, 8), 1e5)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        exact = torch.nn.functional.linear(x, layer.weight.float(), layer.bias.float())
        assert decibels(out, exact) > 3  # clamped to 65504 in fp16
    layer.scales.reset_parameters()
    assert not layer.scales.input_history.any()


def test_training_alone_writes_histories():
    layer = FP8LinearLayer(8, 4, config=FP8Config(scaling="delayed"))
    layer.eval()
    layer(torch.ones(2, 8))
    assert not layer.scales.input_history.any()
    layer.train()
    layer(torch.ones(2, 8)).sum().backward()
    assert layer.scales.input_history[0] == 1
    assert layer.scales.weight_history[0] == layer.weight.abs().max()
    assert layer.scales.gradient_history[0] == 1
    assert list(layer.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"forward_format": "e4m3"}, TypeError, "forward_format must be an FP8Format"),
        ({"backward_format": None}, TypeError, "backward_format must be an FP8Format"),
        ({"scaling": "static"}, ValueError, "scaling must be one of"),
        ({"history_length": 0}, ValueError, "history_length must be at least 1, not 0"),
        ({"margin": -1}, ValueError, "margin must be at least 0"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be at least 1"),
        ({"skip": "head"}, TypeError, r"a tuple of names: \('head',\)"),
        ({"loss_scale": 0.0}, ValueError, "loss_scale must be positive"),
        ({"loss_scale": float("nan")}, ValueError, "loss_scale must be positive"),
        ({"loss_scale": float("inf")}, ValueError, "at most 1.7e.38, not inf"),
        ({"loss_scale": -2}, ValueError, "loss_scale must be positive"),
        ({"loss_scale": True}, TypeError, "loss_scale must be a number, not True"),
        ({"loss_scale": "8"}, TypeError, r"loss_scale must be a number, not '8' \(str\)"),
        ({"history_length": True}, TypeError, "history_length must be an int, not True"),
        ({"history_length": 16.0}, TypeError, "history_length must be an int, not 16.0"),
        ({"history_length": None}, TypeError, "history_length must be an int, not None"),
        ({"margin": float("nan")}, TypeError, "margin must be an int, not nan"),
        ({"margin": False}, TypeError, "margin must be an int, not False"),
        ({"margin": 33}, ValueError, "margin must be at most 32, not 33"),
        ({"growth_interval": 2.5}, TypeError, "growth_interval must be an int, not 2.5"),
        ({"growth_interval": -1}, ValueError, "growth_interval must be at least 1, not -1"),
        ({"skip": ("head", 3)}, TypeError, r"a tuple of names: .* given \('head', 3\)"),
        ({"skip": None}, TypeError, "skip must be a tuple of names"),
        ({"scaling": None}, ValueError, "scaling must be one of"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        FP8Config(**options)
    assert FP8Config(skip=["head"]) == FP8Config(skip=("head",))
