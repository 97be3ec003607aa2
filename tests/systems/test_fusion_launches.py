"""What fusion saves, and what measures it: launches, graphs, benchmark_fusion_performance."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fusion_models import encoder_layer, llama_block, tokens
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.llama_block import rotary
from flash_cute.attention.fusion import (
    FusionConfig,
    FusionStrategy,
    OptimizationLevel,
    UnifiedAttentionFusion,
    benchmark,
    benchmark_fusion_performance,
    create_unified_attention_fusion,
)
from flash_cute.attention.fusion.benchmark import _VIEWS
from flash_cute.attention.fusion.graphs import KEPT, PINNED, Recent, flatten, replace

FULL, AGGRESSIVE = FusionStrategy.FULL_BLOCK, OptimizationLevel.AGGRESSIVE


class Waits(nn.Module):
    """Sleeps, then adds some times."""

    def __init__(self, ms: float, additions: int) -> None:
        super().__init__()
        self.ms, self.additions, self.calls = ms, additions, 0
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        self.calls += 1
        time.sleep(self.ms / 1e3)
        for _ in range(self.additions):
            x = x + 1
        return x


def test_benchmark_measures_what_it_is_given():
    slow, fast = Waits(12, 6), Waits(4, 2)
    stats = benchmark_fusion_performance(slow, fast, torch.ones(3), num_runs=5)
    assert 12 <= stats.baseline_ms < 40 and 4 <= stats.fused_ms < 20
    assert stats.speedup == stats.baseline_ms / stats.fused_ms > 1.3
    assert (stats.baseline_kernel_launches, stats.fused_kernel_launches) == (6, 2)
    assert (stats.baseline_host_launches, stats.fused_host_launches) == (6, 2)
    assert stats.launch_reduction == pytest.approx(2 / 3)
    assert {"speedup", "launch_reduction"} <= set(dataclasses.asdict(stats))
    assert slow.calls == fast.calls == 5 + 3 + 1 and stats.num_runs == 5
    assert stats.max_difference is None  # the modules' dropout is active
    slow.eval()
    fast.eval()
    assert benchmark_fusion_performance(slow, fast, torch.ones(3), 1).max_difference == 4.0


def test_benchmark_changes_nothing():
    layer = encoder_layer(dropout=0.1)
    fused = create_unified_attention_fusion(layer).eval()
    layer.linear1.weight.grad = torch.ones_like(layer.linear1.weight)
    x, state = tokens(layer), torch.get_rng_state()
    stats = benchmark_fusion_performance(layer, fused, x, num_runs=2)
    assert layer.training and not fused.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(layer.linear1.weight.grad, torch.ones_like(layer.linear1.weight))
    assert layer.linear2.weight.grad is None
    assert stats.device == "cpu" and stats.fused_kernel_launches > 0


def test_benchmark_compares_outputs():
    layer = encoder_layer(dropout=0.1).eval()
    fused = create_unified_attention_fusion(layer)
    stats = benchmark_fusion_performance(layer, fused, tokens(layer), num_runs=1)
    assert stats.max_difference is not None and stats.max_difference < 1e-4


def operators_by_torch(model: nn.Module, x: torch.Tensor) -> int:
    """Those that call no other, as torch's own ranges have them, without what only makes views."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        model(x)
    ranges = [e for e in profiler.events() or [] if e.name.startswith(("aten::", "flash_cute::"))]
    computing = [e for e in ranges if e.name not in _VIEWS]

    def inside(outer):
        return any(
            e is not outer
            and outer.time_range.start <= e.time_range.start
            and e.time_range.end <= outer.time_range.end
            for e in computing
        )

    return sum(not inside(e) for e in computing)


