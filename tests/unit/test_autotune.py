"""The tuner, driven by a made-up clock: a cost model in place of a GPU."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import flash_cute
from flash_cute import kernels
from flash_cute.cli import app as cli
from flash_cute.cli import tune
from flash_cute.kernels import GPUS, Problem
from flash_cute.tuning import Gain, Report, calibration, rules
from flash_cute.tuning.clock import CudaClock, check_plain

SHAPES = [
    Problem(batch=batch, heads=16, seqlen_q=n, causal=True)
    for batch in (1, 4)
    for n in (1024, 2048, 4096)
]


@pytest.fixture(autouse=True)
def without_calibration():
    with calibration.set_aside():
        yield


class MadeUpClock:
    """``cost(problem, id)`` in milliseconds, with noise of some per mille, and calls counted."""

    def __init__(self, cost, noise=0.002):
        self.cost, self.noise, self.calls, self.random = cost, noise, [], random.Random()

    def noisy(self):
        return self.random.uniform(1, 1 + self.noise)

    def measure(self, problem, ids, rounds):
        self.calls.append((problem, tuple(ids), rounds))
        return {
            i: [
                self.cost(problem, i) * self.random.uniform(1, 1 + self.noise)
                for _ in range(rounds)
            ]
            for i in ids
        }


def default_of(problem):
    return kernels.plan(problem, "h100").kernel.id


def others(problem):
    rows = kernels.explain(problem, "h100")
    return [x.id for x in rows if x.verdict == "fits" and x.id.startswith(problem.op)]


WINNER = others(SHAPES[0])[0]


def cost_with(factor, applies=lambda problem: True, winner=WINNER):
    """The winner takes `factor` of the default's time where it applies; all others three times."""

    def cost(problem, i):
        if i == winner and default_of(problem) != winner:
            return factor if applies(problem) else 1.0
        return 1.0 if i == default_of(problem) else 3.0

    return cost


def tuned(tmp_path, cost, shapes=SHAPES, **options):
    path = tmp_path / "calibration.json"
    report = flash_cute.autotune(shapes, path=path, clock=MadeUpClock(cost), gpu="h100", **options)
    return report, path


def test_a_kernel_that_is_faster_is_written_and_used(tmp_path):
    report, path = tuned(tmp_path, cost_with(0.8))
    changed = [x for x in report.gains if x.before != WINNER]
    assert changed and {x.after for x in changed} == {WINNER}
    assert all(1.24 < x.speedup < 1.26 for x in changed)
    assert report.pays and report.path == path
    for shape in SHAPES:
        assert kernels.plan(shape, "h100").kernel.id == default_of(shape)
    before = {shape: default_of(shape) for shape in SHAPES}
    assert kernels.use_calibration(path).kernels == report.rules
    assert {kernels.plan(shape, "h100").kernel.id for shape in SHAPES} == {WINNER}
    assert WINNER not in before.values() or len(set(before.values())) > 1


def test_the_table_of_rules_is_small(tmp_path):
    """One line for both batches at a length: what follows " | " says nothing here."""
    report, _ = tuned(tmp_path, cost_with(0.8))
    assert report.rules
    assert all(" | " not in bucket for bucket in report.rules)
    assert len(report.rules) <= 3


def test_the_report_is_about_other_shapes(tmp_path):
    clock = MadeUpClock(cost_with(0.8))
    path = tmp_path / "calibration.json"
    seen = []
    report = flash_cute.autotune(
        SHAPES, path=path, clock=clock, gpu="h100", rounds=3, progress=lambda *x: seen.append(x)
    )
    unseen = {gain.problem for gain in report.gains}
    measured = [problem for problem, _, _ in clock.calls]
    assert len(unseen) == len(SHAPES) and not unseen & set(SHAPES)
    assert len(measured) == len(set(measured)) == report.measured == 3 * len(SHAPES)
    assert {rounds for _, _, rounds in clock.calls} == {3}
    assert [done for done, _, _ in seen] == list(range(report.measured + 1))
    assert report.seconds > 0
    text = str(report)
    assert f"worst {report.worst:.3f}x" in text and f"{report.geomean:.3f}x" in text
    assert f"written to {path}" in text and f"{report.measured} problems measured" in text


