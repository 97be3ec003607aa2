"""Compares the launches and the time of a model and its fused form."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from flash_cute.attention.fusion.graphs import drops

_WARM_UPS = 3
_HOST_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
_NOT_KERNELS = ("Memcpy", "Memset", "Activity Buffer")
_LIBRARIES = ("aten::", "flash_cute::")
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
        "lift_fresh", "permute", "resolve_conj", "resolve_neg", "resize_", "select", "set_",
        "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
        "view", "_unsafe_view", "_reshape_alias", "unflatten", "flatten", "reshape", "chunk",
        "is_same_size", "result_type", "promote_types", "item", "_local_scalar_dense", "to",
        "dropout",
    )
)  # fmt: skip


@dataclass(frozen=True)
class FusionPerformanceStats:
    """The measurements of :func:`benchmark_fusion_performance`, for one forward.

    Args:
        baseline_ms, fused_ms: medians over the runs.
        baseline_kernel_launches, fused_kernel_launches: kernels that ran on the GPU, without memory
            copies and fills; on the CPU torch's operators that compute, copies and fills included,
            also those that flash_cute's operators call.
        baseline_host_launches, fused_host_launches: launches by the host, of kernels or of whole
            graphs; on the CPU as above.
        max_difference: largest absolute difference of the two outputs; None if dropout is active,
            or an output is not a tensor.
        num_runs: runs of each model that were timed.
        device: "cuda" or "cpu".

    ``speedup`` is the baseline's time over fused's, ``launch_reduction`` the share of the
    baseline's kernel launches that fusion saves, negative if it has more.
    """

    baseline_ms: float
    fused_ms: float
    baseline_kernel_launches: int
    fused_kernel_launches: int
    baseline_host_launches: int
    fused_host_launches: int
    max_difference: float | None
    num_runs: int
    device: str
    speedup: float = field(init=False)
    launch_reduction: float = field(init=False)

    def __post_init__(self) -> None:
        kept = self.fused_kernel_launches / max(1, self.baseline_kernel_launches)
        object.__setattr__(self, "speedup", self.baseline_ms / self.fused_ms)
        object.__setattr__(self, "launch_reduction", 1 - kept)


def benchmark_fusion_performance(
    baseline_model: nn.Module,
    fused_model: nn.Module,
    input_data: Tensor,
    num_runs: int = 100,
) -> FusionPerformanceStats:
    """Times one forward of two models, in turns, and counts its launches.

    Modes are the caller's: gradients are recorded unless it is under ``torch.no_grad()``, and each
    model stays in its training mode. Neither the models nor the state of torch's generators change.

    Args:
        baseline_model, fused_model: called as ``model(input_data)``.
        input_data: on the models' device.
        num_runs: timed runs of each model, after 3 warm-up runs; one more is profiled.

    Returns:
        Medians in ms, by CUDA events on CUDA and by the clock on the CPU, and launches as
        ``torch.profiler`` sees them.

    Raises:
        TypeError, ValueError: an argument is of another type, or ``num_runs`` is below 1.

    Example::

        import torch
        from flash_cute.attention.fusion import (
            benchmark_fusion_performance,
            create_unified_attention_fusion,
        )

        layer = torch.nn.TransformerEncoderLayer(d_model=64, nhead=4)
        fused = create_unified_attention_fusion(layer)
        with torch.no_grad():
            stats = benchmark_fusion_performance(layer, fused, torch.randn(100, 2, 64))
        print(f"{stats.speedup:.2f}x, {stats.launch_reduction:.0%} fewer launches")
    """
    if not isinstance(input_data, Tensor):
        raise TypeError(f"input_data is {type(input_data).__name__}; expected a tensor")
    if isinstance(num_runs, bool) or not isinstance(num_runs, int) or num_runs < 1:
        raise ValueError(f"num_runs is {num_runs!r}; expected an int, 1 or more")
    models = (baseline_model, fused_model)
    for name, model in zip(("baseline_model", "fused_model"), models, strict=True):
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} is {type(model).__name__}; expected a torch.nn.Module")
    devices = [input_data.device.index] if input_data.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        for model in models:
            for _ in range(_WARM_UPS):
                model(input_data)
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(num_runs):
            for one in (0, 1) if number % 2 == 0 else (1, 0):
                times[one].append(_ms(models[one], input_data))
        counts = [count_launches(model, input_data) for model in models]
    (out, (kernels, hosts)), (fused_out, (fused_kernels, fused_hosts)) = counts
    return FusionPerformanceStats(
        baseline_ms=median(times[0]),
        fused_ms=median(times[1]),
        baseline_kernel_launches=kernels,
        fused_kernel_launches=fused_kernels,
        baseline_host_launches=hosts,
        fused_host_launches=fused_hosts,
        max_difference=_difference(models, out, fused_out),
        num_runs=num_runs,
        device=input_data.device.type,
    )


def _ms(model: Callable[[Tensor], Any], x: Tensor) -> float:
    if not x.is_cuda:
        begin = time.perf_counter()
        model(x)
        return (time.perf_counter() - begin) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(x.device)
    start.record()
    model(x)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def count_launches(model: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, tuple[int, int]]:
    """What ``model(x)`` returns, and (kernels, launches by the host), as FusionPerformanceStats."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * x.is_cuda
    with profile(activities=activities) as profiler:
        out = model(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
    events = profiler.events() or []
    if not x.is_cuda:
        operators = sum(_operators(e) for e in events if e.cpu_parent is None)
        return out, (operators, operators)
    on_gpu = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    kernels = [e for e in on_gpu if not e.name.startswith(_NOT_KERNELS)]
    host = [e for e in events if e.device_type == DeviceType.CPU]
    return out, (len(kernels), sum(e.name.startswith(_HOST_LAUNCHES) for e in host))


def _operators(event: Any) -> int:
    """The number of innermost operators that compute in a CPU event of the profiler."""
    called = sum(map(_operators, event.cpu_children))
    return called or int(event.name.startswith(_LIBRARIES) and event.name not in _VIEWS)


def _difference(models: tuple[nn.Module, nn.Module], first: Any, second: Any) -> float | None:
    dropout = any(drops(module) for model in models for module in model.modules())
    comparable = isinstance(first, Tensor) and isinstance(second, Tensor)
    if dropout or not comparable or first.shape != second.shape or first.numel() == 0:
        return None
    return float((first.detach().double() - second.detach().double()).abs().max())
