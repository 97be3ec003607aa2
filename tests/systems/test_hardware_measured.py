"""Memory on the CPU that no trace of tensors shows: what ops take inside of themselves."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hardware_models import Make, allocator_peak, encoder, images, mlp, training_step, weight_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_cute import _torch_internals as internals
from flash_cute.core import AttentionLayer
from flash_cute.hardware import HardwareAbstractionLayer, allocator, inputs, layer, memory


class First(nn.Module):
    """The first output of a recurrent layer."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu_(self.into(x)).mul(2).add_(1))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp(64) for _ in range(4)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if self.reentrant and self.training else x
        for part in self.layers:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 64))


MODELS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "LSTM": (lambda: First(nn.LSTM(64, 64, batch_first=True)), (60, 64)),
    "LSTM, two ways": (
        lambda: First(nn.LSTM(32, 48, 2, batch_first=True, bidirectional=True, dropout=0.2)),
        (40, 32),
    ),
    "GRU": (lambda: First(nn.GRU(64, 64, batch_first=True)), (40, 64)),
    "convolutions": (images, (3, 48, 48)),
    "batch norm": (normalised, (3, 32, 32)),
    "encoder": (encoder, (96, 64)),
    "attention": (lambda: AttentionLayer(64, 4), (128, 64)),
    "attention without dropout": (lambda: AttentionLayer(64, 4, dropout=0.0), (128, 64)),
    "dropout": (dropped, (64,)),
    "in place": (InPlace, (64,)),
    "checkpoints": (lambda: Checkpointed(False), (64,)),
    "reentrant checkpoints": (lambda: Checkpointed(True), (64,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_estimates_are_what_the_allocator_gives_out(name: str):
    make, shape = MODELS[name]
    model, hal = make(), HardwareAbstractionLayer([])
    for batch in (random.randint(2, 9), random.randint(20, 60)):
        x = torch.randn(batch, *shape)
        weights, states = weight_bytes(model), 2 * sum(p.nbytes for p in model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            estimate = hal.estimate_memory_usage(model.train(), batch, x)
            inference = hal.estimate_memory_usage(model, batch, x, training=False)
        truth = weights + states + allocator_peak(training_step(model, x))
        assert 0.9 < estimate / truth < 1.3
        with torch.no_grad():
            truth = weights + allocator_peak(lambda x=x: model.eval()(x.clone()))
        assert 0.9 < inference / truth < 1.3


@pytest.mark.parametrize("shape", [(8, 700), (40, 100), (3, 10)])
def test_sparse_gradients_are_of_a_step(shape: tuple[int, int]):
    """Each is as large as the tokens are many, and AdamW's states are as large as the weights."""
    model = nn.Sequential(nn.Embedding(5000, 64, sparse=True), nn.Linear(64, 8))
    ids = torch.randint(5000, shape)
    estimate = HardwareAbstractionLayer([]).estimate_memory_usage(model, shape[0], ids)
    states = 2 * sum(p.nbytes for p in model.parameters())
    step = allocator_peak(lambda: model(ids.clone()).square().mean().backward())
    assert estimate == pytest.approx(weight_bytes(model) + states + step, rel=0.02)


class Graph(nn.Module):
    """Nodes of a graph: a sparse buffer times the features of each."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        edges = torch.where(torch.rand(64, 64) < 0.1, torch.randn(64, 64), 0.0)
        self.register_buffer("edges", edges.to_sparse(layout=layout))

    def forward(self, x: Tensor) -> Tensor:  # (batch, 64, 32)
        features = self.linear(x).transpose(0, 1)
        return torch.sparse.mm(self.edges, features.flatten(1)).view_as(features)


def parts(x: Tensor) -> list[Tensor]:
    names = ["_indices", "_values"] if x.layout is torch.sparse_coo else ["values"]
    names += {torch.sparse_csr: ["crow_indices", "col_indices"]}.get(x.layout, [])
    names += {torch.sparse_csc: ["ccol_indices", "row_indices"]}.get(x.layout, [])
    return [getattr(x, name)() for name in names]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_buffers_are_as_large_as_what_they_hold(layout: torch.layout):
    model, hal = Graph(layout), HardwareAbstractionLayer([])
    weights = sum(p.nbytes for p in model.parameters())
    storages = {x.data_ptr(): x.nbytes() for x in map(Tensor.untyped_storage, parts(model.edges))}
    held = weights + sum(storages.values())
    x = torch.randn(16, 64, 32)
    step = allocator_peak(lambda: model(x.clone()).square().mean().backward())
    estimate = hal.estimate_memory_usage(model, 16, x)
    assert 0.9 < estimate / (held + 2 * weights + step) < 1.3
    with torch.no_grad():
        truth = held + allocator_peak(lambda: model(x.clone()))
    assert 0.9 < hal.estimate_memory_usage(model, 16, x, training=False) / truth < 1.3
    assert hal.get_optimal_batch_size(model, x) > 1000
    assert memory.weights_of(model) == memory.resident(model, torch.device("cpu")) == held


def test_the_batch_that_fits_does(monkeypatch: pytest.MonkeyPatch):
    """By what a step of it really takes: of attention with dropout it was 4.5 times too large."""
    there = 2**27
    monkeypatch.setattr(layer, "available_memory", lambda device: there)
    for model, shape in (
        (AttentionLayer(64, 4), (128, 64)), (First(nn.LSTM(64, 64, batch_first=True)), (60, 64)),
    ):  # fmt: skip
        batch = HardwareAbstractionLayer([]).get_optimal_batch_size(model, torch.ones(1, *shape))
        step = training_step(model, torch.randn(batch, *shape))
        states = 2 * sum(p.nbytes for p in model.parameters())
        assert 0.75 * there < states + allocator_peak(step) <= there


def test_a_warning_says_why_a_model_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    model, x = AttentionLayer(64, 4), torch.ones(1, 512, 64)
    hal = HardwareAbstractionLayer([])
    measured = hal.estimate_memory_usage(model, 4, x)
    monkeypatch.setattr(layer, "available_memory", lambda device: 2**23)
    with pytest.warns(RuntimeWarning, match="AttentionLayer cannot be run to measure it, as there"):
        assert hal.estimate_memory_usage(model, 4, x) < 0.5 * measured
    with pytest.warns(RuntimeWarning, match="the estimate lacks memory"):
        assert hal.get_optimal_batch_size(model, x) < 8


@pytest.mark.parametrize("of", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_an_estimate_leaves_a_profiler_on(of: Callable[[], Any]):
    model, x, hal = nn.LSTM(16, 16), torch.ones(3, 2, 16), HardwareAbstractionLayer([])
    measured = hal.estimate_memory_usage(model, 8, x)
    with of() as profiled:
        with torch.profiler.record_function("before"):
            pass
        for call in (lambda: hal.estimate_memory_usage(model, 8, x),
                     lambda: hal.get_optimal_batch_size(model, x)):  # fmt: skip
            with pytest.warns(RuntimeWarning, match="a profiler of torch is on, which measuring"):
                assert call() > 0
        with torch.profiler.record_function("after"):
            pass
    names = [event.key for event in profiled.key_averages()]
    assert names.count("before") == names.count("after") == 1
    assert hal.estimate_memory_usage(model, 8, x) == measured  # the last one did not end badly


def test_batches_to_measure():
    cost = memory.Cost(1000, 2**16)
    assert memory.batches_to_measure(cost, 2**40) == (128, 192)
    assert memory.batches_to_measure(cost, 1000 + 2**16 * 4 * 3) == (2, 3)
    assert memory.batches_to_measure(cost, 999 + 2**16 * 4 * 3) is None
    assert memory.batches_to_measure(memory.Cost(0, 0.5), 2**40) == (4096, 6144)
    assert memory.batches_to_measure(memory.Cost(0, 2**30), 2**40) == (2, 3)


FLOPS: dict[str, tuple[Make, tuple[int, ...], int]] = {  # of forward, a sample
    "linear": (lambda: nn.Linear(64, 32), (7, 64), 2 * 7 * 64 * 32),
    "convolution": (lambda: nn.Conv2d(3, 8, 3), (3, 10, 10), 2 * 8 * 8 * 8 * 27),
    "LSTM": (lambda: First(nn.LSTM(16, 32, batch_first=True)), (9, 16), 2 * 9 * 4 * 32 * 48),
    "GRU": (lambda: First(nn.GRU(16, 32, batch_first=True)), (9, 16), 2 * 9 * 3 * 32 * 48),
    "attention": (
        lambda: AttentionLayer(64, 4, dropout=0.0), (40, 64), 2 * 40 * (4 * 64 * 64 + 2 * 40 * 64),
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 16), nn.Linear(16, 4)), (6,), 2 * 6 * 64),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOPS)
def test_a_trace_counts_the_operations_of_a_sample(name: str):
    make, shape, expected = FLOPS[name]
    model = make()
    x = torch.zeros(1, *shape, dtype=torch.long if name == "embedding" else torch.float32)
    sample = inputs.sample_of(model, x)
    costs = [memory.traced(model, sample, torch.device("cpu"), flag) for flag in (False, True)]
    assert costs[0].flops == expected and 2 * expected <= costs[1].flops <= 3.5 * expected


def test_long_steps_are_not_run(monkeypatch: pytest.MonkeyPatch):
    model, x, hal = mlp(64), torch.ones(1, 64), HardwareAbstractionLayer([])
    flops = memory.traced(model, inputs.sample_of(model, x), torch.device("cpu"), True).flops
    fixed, batch = 2.0**20, memory.MEASURED_BATCHES
    threads = torch.get_num_threads()
    monkeypatch.setattr(memory, "MEASURED_FLOPS", flops * sum(batch) / threads)
    assert memory.batches_to_measure(memory.Cost(fixed, 1.0, 0.0, flops), 2**40) == batch
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        measured = hal.estimate_memory_usage(model, 4, x)
    monkeypatch.setattr(memory, "MEASURED_FLOPS", 0.99 * flops * sum(batch) / threads)
    assert memory.batches_to_measure(memory.Cost(fixed, 1.0, 0.0, flops), 2**40) is None
    monkeypatch.setattr(memory, "measured_on_cpu", None)  # not called
    with pytest.warns(
        RuntimeWarning, match="cannot be run to measure it, as a sample takes .* operations"
    ):
        assert hal.estimate_memory_usage(model, 4, x) == pytest.approx(measured, rel=0.3)
    with pytest.warns(RuntimeWarning, match="too many for an estimate"):
        assert hal.get_optimal_batch_size(model, x) > 8


def test_events_of_a_run():
    kept: list[Tensor] = []
    before = torch.ones(500)

    def run() -> list[Tensor]:
        nonlocal before
        first = torch.ones(1000)
        kept.append(torch.ones(2000))
        del first, before
        second = torch.ones(3000)
        return [second]

    events = allocator.recorded(run)
    assert [size for _, size in events] == [4000, 8000, -4000]
    assert events[2][0] == events[0][0] != events[1][0]
    assert allocator.peak(events) == 12000


def test_events_follow_the_batch():
    """The peak of a large batch may lie at another time than that of a small one."""

    def of(batch: int) -> allocator.Events:
        return [(0, 1000), (1, 10 * batch), (0, -1000), (2, 30 * batch)]

    found = allocator.extrapolated((of(4), of(6)), (4, 6), 1000)
    assert found == of(1000) and allocator.peak(found) == 40_000
    assert allocator.extrapolated((of(4), of(6)[:3]), (4, 6), 1000) is None
    shrinks = [(0, 900), *of(6)[1:]]
    assert allocator.extrapolated((of(4), shrinks), (4, 6), 1000) is None
    grows = [(0, 2000), *of(6)[1:]]
    assert allocator.extrapolated((of(4), grows), (4, 6), 1000) is None


def test_steps_that_differ_are_on_a_line_through_their_peaks(monkeypatch: pytest.MonkeyPatch):
    events = iter([[(0, 100), (1, 40)], [(0, 180)]])
    monkeypatch.setattr(allocator, "recorded", lambda run: next(events))
    model = nn.Linear(4, 4)
    sample = inputs.sample_of(model, torch.ones(1, 4))
    cost = memory.measured_on_cpu(model, sample, (2, 4), training=False)
    assert (cost.fixed, cost.per_sample) == (weight_bytes(model) + 100, 20)


def test_measuring_leaves_the_model_and_the_generator(monkeypatch: pytest.MonkeyPatch):
    model, seen = normalised(), []
    model[0].register_forward_pre_hook(lambda m, x: seen.append(m.weight))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    generator = torch.get_rng_state()
    HardwareAbstractionLayer([]).estimate_memory_usage(model, 4, torch.ones(1, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
    real = [weight for weight in seen if not internals.is_fake(weight)]
    address = model[0].weight.data_ptr()
    assert [weight.data_ptr() for weight in real] == [address] * 2  # shared, by both batches
    assert all(p.grad is None for p in model.parameters())
