"""Batch sizes that fit, and the inputs that they are found with."""

from __future__ import annotations

import pytest
import torch
from hardware_models import (
    CPU,
    Attention,
    ByValues,
    Make,
    Opaque,
    Restless,
    encoder,
    images,
    mlp,
    training_step,
    weight_bytes,
)
from torch import nn

from flash_cute.hardware import HardwareAbstractionLayer, inputs, layer, memory
from flash_cute.precision import convert_model_to_fp8


@pytest.fixture
def gibibyte(monkeypatch: pytest.MonkeyPatch) -> int:
    """Every device has 1 GiB left."""
    monkeypatch.setattr(layer, "available_memory", lambda device: 2**30)
    return 2**30


@pytest.mark.parametrize("make", [mlp, encoder, Attention])
def test_batch_fits_and_the_next_does_not(make: Make, gibibyte: int):
    hal, model = HardwareAbstractionLayer([]), make()
    for training in (True, False):
        batch = hal.get_optimal_batch_size(model, training=training)
        assert type(batch) is int and batch > 8 and batch % 8 == 0
        more = [hal.estimate_memory_usage(model, batch + n, None, training) for n in (0, 8)]
        there = weight_bytes(model)
        assert more[0] - there <= 0.9 * gibibyte < more[1] - there


def test_batch_depends_on_the_model(gibibyte: int):
    hal = HardwareAbstractionLayer([])
    sizes = [hal.get_optimal_batch_size(mlp(width)) for width in (64, 128, 256)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.8 * sizes[1] > 3 * sizes[2]
    deep = [nn.Sequential(*[encoder()] * n) for n in (1, 4)]
    layers = [hal.get_optimal_batch_size(model, torch.zeros(1, 64, 64)) for model in deep]
    assert 2 < layers[0] / layers[1] < 5


def test_no_tensor_of_a_batch_is_larger_than_kernels_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layer, "available_memory", lambda device: 2**60)
    batch = HardwareAbstractionLayer([]).get_optimal_batch_size(nn.Linear(64, 1024))
    assert 2**31 - 8 * 1024 <= batch * 1024 < 2**31


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layer, "available_memory", lambda device: 2**20)
    with pytest.raises(MemoryError, match=r"one sample of Sequential needs \d+ bytes"):
        HardwareAbstractionLayer([]).get_optimal_batch_size(mlp())


def test_the_model_is_left_as_it_is(device: str):
    model = Restless().to(device)
    model.norm.eval()
    model(torch.randn(3, 8, device=device)).sum().backward()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    random, last, modes = torch.get_rng_state(), model.last, [m.training for m in model.modules()]
    random_cuda = torch.cuda.get_rng_state_all() if device == "cuda" else []
    hal = HardwareAbstractionLayer([torch.device(device)])
    hal.get_optimal_batch_size(model)
    hal.estimate_memory_usage(model, 8)
    assert model.steps == 1 and model.last is last
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    if device == "cuda":
        now = torch.cuda.get_rng_state_all()
        assert all(torch.equal(a, b) for a, b in zip(random_cuda, now, strict=True))


def test_measured_steps_are_real_and_share_the_weights(monkeypatch: pytest.MonkeyPatch):
    """Of CUDA's allocator only the figures are made up."""
    peaks, weights = iter([1000, 1400]), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    model = Restless()
    model.linear.register_forward_pre_hook(lambda m, x: weights.append(m.weight.data_ptr()))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    cost = memory.measured(model, inputs.sample_of(model, torch.ones(2, 8)), CPU, training=True)
    states = 2 * sum(p.nbytes for p in model.parameters())
    assert (cost.fixed, cost.per_sample) == (200 + memory.weights_of(model) + states, 400)
    assert weights == [model.linear.weight.data_ptr()] * 2
    assert model.steps == 0 and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())


@pytest.mark.usefixtures("no_garbage")
def test_batch_fits_on_cuda(cuda, gibibyte: int):
    model = encoder().to(cuda)
    hal = HardwareAbstractionLayer([torch.device(cuda)])
    batch = hal.get_optimal_batch_size(model)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training_step(model, torch.randn(batch, 512, 64, device=cuda))()
    peak = torch.cuda.max_memory_allocated() - before
    assert 0.5 * gibibyte < peak < gibibyte


def test_inputs_that_follow_from_the_first_layer(gibibyte: int):
    hal = HardwareAbstractionLayer([])
    tokens = nn.Sequential(nn.Embedding(50, 64), nn.LayerNorm(64), encoder())
    projected = nn.Sequential(nn.Linear(10, 64), encoder())
    models = [tokens, projected, encoder(False), nn.MultiheadAttention(64, 4), Attention()]
    models += [convert_model_to_fp8(x, inplace=False) for x in (nn.Linear(8, 8), projected)]
    assert all(hal.get_optimal_batch_size(model) > 0 for model in models)
    # 512 tokens: the widest saved activation alone has as many rows
    assert hal.estimate_memory_usage(tokens, 2) - hal.estimate_memory_usage(tokens, 1) > 512 * 256
    same = [hal.get_optimal_batch_size(encoder(first)) for first in (True, False)]
    assert abs(same[0] - same[1]) <= 8


def test_other_models_need_a_sample(gibibyte: int):
    hal = HardwareAbstractionLayer([])
    for ask in (hal.get_optimal_batch_size, lambda m: hal.estimate_memory_usage(m, 2)):
        with pytest.raises(ValueError, match="Opaque do not determine its input; pass sam"):
            ask(Opaque())
    with pytest.raises(ValueError, match="pass sample_input"):
        hal.get_optimal_batch_size(images())
    assert hal.get_optimal_batch_size(Opaque(), torch.ones(3, 7)) > 0
    assert hal.get_optimal_batch_size(images(), torch.ones(1, 3, 8, 8)) > 0
    pair = nn.Bilinear(4, 5, 6)
    assert hal.get_optimal_batch_size(pair, (torch.ones(2, 4), torch.ones(2, 5))) > 0


def test_wrong_arguments():
    hal = HardwareAbstractionLayer([])
    with pytest.raises(ValueError, match=r"does not take an input of shape \(2, 3\)"):
        hal.estimate_memory_usage(nn.Linear(7, 7), 2, torch.ones(2, 3))
    with pytest.raises(ValueError, match="holds no sample"):
        hal.estimate_memory_usage(nn.Linear(7, 7), 2, torch.ones(0, 7))
    with pytest.raises(TypeError, match="sample_input is list"):
        hal.estimate_memory_usage(nn.Linear(7, 7), 2, [torch.ones(7)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size is 0"):
        hal.estimate_memory_usage(mlp(), 0)
    with pytest.raises(TypeError, match="training is 1; expected a bool"):
        hal.estimate_memory_usage(mlp(), 2, training=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"batch_size is 2\.5"):
        hal.estimate_memory_usage(mlp(), 2.5)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="ByValues cannot be traced"):
        hal.estimate_memory_usage(ByValues(4, 4), 2)
