"""Times calls by CUDA events on CUDA, and by the wall clock on the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch

WARMUP_CALLS = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds of each call, in their order."""

    times_ms: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.times_ms)

    @property
    def median(self) -> float:
        return median(self.times_ms)

    @property
    def least(self) -> float:
        return min(self.times_ms)

    def percentile(self, share: float) -> float:
        """The time that the fraction ``share``, in (0, 1], of the calls does not exceed."""
        return sorted(self.times_ms)[math.ceil(share * len(self.times_ms)) - 1]


def time_calls(
    run: Callable[[], Any], calls: int, device: torch.device, warmup: int = WARMUP_CALLS
) -> Timing:
    """Times ``calls`` calls of ``run`` one by one, after ``warmup`` calls that do not count.

    On CUDA the calls are queued without synchronisation, so a time is the device's, or the host's
    if that is slower.
    """
    for _ in range(warmup):
        run()
    if device.type == "cuda":
        return Timing(tuple(_on_cuda(run, calls, device)))
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e3)
    return Timing(tuple(times))


def _on_cuda(run: Callable[[], Any], calls: int, device: torch.device) -> list[float]:
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        torch.cuda.synchronize(device)
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) for begin, end in pairwise(marks)]
