"""What a GPU alone can show of the tuner: its clock, and calls that a calibration changes."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch

import flash_cute
from flash_cute import kernels
from flash_cute.kernels import Problem
from flash_cute.tuning import Choice
from flash_cute.tuning import clock as clocks
from flash_cute.tuning.clock import CudaClock

pytestmark = pytest.mark.usefixtures("without_calibration")


def test_a_gpu_is_tuned_and_used(cuda, tmp_path):
    path = tmp_path / "calibration.json"
    shapes = [Problem(op, batch=2, heads=8, seqlen_q=512, head_dim=64) for op in ("fwd", "bwd")]
    shapes.append(Problem("decode", batch=2, heads=8, heads_k=2, seqlen_q=1, seqlen_k=2048))
    shapes.append(Problem("decode", batch=2, heads=8, heads_k=2, seqlen_q=600, seqlen_k=2048))
    report = flash_cute.autotune(shapes, path=path, rounds=3)
    assert report.measured >= 3 * len(shapes) - 2
    assert all(gain.before_ms > 0 and gain.after_ms > 0 for gain in report.gains)
    assert path.exists() == report.pays


def test_a_call_runs_the_calibrated_kernel(cuda):
    """Which no test on the CPU can see: the choice in csrc/core/registry.cpp."""
    q = torch.randn(2, 300, 8, 64, device=cuda, dtype=torch.bfloat16)
    problem = Problem.of(q, q, q)
    expected = flash_cute.flash_attn_func(q, q, q)
    gpu = kernels.gpu()
    rows = kernels.explain(problem)
    for kernel in [x.id for x in rows if x.verdict == "fits"]:
        torch.ops.flash_cute.set_calibration(f"{kernels.bucket(problem, gpu)} = {kernel}")
        out = flash_cute.flash_attn_func(q, q, q)
        torch.ops.flash_cute.set_calibration("")
        with kernels.only(kernel):
            alone = flash_cute.flash_attn_func(q, q, q)
        assert torch.equal(out, alone), kernel
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_a_calibration_of_forward_does_not_apply_to_a_gathered_cache(cuda):
    """Its keys are gathered for forward. Results must not depend on the batch, but buckets do."""
    q = torch.randn(1, 64, 8, 100, device=cuda, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 900, 8, 100, device=cuda, dtype=torch.bfloat16)
    problem = Problem.of(q, k, v)
    expected = flash_cute.flash_attn_with_kvcache(q, k, v)
    seen = []
    for kernel in [x.id for x in kernels.explain(problem) if x.verdict == "fits"]:
        torch.ops.flash_cute.set_calibration(f"{kernels.bucket(problem, kernels.gpu())} = {kernel}")
        out = flash_cute.flash_attn_with_kvcache(q, k, v)
        seen.append(flash_cute.flash_attn_func(q, k, v))
        torch.ops.flash_cute.set_calibration("")
        assert torch.equal(out, expected), kernel
    assert not all(torch.equal(of_forward, expected) for of_forward in seen)


def test_the_clock_times_every_kernel(cuda):
    problem = Problem(batch=1, heads=2, seqlen_q=256, head_dim=64)
    choices = [Choice(x.id) for x in kernels.explain(problem) if x.verdict != "refused"]
    if torch.cuda.get_device_capability(cuda) == (9, 0):
        choices.append(Choice(kernels.plan(problem).kernel.id, num_splits=2))
    times = CudaClock(calls=2).measure(problem, choices, 3)
    assert list(times) == choices
    assert all(len(x) == 3 and min(x) > 0 for x in times.values())


@pytest.mark.parametrize("op", ["fwd", "bwd", "decode"])
def test_the_clock_leaves_out_what_the_host_takes(cuda, monkeypatch, op):
    host, call_of = [], clocks.call_of

    def slow_call_of(*sizes):
        call = call_of(*sizes)

        def slow():
            host.append(time.sleep(0.1))
            return call()

        return slow

    monkeypatch.setattr(clocks, "call_of", slow_call_of)
    problem = Problem(op, batch=1, heads=2, seqlen_q=64, head_dim=64)
    choice = Choice(kernels.plan(problem).kernel.id)
    times = CudaClock(calls=2).measure(problem, [choice], 5)
    assert len(host) == 1 + 2  # a first one, and those of the graph
    assert len(times[choice]) == 5 and 0 < median(times[choice]) < 50
