"""Routes of calls over caches and pages name the kernels that run, in their order."""

from __future__ import annotations

import random

import cached_kernels
import pytest
import torch

from flash_cute import kernels
from flash_cute.kernels import plan_log


class _Planned(Exception):
    """Stops a call once its problem is known."""


def test_routes_are_what_an_h200_ran(monkeypatch):
    """300 recorded calls, planned from sizes alone."""

    def plan(qkv, op, problem, kernel=None):
        raise _Planned(*kernels.plan(problem(op), "h200").launches)

    monkeypatch.setattr(plan_log, "say", plan)
    seen = 0
    for line in cached_kernels.recorded():
        if "error" in line:
            continue
        call = cached_kernels.call_of(line["case"], "cpu")
        with plan_log.switched(), pytest.raises(_Planned) as stopped:
            call()
        ran = [cached_kernels.renamed(name) for name in line["kernels"]]
        assert list(stopped.value.args) == ran, line["case"]
        seen += 1
    assert seen > 250


def test_the_log_names_what_runs(cuda):
    draw = random.Random(torch.initial_seed())
    cases = [cached_kernels.fields_of(draw) for _ in range(300)]
    assert compared(cached_kernels.observed(cases)) > 250


def test_the_log_names_what_runs_of_e4m3(cuda):
    """Also of calls that are widened."""
    draw = random.Random(torch.initial_seed())
    cases = [cached_kernels.e4m3_fields_of(draw) for _ in range(100)]
    assert compared(cached_kernels.observed(cases, cached_kernels.e4m3_call_of)) == 100


def test_calls_of_e4m3_are_those_that_were_drawn():
    """On the CPU, as the profiler does not tell."""
    draw = random.Random(torch.initial_seed())
    for _ in range(10):
        cached_kernels.e4m3_call_of(cached_kernels.e4m3_fields_of(draw), "cpu")()


def compared(lines):
    """How many calls ran what their line of the log says; the others raised."""
    seen = 0
    for line in lines:
        if "error" in line:
            continue
        (log,) = line["log"]
        assert cached_kernels.launches_of(log) == line["kernels"], line["case"]
        seen += 1
    return seen
