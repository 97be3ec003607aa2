"""Timing: interleaved rounds of back-to-back calls, with the clock and power of the GPU beside."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch

from .rivals import Work, describe

BURST_MS = 50.0
SUSTAINED_MS = 310.0
SUSTAINED_ROUNDS = 7
_SAMPLE_S = 0.01
_MIN_RUNS = 3
_FLUSHED_BYTES = 2**31  # 0.5 ms of an H200

T = TypeVar("T")


@dataclass(frozen=True)
class Round:
    """One candidate's turn: ms per call, and the medians of SM clock (MHz) and board power (W)
    read meanwhile (None if nothing was read)."""

    ms: float
    clock_mhz: float | None = None
    power_w: float | None = None


@dataclass
class Measured:
    """All rounds of one candidate; `failure` says what stopped them."""

    calls: int = 0
    rounds: list[Round] = field(default_factory=list)
    failure: str = ""

    @property
    def median_ms(self) -> float:
        return median(r.ms for r in self.rounds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over the rounds."""
        times = [r.ms for r in self.rounds]
        return (max(times) - min(times)) / median(times)


class Monitor:
    """SM clock and power of one GPU through NVML (package nvidia-ml-py).

    Without NVML every reading is None and `reason` says why. Power is the board's instantaneous
    draw where the driver offers it, else NVML's average (over one second since Ampere): see
    `power_kind`.
    """

    def __init__(self, device: torch.device) -> None:
        self.reason = ""
        self.driver: str | None = None
        self.power_limit_w: float | None = None
        self.power_kind: str | None = None
        try:
            self._open(device)
        except Exception as error:
            self.reason = describe(error)

    def _open(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise NotImplementedError(f"a {device.type} run has no clock and power to read")
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            raise NotImplementedError("the package nvidia-ml-py is not installed") from None
        self._nvml: Any = nvml
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.driver = nvml.nvmlSystemGetDriverVersion()
        self.power_limit_w = nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000
        self.power_kind = "average" if self._instant_power() is None else "instantaneous"
        self.read()

    def _instant_power(self) -> float | None:
        nvml = self._nvml
        try:
            (value,) = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
        except (AttributeError, nvml.NVMLError):
            return None
        return value.value.uiVal / 1000 if value.nvmlReturn == nvml.NVML_SUCCESS else None

    def read(self) -> tuple[float, float]:
        """(SM clock in MHz, power in W) now."""
        nvml, handle = self._nvml, self._handle
        power = self._instant_power() if self.power_kind == "instantaneous" else None
        if power is None:
            power = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        return float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), power

    @contextmanager
    def watch(self) -> Iterator[list[tuple[float, float]]]:
        """Reads every 10 ms from a thread of its own; yields the list that the readings join."""
        samples: list[tuple[float, float]] = []
        if self.reason:
            yield samples
            return
        stop = threading.Event()

        def sample() -> None:
            while not stop.wait(_SAMPLE_S):
                samples.append(self.read())

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield samples
        finally:
            stop.set()
            thread.join()


def use_device(name: str) -> torch.device:
    """The device of that name, made the current one; ValueError for a GPU where there is none."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"--device {name}: there is no CUDA device here")
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def elapsed_ms(work: Work, calls: int, device: torch.device) -> float:
    """Milliseconds of `calls` calls back to back: CUDA events, or the wall clock on the CPU."""
    run, runs = work.run, calls // work.calls
    with work.scope():
        if device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(runs):
                run()
            return (time.perf_counter() - begin) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def calls_for(work: Work, target_ms: float, device: torch.device) -> int:
    """How many calls last `target_ms`, after a warm-up: at least 3 runs of the work, but on a CPU
    1 of a work that takes 0.3 s."""
    least = _MIN_RUNS * work.calls
    if device.type == "cpu" and elapsed_ms(work, work.calls, device) > SUSTAINED_MS:
        return work.calls
    elapsed_ms(work, least, device)
    runs, spent = 1, elapsed_ms(work, work.calls, device)
    while spent < target_ms / 4:
        runs *= 2
        spent = elapsed_ms(work, runs * work.calls, device)
    return max(least, math.ceil(runs * target_ms / spent) * work.calls)


def balanced(items: Sequence[T], number: int) -> list[T]:
    """The items in the order of round `number` (a Williams design).

    In as many rounds as items, twice as many for an odd number of them, everyone comes right after
    everyone else equally often: at its power limit a GPU is faster after who needs less of it.
    """
    count = len(items)
    inwards = [i // 2 if i % 2 == 0 else count - 1 - i // 2 for i in range(count)]  # 0, n-1, 1, ...
    order = [items[(place + number) % count] for place in inwards]
    return order[::-1] if count % 2 == 1 and number % 2 == 1 else order


def measure_round(work: Work, calls: int, device: torch.device, monitor: Monitor) -> Round:
    """One turn of one candidate."""
    with monitor.watch() as samples:
        ms = elapsed_ms(work, calls, device) / calls
    if not samples:
        return Round(ms)
    clocks, powers = zip(*samples, strict=True)
    return Round(ms, median(clocks), median(powers))


def interleave(
    works: Mapping[str, Work],
    rounds: int,
    target_ms: float,
    device: torch.device,
    monitor: Monitor,
) -> dict[str, Measured]:
    """`rounds` rounds of about `target_ms` a candidate; each round has another order.

    A candidate that raises keeps its message in `failure` and takes no further part.
    """
    measured = {name: Measured() for name in works}

    def attempt(name: str, first: bool) -> None:
        turn = measured[name]
        try:
            if first:
                turn.calls = calls_for(works[name], target_ms, device)
            else:
                turn.rounds.append(measure_round(works[name], turn.calls, device, monitor))
        except Exception as error:
            turn.failure = describe(error)

    for number in range(-1, rounds):  # round -1 warms up and finds the number of calls
        for name in balanced(list(works), number):
            if not measured[name].failure:
                attempt(name, first=number < 0)
    return measured


def turns(works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median milliseconds of single calls of each on the GPU, after a turn to warm up.

    L2 is emptied before each, by work that also hides the time of the host. Each round starts with
    another call, so that none always follows the one that leaves the GPU cool.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    scratch = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    order = list(works.items())
    for _ in range(rounds + 1):
        for name, work in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            scratch.zero_()
            start.record()
            work()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
        order = order[1:] + order[:1]
    return {name: median(x[1:]) for name, x in times.items()}
