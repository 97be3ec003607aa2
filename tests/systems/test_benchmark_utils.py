"""benchmark_attention_performance measures what the model takes, as often and as large as asked."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from flash_cute.utils.compiler_optimization_assistant import benchmark_attention_performance
from flash_cute.utils.timing import Timing, time_calls


class Sleeper(nn.Module):
    """Sleeps, and notes what it was given."""

    def __init__(self, *milliseconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.milliseconds = milliseconds
        self.seen: list[tuple[tuple[int, ...], torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        index = len(self.seen) % len(self.milliseconds)
        self.seen.append((tuple(x.shape), x.dtype, torch.is_grad_enabled()))
        time.sleep(self.milliseconds[index] / 1e3)
        return x


@pytest.mark.parametrize("milliseconds", [4, 12])
def test_sleeping_models_take_what_they_sleep(milliseconds: float):
    results = benchmark_attention_performance(
        model=Sleeper(milliseconds), input_shape=(2, 3, 8), num_trials=12
    )
    assert milliseconds <= results["min_latency"] <= results["median_latency"]
    assert results["median_latency"] < milliseconds + 4
    assert milliseconds <= results["avg_latency"] < milliseconds + 8  # on a busy machine
    assert results["min_latency"] <= results["p95_latency"]
    assert results["tokens_per_second"] == pytest.approx(6e3 / results["median_latency"])


def test_reported_numbers_match_their_names():
    """One call in four sleeps 20 ms, the others 4: a mean of 8, a median and a least of 4."""
    results = benchmark_attention_performance(Sleeper(4, 4, 4, 20), (2, 3, 8), 40)
    assert 4 <= results["min_latency"] <= results["median_latency"] < 8 <= results["avg_latency"]
    assert results["avg_latency"] < 20 <= results["p95_latency"]


def test_shape_and_trials_are_respected():
    model = Sleeper(0).double().train()
    results = benchmark_attention_performance(model, (2, 5, 8), 7)
    assert set(model.seen) == {((2, 5, 8), torch.float64, False)}
    assert len(model.seen) == 7 + 3  # three to warm up
    assert results["num_trials"] == 7 and results["input_shape"] == (2, 5, 8)
    assert results["device"] == "cpu" and results["dtype"] == "torch.float64"
    assert model.training
    model.seen.clear()
    benchmark_attention_performance(model, (1, 1, 8))
    assert len(model.seen) == 103


def test_statistics():
    timing = Timing((4.0, 1.0, 2.0, 3.0, 10.0))
    assert (timing.mean, timing.median, timing.least) == (4.0, 3.0, 1.0)
    assert timing.percentile(0.95) == 10.0 and timing.percentile(0.2) == 1.0


def test_the_calls_are_timed_one_by_one():
    sleeper = Sleeper(1, 9)
    timing = time_calls(lambda: sleeper(torch.ones(1)), 6, torch.device("cpu"), warmup=2)
    assert len(timing.times_ms) == 6
    assert all(slow > fast + 4 for fast, slow in zip(*[iter(timing.times_ms)] * 2, strict=True))


def test_torch_s_layer_and_the_random_state():
    random = torch.get_rng_state()
    torch.manual_seed(1)
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    before = torch.get_rng_state()
    assert benchmark_attention_performance(layer, (1, 4, 16), 2)["avg_latency"] > 0
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(random)


def test_times_on_cuda_are_the_device_s(cuda):
    class Spin(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2048, 2048, device=cuda))
            self.times = times

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = x @ self.weight * 1e-2
            return x

    short, long = (
        benchmark_attention_performance(Spin(times), (4, 2048, 2048), 10) for times in (4, 12)
    )
    assert long["median_latency"] / short["median_latency"] == pytest.approx(3, rel=0.3)
    assert short["device"].startswith("cuda")


def test_wrong_arguments():
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="num_trials is 0"):
        benchmark_attention_performance(model, (1, 8), 0)
    with pytest.raises(TypeError, match=r"num_trials is 1\.5"):
        benchmark_attention_performance(model, (1, 8), 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input_shape is"):
        benchmark_attention_performance(model, ())
    with pytest.raises(ValueError, match="input_shape is"):
        benchmark_attention_performance(model, (0, 8))
    for shape in (8, (1, 8.0), (True, 8), "18"):
        with pytest.raises(TypeError, match="input_shape is"):
            benchmark_attention_performance(model, shape)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is function"):
        benchmark_attention_performance(test_statistics, (1, 8))  # type: ignore[arg-type]
