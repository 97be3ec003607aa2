"""Dropout: its rate and mean."""

from __future__ import annotations

import dataclasses

import checks
import pytest
import torch

from flash_cute.call.philox import dropout_keep, dropout_rate
from flash_cute.testing import bounds
from flash_cute.testing.cases import Case, Inputs, VarlenCase

BF16 = torch.bfloat16
RATES = (0.5, 0.9, 0.9999, 0.99999, 0.999995)


def even(inputs: Inputs) -> Inputs:
    """The same inputs with equal weights for all keys, and values of 1."""
    return dataclasses.replace(inputs, q=torch.zeros_like(inputs.q), v=torch.ones_like(inputs.v))


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.3, *RATES])
def test_what_is_kept_makes_up_for_what_is_dropped(p):
    drop_below, keep_scale = dropout_rate(p)
    assert abs(drop_below / 65536 - p) <= 2**-16
    assert keep_scale * (65536 - drop_below) == pytest.approx(65536, rel=1e-15)


def test_a_rate_of_1_drops_everything():
    assert dropout_rate(1.0) == (65536, 0.0)
    assert dropout_rate(1 - 2**-53)[0] == 65535


@pytest.mark.parametrize("p", RATES)
def test_dropout_keeps_the_mean(make, p):
    """Of values of 1 it is 1: each row by the number of its keys that are kept, and over 2^22."""
    inputs = even(make(Case(heads=4, seqlen_q=512, seqlen_k=1024, dim=8, dropout_p=p)))
    out, _, _, _ = inputs.forward()
    places = (torch.arange(n, device=out.device) for n in (8, 512, 1024))
    kept = dropout_keep(inputs.options["rng"], p, *places).sum(-1).view(2, 4, 512).transpose(1, 2)
    rate = min(round(p * 65536), 65535) / 65536
    expected = (kept / 1024 / (1 - rate))[..., None].expand_as(out)
    bounds.compare("out", out, expected, 1e-5 * expected + 1e-30)
    deviation = (rate / (1 - rate) / (8 * 512 * 1024)) ** 0.5
    assert abs(float(out.double().mean()) - 1) < 4 * deviation


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_a_rate_of_1_gives_0(make, packed):
    sizes = {"heads": 2, "dim": 16, "dropout_p": 1.0, "dtype": BF16}
    inputs = make(VarlenCase(**sizes) if packed else Case(**sizes))
    out, lse, _, _ = inputs.forward()
    without = dataclasses.replace(inputs, options=inputs.options | {"dropout_p": 0.0})
    assert not out.any()
    bounds.check_lse("softmax_lse", lse, without.forward()[1].double())
    assert not any(grad.any() for grad in checks.gradients(inputs).values())


@pytest.mark.parametrize("p", RATES)
def test_backward_has_the_factor_of_forward(make, p):
    """out is linear in v: sum(out * dout) = sum(v * dv). And all gradients are in bounds."""
    inputs = make(Case(heads=2, seqlen_q=128, seqlen_k=512, dim=16, dropout_p=p))
    out, lse, _, _ = inputs.forward()
    grads = inputs.backward(out, lse)
    bounds.check_gradients(grads, inputs, out)
    products = (out.double() * inputs.dout, inputs.v.double() * grads["v"])
    size = float(products[0].abs().sum())
    assert abs(float(products[0].sum() - products[1].sum())) <= 1e-5 * size
