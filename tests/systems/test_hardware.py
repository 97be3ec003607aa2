"""flash_cute.hardware: the truth about devices, and memory as the allocator sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import flash_cute
from flash_cute.hardware import (
    HardwareAbstractionLayer,
    available_memory,
    detect_available_devices,
    inputs,
    layer,
    memory,
)
from flash_cute.hardware import devices as hardware_devices
from flash_cute.precision import convert_model_to_fp8

CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


class Attention(nn.Module):
    """A layer with flash_cute's attention, sizes under the usual names."""

    def __init__(self, d_model: int = 64, num_heads: int = 4) -> None:
        super().__init__()
        self.d_model, self.num_heads = d_model, num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        return self.out(flash_cute.flash_attn_qkvpacked_func(qkv).flatten(2))


class Restless(nn.Module):
    """Changes its buffer, an attribute and the random state in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.steps, self.last = 0, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.last = self.norm(self.linear(x)) + torch.rand(8, device=x.device)
        return self.last


class Opaque(nn.Module):
    """What it takes does not follow from its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)


class ByValues(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else x


def mlp(width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def encoder(batch_first: bool = True) -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=batch_first)


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3))


# --- devices -------------------------------------------------------------------------------------


def test_devices_are_those_of_torch():
    found = detect_available_devices()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert found["cuda"] == [torch.device("cuda", i) for i in range(count)]
    assert found["cpu"] == [CPU]
    for group in found.values():
        for device in group:
            assert torch.ones(2, device=device).sum().item() == 2


def test_devices_that_torch_gains_are_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = detect_available_devices()
    assert found["cuda"] == [torch.device("cuda", i) for i in range(3)]
    hal = HardwareAbstractionLayer(found["cuda"][1:])
    assert hal.device == torch.device("cuda", 1)
    assert HardwareAbstractionLayer().device == torch.device("cuda", 0)


def test_another_accelerator_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch):
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(accelerator, "device_count", lambda: 2)
    assert detect_available_devices()["xpu"] == [torch.device("xpu", 0), torch.device("xpu", 1)]


def test_target_devices():
    assert HardwareAbstractionLayer([]).target_devices == [CPU]
    assert HardwareAbstractionLayer([torch.device("cpu", 0)]).device == CPU
    expected = (detect_available_devices()["cuda"] or [CPU])[0]
    assert HardwareAbstractionLayer().device == expected
    with pytest.raises(ValueError, match=r"target_devices\[1\] is cuda:99; torch has here: .*cpu"):
        HardwareAbstractionLayer([CPU, torch.device("cuda", 99)])
    for name in ("meta", "xyz"):
        with pytest.raises(ValueError, match=name):
            HardwareAbstractionLayer([name])
    with pytest.raises(TypeError, match="expected a list"):
        HardwareAbstractionLayer(CPU)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"target_devices\[0\] is 7"):
        HardwareAbstractionLayer([7])  # type: ignore[list-item]


def test_available_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path):
    assert 2**26 < available_memory(CPU) < 2**50
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text(f"{2**20}\n")
    used.write_text("1024\n")
    monkeypatch.setattr(hardware_devices, "_CGROUP_FILES", ((str(limit), str(used)),))
    assert available_memory(CPU) == 2**20 - 1024
    limit.write_text("max\n")
    assert available_memory(CPU) > 2**26


def test_available_memory_of_cuda(cuda):
    device = torch.device(cuda, 0)
    before = available_memory(device)
    x = torch.empty(2**28, dtype=torch.uint8, device=device)
    taken = before - available_memory(device)
    assert abs(taken - x.numel()) < 2**25
    del x
    assert abs(available_memory(device) - before) < 2**25  # what is cached can be had