@pytest.mark.parametrize("factor", [1.0, 0.996])
def test_less_than_a_percent_writes_nothing(factor, tmp_path):
    report, path = tuned(tmp_path, cost_with(factor))
    assert report.rules == {} and report.path is None and not path.exists()
    assert report.geomean == 1.0 and "nothing written" in str(report)


def test_a_gain_that_other_shapes_do_not_have_is_no_rule(tmp_path):
    report, path = tuned(tmp_path, cost_with(0.8, lambda problem: problem in SHAPES))
    assert report.rules == {} and not path.exists()


def test_a_loss_on_shapes_never_seen_writes_nothing(tmp_path):
    def cost(problem, i):
        is_late = problem.seqlen_q in (1472, 2944, 5888)  # of the report alone
        return cost_with(1.05 if is_late else 0.8)(problem, i)

    report, path = tuned(tmp_path, cost)
    assert report.rules and report.worst < 0.98
    assert report.path is None and not path.exists()


def test_a_rule_for_a_part_of_the_calls_keeps_to_it(tmp_path):
    """Calls of batch 4 gain, those of batch 1 lose: the buckets of the first alone get a rule."""

    def cost(problem, i):
        return cost_with(0.8 if problem.batch == 4 else 1.2)(problem, i)

    report, _ = tuned(tmp_path, cost)
    assert report.rules and all(" | " in bucket for bucket in report.rules)
    for gain in report.gains:
        assert gain.problem.batch == 4 or gain.after == gain.before


def test_files_grow_and_are_not_used_while_measuring(tmp_path):
    backward = [replace(x, op="bwd", head_dim=64) for x in SHAPES]
    winner = others(backward[0])[0]
    first, path = tuned(tmp_path, cost_with(0.8))
    kernels.use_calibration(path)
    again, _ = tuned(tmp_path, cost_with(0.8))
    assert {x.before for x in again.gains} == {x.before for x in first.gains}
    assert kernels.plan(SHAPES[0], "h100").kernel.id == WINNER  # in use again afterwards
    second, _ = tuned(tmp_path, cost_with(0.8, winner=winner), backward)
    assert calibration.load(path).kernels == first.rules | second.rules


def test_decoding(tmp_path):
    shapes = [
        Problem("decode", batch=b, heads=32, heads_k=8, seqlen_q=1, seqlen_k=8192) for b in (2, 32)
    ]
    winner = others(shapes[0])[0]
    report, _ = tuned(tmp_path, cost_with(0.7, winner=winner), shapes)
    assert set(report.rules.values()) == {winner}


def test_rules_as_the_library_applies_them():
    problem = SHAPES[0]
    bucket = kernels.bucket(problem, "h100")
    known = {"fwd_a": 2.0, "fwd_b": 1.0}
    measured = rules.Measured(problem, bucket, "fwd_a", known)
    assert rules.apply({}, measured).after == "fwd_a"
    assert rules.apply({measured.coarse: "fwd_b"}, measured).speedup == 2.0
    finer = {measured.coarse: "fwd_b", bucket: "fwd_a"}
    assert rules.apply(finer, measured).after == "fwd_a"
    assert rules.apply({bucket: "fwd_c"}, measured).after == "fwd_a"


def test_geomean_and_worst():
    gains = [Gain(SHAPES[0], "a", "b", 2.0, 1.0), Gain(SHAPES[1], "a", "b", 0.97, 1.0)]
    report = Report({}, tuple(gains), 2, 0.0, None)
    assert report.geomean == pytest.approx((2 * 0.97) ** 0.5)
    assert report.worst == 0.97 and not report.pays


