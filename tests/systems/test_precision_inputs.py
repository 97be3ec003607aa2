"""Inputs of layers that are rounded to 8 bits: to the nearest level, by scales that follow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_cute.precision import PrecisionConfig, PrecisionFormat, QuantizationMode
from flash_cute.precision.inputs import InputRounding, round_inputs_of

FORMATS = [PrecisionFormat.INT8, PrecisionFormat.FP8_E4M3]


def config(form: PrecisionFormat, mode: str = "dynamic") -> PrecisionConfig:
    return PrecisionConfig(form, quantization_mode=QuantizationMode(mode))


def bound(x: Tensor, peak: Tensor, form: PrecisionFormat) -> Tensor:
    """Half a level of 127, or half a unit of 3 bits of mantissa; fp32 besides."""
    if form is PrecisionFormat.INT8:
        half = (peak / 127 / 2).expand_as(x)
    else:
        half = torch.maximum(x.abs() * 2.0**-4, peak / 448 * 2.0**-10)
    return half * (1 + 1e-5) + 1e-6 * peak


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.value)
@pytest.mark.parametrize("per_sample", [False, True])
def test_each_token_or_sample_has_a_scale_of_its_own(form: PrecisionFormat, per_sample: bool):
    x = torch.randn(4, 6, 32) * torch.logspace(-4, 3, 24).view(4, 6, 1)
    x[2, 3] = 0
    rounding = InputRounding(config(form), per_sample, x.device)
    got = rounding(x)
    assert rounding.scale is None and got.dtype == x.dtype and not got[2, 3].any()
    dims = (1, 2) if per_sample else (2,)
    peak = x.abs().amax(dims, keepdim=True)
    assert ((got - x).abs() <= bound(x, peak, form)).all() and not torch.equal(got, x)
    largest = x.abs() == peak
    torch.testing.assert_close(got[largest], x[largest], rtol=1e-6, atol=0)  # a level itself
    assert (got[1] != x[1]).float().mean() > 0.9


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.value)
def test_a_static_scale_is_that_of_the_first_call(form: PrecisionFormat):
    first = torch.randn(5, 16)
    rounding = InputRounding(config(form, "static"), False, first.device)
    assert rounding.scale == 0
    peak = first.abs().max()
    assert ((rounding(first) - first).abs() <= bound(first, peak, form)).all()
    assert rounding.scale == peak
    larger = 3 * first
    clipped = rounding(larger)
    assert rounding.scale == peak and clipped.abs().max() == pytest.approx(peak.item(), rel=1e-6)
    inside = larger.abs() < peak
    assert ((clipped - larger).abs() <= bound(larger, peak, form))[inside].all()
    assert torch.equal(clipped.sign(), larger.sign() * (clipped != 0))


def test_gradients_pass_as_if_nothing_was_rounded():
    x = torch.randn(3, 8, requires_grad=True)
    dout = torch.randn(3, 8)
    InputRounding(config(PrecisionFormat.INT8), False, x.device)(x).backward(dout)
    assert torch.equal(x.grad, dout)


class Kinds(nn.Module):
    """Every layer whose inputs are rounded, one whose inputs are not, and attention by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.norm = nn.Linear(8, 8), nn.Conv1d(8, 8, 1), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.attention(x, x + 1, value=x - 1, need_weights=False)[0]


def test_every_layer_rounds_what_it_is_given():
    """By position and by name, of convolutions by sample: as the model with rounding by hand."""
    torch.manual_seed(0)
    model, x = Kinds(), torch.randn(3, 5, 8) * torch.logspace(-1, 1, 3).view(3, 1, 1)
    rounded, chosen = copy.deepcopy(model), config(PrecisionFormat.INT8)
    round_inputs_of(rounded, chosen)
    assert not hasattr(rounded.norm, "input_rounding")
    by_token, by_sample = (InputRounding(chosen, each, x.device) for each in (False, True))
    y = model.norm(model.linear(by_token(x)))
    y = model.conv(by_sample(y.transpose(1, 2))).transpose(1, 2)
    q, k, v = by_token(y), by_token(y + 1), by_token(y - 1)
    expected = model.attention(q, k, v, need_weights=False)[0]
    torch.testing.assert_close(rounded(x), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(rounded(x), model(x), rtol=1e-4, atol=1e-5)


def test_one_tensor_for_query_key_and_value_stays_one():
    """torch's attention has a faster way for it; masks and integers stay as they are."""
    attention = nn.MultiheadAttention(8, 2)
    round_inputs_of(attention, config(PrecisionFormat.FP8_E4M3))
    seen: list[tuple[Any, ...]] = []

    def see(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        seen.append((*given, named))

    attention.register_forward_pre_hook(see, with_kwargs=True)
    x, mask = torch.randn(4, 2, 8), torch.full((4, 4), -torch.inf).triu(1)
    attention(x, x, x, attn_mask=mask)
    query, key, value, named = seen[0]
    assert query is key is value and not torch.equal(query, x)
    assert named["attn_mask"] is mask


@pytest.mark.parametrize(
    ("form", "mode", "rounds"),
    [("int8", "dynamic", True), ("fp8_e4m3", "static", True), ("int8", "weight_only", False),
     ("fp16", "dynamic", False), ("fp32", "static", False)],
)  # fmt: skip
def test_which_configs_round_inputs(form: str, mode: str, rounds: bool):
    assert config(PrecisionFormat(form), mode).rounds_inputs is rounds