# --- optimize_for_hardware -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, encoder, Attention, images])
def test_optimize_keeps_the_function(make: Make, device: str):
    shape = {mlp: (9, 256), images: (2, 3, 12, 10)}.get(make, (2, 9, 64))
    model = make().eval()
    plain, x = copy.deepcopy(model).to(device), torch.randn(*shape, device=device)
    parameters, keys = list(model.parameters()), list(model.state_dict())
    hal = HardwareAbstractionLayer([torch.device(device)])
    optimized = hal.optimize_for_hardware(model)
    assert optimized is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert {p.device.type for p in model.parameters()} == {device}
    assert list(model.state_dict()) == keys and not model.training
    plain.load_state_dict(model.state_dict())
    expected = plain(x)
    torch.testing.assert_close(optimized(x), expected, rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = optimized.train()(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in model.parameters())
    assert losses[-1] < losses[0]


def test_optimize_says_and_does_what_it_says():
    hal = HardwareAbstractionLayer([CPU])
    model = hal.optimize_for_hardware(images())
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert model(torch.randn(2, 3, 9, 9)).is_contiguous(memory_format=torch.channels_last)
    assert hal.report == ["0: weight is channels-last", "2: weight is channels-last"]
    volume = hal.optimize_for_hardware(nn.Conv3d(2, 3, 2))
    assert volume.weight.is_contiguous(memory_format=torch.channels_last_3d)
    for nothing_to_do in (mlp(), volume, weight_norm(nn.Conv2d(2, 3, 3))):
        hal.optimize_for_hardware(nothing_to_do)
        assert hal.report == []


def test_optimize_moves_to_cuda(cuda):
    hal = HardwareAbstractionLayer([torch.device(cuda)])
    model = hal.optimize_for_hardware(Restless())
    assert {x.device for x in model.state_dict().values()} == {torch.device(cuda, 0)}
    assert hal.report == ["moved to cuda:0"]


def test_optimize_refuses_what_has_no_values():
    hal = HardwareAbstractionLayer([])
    with pytest.raises(ValueError, match="weight has no values"):
        hal.optimize_for_hardware(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="has no values"):
        hal.optimize_for_hardware(nn.LazyLinear(2))
    with pytest.raises(TypeError, match="expected an nn"):
        hal.optimize_for_hardware(torch.ones(2))  # type: ignore[arg-type]


# --- memory --------------------------------------------------------------------------------------


def allocator_peak(run: Callable[[], object]) -> int:
    """The most bytes that torch's allocator of the CPU had given out at once during ``run``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A step of training in its steady state."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(x.clone()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def weight_bytes(model: nn.Module) -> int:
    return sum(x.nbytes for x in [*model.parameters(), *model.buffers()])


STEPS = [
    pytest.param(mlp, (2048, 256), id="activations outweigh weights"),
    pytest.param(lambda: nn.Linear(512, 512), (4, 512), id="weights outweigh activations"),
    pytest.param(encoder, (16, 128, 64), id="encoder"),
    pytest.param(lambda: mlp().bfloat16(), (2048, 256), id="bf16"),
]


@pytest.mark.parametrize(("make", "shape"), STEPS)
def test_estimate_is_the_allocator_s_peak(make: Make, shape: tuple[int, ...]):
    model = make()
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    step, weights = training_step(model, x), weight_bytes(model)
    held = 3 * weights  # weights and AdamW's state
    peak = held + allocator_peak(step)
    estimate = HardwareAbstractionLayer([]).estimate_memory_usage(model, len(x), x)
    assert estimate == pytest.approx(peak, rel=0.1)

    torch.backends.mha.set_fastpath_enabled(False)  # which is one op for a whole layer
    with torch.no_grad():
        peak = weights + allocator_peak(lambda: model.eval()(x.clone()))
    torch.backends.mha.set_fastpath_enabled(True)
    estimate = HardwareAbstractionLayer([]).estimate_memory_usage(model, len(x), x, training=False)
    assert estimate == pytest.approx(peak, rel=0.15)


def test_estimate_of_attention_covers_what_backward_needs():
    """The op's outputs that backward reads, q, k and v, are seen through the fakes."""
    model, tokens = Attention(), 256
    x = torch.zeros(1, tokens, 64)
    hal = HardwareAbstractionLayer([])
    one, two = (hal.estimate_memory_usage(model, n, x) for n in (1, 2))
    saved = (1 + 3 + 1) * x.nbytes + 4 * tokens * 4  # input, qkv, out, lse of 4 heads
    assert saved < two - one < 3 * saved


@pytest.mark.parametrize("make", [mlp, encoder, Attention])
def test_estimate_is_linear_in_the_batch_and_covers_the_weights(make: Make):
    hal, model = HardwareAbstractionLayer([]), make()
    for training, copies in ((True, 4), (False, 1)):
        values = [hal.estimate_memory_usage(model, n, None, training) for n in (1, 2, 4, 1000)]
        assert all(isinstance(value, float) for value in values)
        slope = values[1] - values[0]
        assert slope > 0
        assert values[2] - values[1] == pytest.approx(2 * slope)
        assert values[3] - values[2] == pytest.approx(996 * slope)
        assert values[0] >= copies * weight_bytes(model) + slope - 1


def test_frozen_weights_need_neither_gradients_nor_state():
    hal, model = HardwareAbstractionLayer([]), mlp()
    full = hal.estimate_memory_usage(model, 1)
    model[0].requires_grad_(False)
    frozen = sum(p.nbytes for p in model[0].parameters())
    assert full - hal.estimate_memory_usage(model, 1) == pytest.approx(3 * frozen, rel=0.01)


class Checkpointed(nn.Module):
    """Layers that run forward again in backward, if asked to."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp(64) for _ in range(6)])
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for part in self.layers:
            x = checkpoint(part, x, use_reentrant=False) if self.again else part(x)
        return x


def test_estimate_follows_checkpoints_and_autocast():
    hal, x = HardwareAbstractionLayer([]), torch.zeros(1, 64)
    kept, again = (hal.estimate_memory_usage(Checkpointed(a), 4096, x) for a in (False, True))
    assert again < 0.6 * kept
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert hal.estimate_memory_usage(Checkpointed(False), 4096, x) < 0.8 * kept


class Tied(nn.Module):
    """Tokens in and logits out by one weight; the result is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.logits = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        self.logits.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor | None]:
        return {"loss": None, "logits": self.logits(self.tokens(ids))}


