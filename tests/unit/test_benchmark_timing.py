"""Rounds of the benchmarks: their order, medians, clock and power."""

import sys
import time
from collections import Counter
from itertools import pairwise, permutations
from types import SimpleNamespace

import pytest
import torch

from benchmarks import rivals, timing

CPU = torch.device("cpu")


def test_medians_and_spread_of_synthetic_rounds():
    turn = timing.Measured(3, [timing.Round(ms) for ms in (2.0, 1.0, 4.0, 2.0, 2.5)])
    assert (turn.median_ms, turn.spread) == (2.0, 1.5)


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde", "abcdef"])
def test_everyone_follows_everyone_else_equally_often(names):
    count = len(names)
    rounds = [timing.balanced(names, number) for number in range(count * (1 + count % 2))]
    assert all(sorted(order) == list(names) for order in rounds)
    followers = Counter(pair for order in rounds for pair in pairwise(order))
    assert followers == dict.fromkeys(permutations(names, 2), 1 + count % 2)


def test_rounds_of_few():
    assert timing.balanced("a", -1) == ["a"]
    assert timing.balanced([], 1) == []


def test_a_candidate_that_raises_is_reported_and_the_others_go_on():
    calls = {"good": 0, "bad": 0}

    def good():
        calls["good"] += 1

    def bad():
        calls["bad"] += 1
        if calls["bad"] > 40:
            raise RuntimeError("broke down")

    works = {"bad": rivals.Work(bad, tuple), "good": rivals.Work(good, tuple)}
    measured = timing.interleave(works, 3, 1.0, CPU, timing.Monitor(CPU))
    assert measured["bad"].failure == "RuntimeError: broke down"
    assert len(measured["good"].rounds) == 3 and not measured["good"].failure


def test_a_run_may_be_several_calls():
    runs = []
    work = rivals.Work(lambda: runs.append(1), tuple, calls=8)
    timing.elapsed_ms(work, 24, CPU)
    assert len(runs) == 3
    assert timing.calls_for(work, 0.0, CPU) == 24


@pytest.mark.parametrize("instantaneous", [True, False])
def test_clock_and_power_are_read_while_a_turn_runs(monkeypatch, instantaneous):
    class Nvml:
        NVMLError, NVML_SUCCESS, NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT = OSError, 0, 1, 186
        nvmlInit = staticmethod(lambda: None)
        nvmlDeviceGetHandleByUUID = staticmethod(str)
        nvmlSystemGetDriverVersion = staticmethod(lambda: "580.1")
        nvmlDeviceGetEnforcedPowerLimit = staticmethod(lambda handle: 700_000)
        nvmlDeviceGetPowerUsage = staticmethod(lambda handle: 650_000)
        nvmlDeviceGetClockInfo = staticmethod(lambda handle, clock: 1700)

        @staticmethod
        def nvmlDeviceGetFieldValues(handle, fields):
            assert handle == "GPU-12ab" and fields == [186]
            value = SimpleNamespace(uiVal=690_000)
            return [SimpleNamespace(nvmlReturn=0 if instantaneous else 3, value=value)]

    monkeypatch.setitem(sys.modules, "pynvml", Nvml)
    board = SimpleNamespace(uuid="12ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: board)
    monitor = timing.Monitor(torch.device("cuda"))
    assert (monitor.reason, monitor.driver, monitor.power_limit_w) == ("", "580.1", 700)
    assert monitor.power_kind == ("instantaneous" if instantaneous else "average")
    work = rivals.Work(lambda: time.sleep(0.05), tuple)
    turn = timing.measure_round(work, 2, CPU, monitor)
    assert turn.clock_mhz == 1700 and turn.power_w == (690 if instantaneous else 650)
    assert turn.ms == pytest.approx(50, rel=0.5)


def test_without_nvml_the_report_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = timing.Monitor(torch.device("cuda"))
    assert monitor.reason == "the package nvidia-ml-py is not installed"
    assert timing.measure_round(rivals.Work(int, tuple), 1, CPU, monitor).clock_mhz is None