REFUSED = {
    "no problem": (dict(problems=[]), ValueError, "problems is empty"),
    "rounds": (dict(rounds=0), ValueError, "rounds is 0"),
    "gpu alone": (dict(clock=None), ValueError, "gpu goes with clock"),
    "window": (
        dict(problems=[replace(SHAPES[0], window_size=(8, 8))]), NotImplementedError, "options",
    ),
    "fp8": (
        dict(problems=[replace(SHAPES[0], dtype=torch.float8_e4m3fn)]), NotImplementedError, "fp16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_measured(name, tmp_path):
    changed, error, message = REFUSED[name]
    clock = MadeUpClock(cost_with(0.8))
    given = dict(problems=SHAPES, clock=clock, gpu="h100", path=tmp_path / "x.json") | changed
    with pytest.raises(error, match=message):
        flash_cute.autotune(**given)
    assert clock.calls == [] and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(kernels.can_use_cuda(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(RuntimeError, match="measures kernels on a GPU, and there is none"):
        flash_cute.autotune(SHAPES, path=path)
    result = CliRunner().invoke(cli.app, ["tune", str(SHAPES[0]), "--path", str(path)])
    assert result.exit_code == 1 and "there is none here" in result.output
    assert not path.exists()


@pytest.mark.parametrize(
    "problem",
    [
        *SHAPES[:1],
        Problem("decode", torch.float16, 3, 8, 2, 1, 99, 64),
        Problem("bwd", torch.float32, heads=4, seqlen_q=7, head_dim=192, head_dim_v=128),
    ],
)
def test_shapes_are_read_as_they_are_printed(problem):
    assert str(tune.parse(str(problem))) == str(problem)
    check_plain(tune.parse(str(problem)))


def test_shapes_are_read_as_benchmarks_write_them():
    assert tune.parse("bf16 b4 h32/8 q512 k1024 d64/64 full") == Problem(
        batch=4, heads=32, heads_k=8, seqlen_q=512, seqlen_k=1024, head_dim=64, head_dim_v=64
    )
    result = CliRunner().invoke(cli.app, ["tune", "b4 h16 q1024"])
    assert result.exit_code == 2 and "expected, for example" in result.output


def test_show(tmp_path):
    report, path = tuned(tmp_path, cost_with(0.8))
    result = CliRunner().invoke(cli.app, ["tune", "--show", "--path", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["file"] == str(path)
    if not kernels.can_use_cuda():
        assert found["kernels"] == report.rules and found["misses"] == []
    path.write_text("{")
    found = json.loads(CliRunner().invoke(cli.app, ["tune", "--show", "--path", str(path)]).output)
    assert found["kernels"] == {} and "Expecting property name" in found["misses"][0]["reason"]


def test_shapes_or_show():
    for arguments in ([], [str(SHAPES[0]), "--show"]):
        result = CliRunner().invoke(cli.app, ["tune", *arguments])
        assert result.exit_code == 2 and "give shapes to measure" in result.output


def test_lab():
    result = CliRunner().invoke(cli.app, ["lab", "progression", "--help"])
    assert result.exit_code == 0 and "flash-cute lab progression" in result.output
    assert "--plot" in result.output
    assert CliRunner().invoke(cli.app, ["lab", "list"]).exit_code == 0


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


def test_the_clock_times_every_kernel(cuda):
    problem = Problem(batch=1, heads=2, seqlen_q=256, head_dim=64)
    ids = [x.id for x in kernels.explain(problem) if x.verdict != "refused"]
    times = CudaClock(calls=2).measure(problem, ids, 3)
    assert list(times) == ids
    assert all(len(x) == 3 and min(x) > 0 for x in times.values())


def test_gpus_that_are_known_have_names():
    assert calibration.section_name(GPUS["a100"]).startswith("a100, 108 SMs, library ")