def test_weights_that_are_tied_count_once():
    ids = torch.zeros(1, 1, dtype=torch.int64)
    hal, weights = HardwareAbstractionLayer([]), 1000 * 64 * 4
    assert 4 * weights < hal.estimate_memory_usage(Tied(), 1, ids) < 4.2 * weights
    assert weights < hal.estimate_memory_usage(Tied(), 1, ids, training=False) < 1.2 * weights


def test_estimate_is_the_same_without_gradients_and_of_a_compiled_model():
    hal, model = HardwareAbstractionLayer([]), mlp(64)
    expected = hal.estimate_memory_usage(model, 100)
    with torch.no_grad():
        assert hal.estimate_memory_usage(model, 100) == expected
    with torch.inference_mode():
        assert hal.estimate_memory_usage(model, 100) == expected
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    compiled, sample = torch.compile(model, backend=backend), torch.zeros(1, 64)
    assert hal.estimate_memory_usage(compiled, 100, sample) == expected
    assert not graphs
    compiled(sample)
    assert len(graphs) == 1


def test_estimate_names_its_unit():
    assert "in bytes" in HardwareAbstractionLayer.estimate_memory_usage.__doc__


@pytest.mark.parametrize(("make", "shape"), [(mlp, (65536, 256)), (encoder, (256, 256, 64))])
def test_estimate_is_within_a_tenth_of_cuda_s_peak(cuda, make: Make, shape: tuple[int, ...]):
    model = make().to(cuda)
    estimate = HardwareAbstractionLayer().estimate_memory_usage(
        model, shape[0], torch.zeros(1, *shape[1:], device=cuda)
    )
    x = torch.randn(shape, device=cuda)
    step = training_step(model, x)
    others = torch.cuda.memory_allocated() - 3 * weight_bytes(model)
    torch.cuda.reset_peak_memory_stats()
    step()
    assert estimate == pytest.approx(torch.cuda.max_memory_allocated() - others, rel=0.1)


# --- batch size ----------------------------------------------------------------------------------


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


# --- inputs --------------------------------------------------------------------------------------


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
        with pytest.raises(ValueError, match="Opaque does not follow from its layers; pass sample"):
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
    with pytest.raises(TypeError, match=r"batch_size is 2\.5"):
        hal.estimate_memory_usage(mlp(), 2.5)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="ByValues cannot be traced"):
        hal.estimate_memory_usage(ByValues(4, 4), 2)


def test_the_documented_example_runs():
    model = mlp()
    hal = HardwareAbstractionLayer()
    optimized_model = hal.optimize_for_hardware(model)
    batch_size = hal.get_optimal_batch_size(optimized_model)
    assert batch_size > 0
    devices = detect_available_devices()
    HardwareAbstractionLayer(devices["cuda"])
