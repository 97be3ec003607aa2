"""Delayed scales: when histories are used, what changes or ends them, what refuses them."""

from __future__ import annotations

import copy

import pytest
import torch
from fp8_cases import decibels, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from flash_cute.precision import FP8Config, FP8LinearLayer, convert_model_to_fp8
from flash_cute.precision.fp8_scales import FP8Scales

DELAYED = FP8Config(scaling="delayed")


def histories(model):
    scales = [module for module in model.modules() if isinstance(module, FP8Scales)]
    return [history for part in scales for history in part.buffers()]


def trained(steps=3, model=None):
    """A model with delayed scales whose histories hold something."""
    model = convert_model_to_fp8(model or mlp(16, 32, 32, 8), DELAYED)
    for _ in range(steps):
        model(torch.randn(20, 16)).square().sum().backward()
    assert sum(bool(history[0] > 0) for history in histories(model)) >= 6
    return model


def times_8_in_data(model):
    for p in model.parameters():
        p.data *= 8


def times_8_in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(8 * p)


def times_8_loaded(model, assign=False):
    state = {name: 8 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


CHANGES = {
    "data": times_8_in_data,
    "in place": times_8_in_place,
    "loaded": times_8_loaded,
    "assigned": lambda model: times_8_loaded(model, assign=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_in_evaluation_scales_come_from_what_is_there(device, change):
    """Whatever wrote the weights since, and however much larger inner inputs became."""
    model = trained().to(device)
    dynamic = convert_model_to_fp8(copy.deepcopy(model), FP8Config()).eval()
    model.eval()
    for each in (model, dynamic):
        change(each)
    x = torch.randn(20, 16, device=device, requires_grad=True)
    grads = [torch.autograd.grad(m(x).sum(), [x, *m.parameters()]) for m in (model, dynamic)]
    assert torch.equal(model(x), dynamic(x))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("factor", [8.0, 1 / 8])
def test_in_training_no_weight_is_clamped(factor):
    layer = FP8LinearLayer(16, 8, bias=False, config=DELAYED)
    x = torch.randn(20, 16)
    layer(x)
    layer.weight.data *= factor
    exact = nn.functional.linear(x, layer.weight)
    assert decibels(layer(x), exact) > 20
    assert layer.scales.weight_history[0] == layer.weight.abs().max()


@pytest.mark.parametrize("attention", [False, True])
def test_loading_ends_histories(attention):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = trained(model=layer) if attention else trained()
    fresh = convert_model_to_fp8(copy.deepcopy(model), FP8Config())
    convert_model_to_fp8(fresh, DELAYED)
    assert not any(history.any() for history in histories(fresh))
    model.load_state_dict(model.state_dict())
    x = torch.randn(5, 16)
    assert torch.equal(model(x), fresh(x))
    for ours, theirs in zip(histories(model), histories(fresh), strict=True):
        assert torch.equal(ours, theirs)
    model.load_state_dict({}, strict=False)
    assert not any(history.any() for history in histories(model))


def test_copies_have_histories_of_their_own():
    model = trained()
    before = [history.clone() for history in histories(model)]
    copied = copy.deepcopy(model)
    assert all(map(torch.equal, histories(copied), before))
    copied(100 * torch.randn(3, 16)).sum().backward()
    assert all(map(torch.equal, histories(model), before))
    assert not any(map(torch.equal, histories(copied), before))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_histories_do_not_follow_the_models_dtype(dtype):
    """What fp32 has had may be infinite in fp16, which would hide all values for ever."""
    layer = FP8LinearLayer(8, 4, config=DELAYED)
    layer(torch.full((2, 8), 1e6)).sum().backward()
    layer.to(dtype)
    assert {history.dtype for history in histories(layer)} == {torch.float32}
    assert layer.scales.input_history[0] == 1e6
    out = layer(torch.full((2, 8), 100.0, dtype=dtype))
    assert out.dtype == dtype and out.isfinite().all()
    layer.to("meta")
    assert all(history.is_meta for history in histories(layer))


def test_bad_batches_leave_nothing():
    layer = FP8LinearLayer(8, 4, config=DELAYED)
    fresh = copy.deepcopy(layer)
    x = torch.randn(5, 8)
    for bad in (torch.nan, torch.inf):
        for _ in range(150):
            layer(x * bad).square().sum().backward()
    assert not histories(layer)[0].any() and not histories(layer)[2].any()
    layer.zero_grad()
    for each in (layer, fresh):
        each(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, fresh.weight.grad)


def graph_of_checkpoint(layer):
    def call(x):
        return checkpoint(layer, x, use_reentrant=False)

    return torch.compile(call, backend="aot_eager", fullgraph=True)


def checkpoint_of_graph(layer, reentrant=False):
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    return lambda x: checkpoint(run, x, use_reentrant=reentrant)


ORDERS = {
    "checkpoint in a graph": graph_of_checkpoint,
    "graph in a checkpoint": checkpoint_of_graph,
    "graph in a reentrant checkpoint": lambda layer: checkpoint_of_graph(layer, True),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_graphs_refuse_checkpoints_as_eager_code_does(order):
    torch.compiler.reset()
    model = convert_model_to_fp8(mlp(8, 16, 4), DELAYED)
    call = order(model)
    x = torch.randn(3, 8, requires_grad=True)
    for _ in range(2):  # traced, and then as it is kept
        out = call(x)
        before = [history.clone() for history in histories(model)]
        with pytest.raises(NotImplementedError, match=r"use FP8Config\(scaling='dynamic'\)"):
            out.sum().backward()
        forward = zip(histories(model), before, strict=True)
        assert all(torch.equal(a, b) for i, (a, b) in enumerate(forward) if i % 3 < 2)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("config", [FP8Config(), DELAYED], ids=["dynamic", "evaluation"])
def test_what_graphs_need_not_refuse_is_right(order, config):
    torch.compiler.reset()
    model = convert_model_to_fp8(mlp(8, 16, 4), config).train(config is not DELAYED)
    call = order(model)
    for _ in range(2):
        x = torch.randn(3, 8, requires_grad=True)
        wanted = [x, *model.parameters()]
        exact = torch.autograd.grad(model(x).square().sum(), wanted)
        model.zero_grad(), call(x).square().sum().backward()
        for ours, theirs in zip(wanted, exact, strict=True):
            torch.testing.assert_close(ours.grad, theirs)


def test_scales_that_fp32_has_apart_but_not_multiplied():
    """1e30 times 0, and results near the least normal number."""
    layer = FP8LinearLayer(16, 4, bias=False)
    x = torch.randn(3, 16) * 1e30
    x[1] = 0
    layer.weight.data *= 1e20
    layer.weight.data[2] = 0
    out = layer(x)
    assert not out[1].any() and not out[:, 2].any()
    layer.weight.data *= 1e-38
    x *= 1e-30
    x *= 1e-18
    exact = nn.functional.linear(x.double(), layer.weight.double())
    assert decibels(layer(x).double(), exact) > 20


def test_a_margin_above_the_largest_numbers():
    layer = FP8LinearLayer(8, 4, bias=False, config=FP8Config(margin=4))
    x = torch.full((2, 8), 3e38)
    exact = nn.functional.linear(x.double(), layer.weight.double())
    layer.weight.data *= 1e-3
    assert decibels(layer(x).double(), exact * 1e-3) > 15