def test_what_counts_among_events_of_a_gpu(monkeypatch):
    """Kernels, without copies, fills and the user's ranges; what the host launches, of any kind."""

    def events_of(device_type, *names, is_user_annotation=False):
        return [
            SimpleNamespace(name=n, device_type=device_type, is_user_annotation=is_user_annotation)
            for n in names
        ]

    events = events_of(DeviceType.CUDA, "gemm", "softmax", "Memcpy HtoD", "Memset (Device)")
    events += events_of(DeviceType.CUDA, "my range", is_user_annotation=True)
    events += events_of(DeviceType.CPU, "cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
    events += events_of(DeviceType.CPU, "aten::mm", "cudaMemcpyAsync")
    profiler = mock.MagicMock()
    profiler.return_value.__enter__.return_value.events.return_value = events
    monkeypatch.setattr(benchmark, "profile", profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    assert benchmark.count_launches(lambda y: y is x, x) == (True, (2, 3))
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler.assert_called_once_with(activities=kinds)


def test_time_on_a_gpu_is_between_events_around_the_call(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append(self)

        def synchronize(self):
            done.append("wait")

        def elapsed_time(self, end):
            assert done[-4:] == [self, x, end, "wait"]
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    x = SimpleNamespace(is_cuda=True, device="cuda:3")
    assert benchmark._ms(done.append, x) == 1.5 and done[0] == "cuda:3"


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_launches_on_the_cpu_are_torch_s_operators(mode):
    """What flash_cute's operators call on the CPU counts as what torch's layer calls does."""
    layer = encoder_layer(dropout=0.1).train(mode == "train")
    fused, x = create_unified_attention_fusion(layer), tokens(layer)
    with torch.no_grad():
        stats = benchmark_fusion_performance(layer, fused, x, num_runs=1)
    found = (stats.baseline_kernel_launches, stats.fused_kernel_launches)
    assert found == (operators_by_torch(layer, x), operators_by_torch(fused, x))
    assert stats.launch_reduction == 1 - found[1] / found[0]


@pytest.mark.parametrize("runs", [0, 1.5])
def test_benchmark_refuses_bad_numbers_of_runs(runs):
    with pytest.raises(ValueError, match="num_runs"):
        benchmark_fusion_performance(nn.Identity(), nn.Identity(), torch.ones(1), runs)
    with pytest.raises(TypeError, match="input_data is int"):
        benchmark_fusion_performance(nn.Identity(), nn.Identity(), 3)  # type: ignore[arg-type]


# --- graphs --------------------------------------------------------------------------------------


def test_recent_keeps_the_last_and_the_pinned():
    recent: Recent[int] = Recent(2)
    recent.put("pinned", 0, pinned=True)
    recent.put("a", 1, pinned=False)
    recent.put("b", 2, pinned=False)
    assert recent.get("a") == 1
    recent.put("c", 3, pinned=False)
    kept = [recent.get(key) for key in ("pinned", "a", "b", "c")]
    assert kept == [0, 1, None, 3]
    for number in range(PINNED):
        recent.put(number, number, pinned=True)
    assert recent.get("pinned") is None and len(recent.pinned) == PINNED
    recent.clear()
    assert recent.get("pinned") is None and recent.get("a") is None


def test_flatten_and_replace_go_into_tuples():
    x, y = torch.ones(2), torch.zeros(3)
    call = {"a": x, "b": (y, 3), "c": None}
    tensors, rest = flatten(call)
    assert [id(t) for t in tensors] == [id(x), id(y)]
    assert rest == flatten({"a": y, "b": (x, 3), "c": None})[1]
    assert rest != flatten({"a": y, "b": (x, 4), "c": None})[1] and hash(rest)
    assert replace(call, lambda t: t + 1)["b"][0].tolist() == [1, 1, 1]


def test_aggressive_says_why_it_launches_one_by_one():
    layer = encoder_layer()
    fused = create_unified_attention_fusion(layer, FULL, AGGRESSIVE)
    with torch.no_grad():
        out = fused(tokens(layer))
    torch.testing.assert_close(out, layer(tokens(layer)), rtol=1e-4, atol=1e-4)
    assert fused.last_call == "separate launches: an input is not on CUDA"


def test_reasons_against_a_graph(cuda):
    layer = encoder_layer(cuda, dropout=0.1)
    fused = create_unified_attention_fusion(layer, FULL, AGGRESSIVE)
    x = tokens(layer, cuda)
    fused(x)
    assert fused.last_call == "separate launches: a gradient is wanted"
    with torch.no_grad():
        fused(x)
        assert fused.last_call == "separate launches: dropout is active"
        fused.eval()(x)
        assert fused.last_call == "one CUDA graph"


def no_grad_call(fused: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        out = fused(*args, **kwargs)
    assert fused.last_call == "one CUDA graph"
    return out


def test_graphs_compute_the_same(cuda):
    """For each input, after the weights change in place, and after they move."""
    layer = encoder_layer(cuda).eval()
    fused = create_unified_attention_fusion(layer, FULL, AGGRESSIVE)
    x = tokens(layer, cuda)
    mask = nn.Transformer.generate_square_subsequent_mask(len(x), device=cuda)
    hidden = torch.zeros(x.shape[1], len(x), dtype=torch.bool, device=cuda)
    hidden[1, 3:] = True
    first = no_grad_call(fused, x)
    kept = first.clone()
    for y in (x, x * 2, x[:4]):
        torch.testing.assert_close(no_grad_call(fused, y), layer(y), rtol=1e-3, atol=1e-4)
    assert torch.equal(first, kept)  # results are not a graph's own memory
    for arguments in ({"src_mask": mask}, {"src_key_padding_mask": hidden}):
        out = no_grad_call(fused, x, **arguments)
        torch.testing.assert_close(out, layer(x, **arguments), rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        layer.linear1.weight.mul_(1.5)
        torch.testing.assert_close(no_grad_call(fused, x), layer(x), rtol=1e-3, atol=1e-4)
        layer.linear1.weight.data = layer.linear1.weight.data * 2
        torch.testing.assert_close(no_grad_call(fused, x), layer(x), rtol=1e-3, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), layer(x), rtol=1e-3, atol=1e-4)


def test_graphs_of_the_target_length_stay(cuda):
    layer = encoder_layer(cuda).eval()
    config = FusionConfig(optimization_level=AGGRESSIVE, target_sequence_length=5)
    fused = UnifiedAttentionFusion(layer, config)
    for seqlen in range(1, 12):
        no_grad_call(fused, torch.randn(seqlen, 2, 32, device=cuda))
    assert fused.graphs is not None
    assert len(fused.graphs.recent.pinned) == 1 and len(fused.graphs.recent.values) == KEPT


def test_one_launch_at_aggressive(cuda):
    """One graph, and a copy in and one out (claim C6)."""
    layer = nn.TransformerEncoderLayer(512, 8, device=cuda).eval()
    fused = create_unified_attention_fusion(layer, FULL, AGGRESSIVE)
    with torch.no_grad():
        stats = benchmark_fusion_performance(layer, fused, torch.randn(128, 4, 512, device=cuda), 5)
    assert 1 <= stats.fused_host_launches <= 3


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launches_of_a_layer(mode, dtype, cuda):
    """At most 0.6 of eager's, with grad (claim C5)."""
    layer = nn.TransformerEncoderLayer(512, 8, device=cuda, dtype=dtype).train(mode == "train")
    fused = create_unified_attention_fusion(layer)
    x = torch.randn(128, 4, 512, device=cuda, dtype=dtype)
    stats = benchmark_fusion_performance(layer, fused, x, num_runs=3)
    assert stats.fused_kernel_launches <= 0.6 * stats.baseline_kernel_launches, stats


def test_launches_of_a_llama_block(cuda):
    block = llama_block(cuda, width=512, heads=8, heads_k=2, hidden=1024).bfloat16()
    cos, sin = (x.bfloat16() for x in rotary(128, 64, cuda))

    class Positioned(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(x, position_embeddings=(cos, sin))

    fused = create_unified_attention_fusion(block)
    x = torch.randn(2, 128, 512, device=cuda, dtype=torch.bfloat16)
    stats = benchmark_fusion_performance(Positioned(block), Positioned(fused), x, num_runs=3)
    assert stats.fused_kernel_launches <= 0.6 * stats.baseline_kernel_launches, stats
