"""The tuner, driven by a made-up clock: a cost model in place of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from made_up_clock import SHAPES, WINNER, MadeUpClock, cost_with, default_of, others, tuned
from typer.testing import CliRunner

import flash_cute
from flash_cute import kernels
from flash_cute.cli import app as cli
from flash_cute.kernels import Problem, calibration, files
from flash_cute.native import library
from flash_cute.tuning import Choice, Gain, Report, rules

pytestmark = pytest.mark.usefixtures("without_calibration")


def test_a_kernel_that_is_faster_is_written_and_used(tmp_path):
    report, path = tuned(tmp_path, cost_with(0.8))
    changed = [x for x in report.gains if x.before != Choice(WINNER)]
    assert changed and {x.after for x in changed} == {Choice(WINNER)}
    assert all(1.24 < x.speedup < 1.26 for x in changed)
    assert report.pays and report.path == path
    for shape in SHAPES:
        assert kernels.plan(shape, "h100").kernel.id == default_of(shape)
    before = {shape: default_of(shape) for shape in SHAPES}
    assert kernels.use_calibration(path).kernels == report.rules
    assert {kernels.plan(shape, "h100").kernel.id for shape in SHAPES} == {WINNER}
    assert WINNER not in before.values() or len(set(before.values())) > 1


def test_a_locked_file_does_not_lose_the_measurements(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "_SECONDS", 0.05)
    with files.locked(tmp_path / "calibration.json"):
        report, path = tuned(tmp_path, cost_with(0.8))
    assert report.pays and report.rules and report.gains
    assert report.path is None and not path.exists()
    assert "another process keeps" in report.not_written and report.not_written in caplog.text
    assert str(report).endswith(f"nothing written: {report.not_written}")


def test_a_failed_write_does_not_lose_the_measurements(tmp_path):
    clock = MadeUpClock(cost_with(0.8))
    path = tmp_path / (252 * "n")
    report = flash_cute.autotune(SHAPES, clock=clock, gpu="h100", path=path)
    assert report.pays and report.path is None and "cannot be written" in report.not_written


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
    def cost(problem, choice):
        is_late = problem.seqlen_q in (1472, 2944, 5888)  # of the report alone
        return cost_with(1.05 if is_late else 0.8)(problem, choice)

    report, path = tuned(tmp_path, cost)
    assert report.rules and report.worst < 0.98
    assert report.path is None and not path.exists()


def test_a_rule_for_a_part_of_the_calls_keeps_to_it(tmp_path):
    """Calls of batch 4 gain, those of batch 1 lose: the buckets of the first alone get a rule."""

    def cost(problem, choice):
        return cost_with(0.8 if problem.batch == 4 else 1.2)(problem, choice)

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
    assert set(report.rules.values()) == {Choice(winner)}


FEW_QUERIES = [
    Problem(heads=32, heads_k=8, seqlen_q=32, seqlen_k=n, causal=True) for n in (4096, 8192)
]


def measured_of(problem, tmp_path):
    clock = MadeUpClock(lambda problem, choice: 1.0)
    flash_cute.autotune([problem], clock=clock, gpu="h100", path=tmp_path / "x.json")
    (choices,) = [choices for shape, choices, _ in clock.calls if shape == problem]
    assert len(set(choices)) == len(choices)
    return choices


def test_parts_and_shared_tiles_are_measured_where_tiles_are_few(tmp_path):
    """Of the usual kernel and its alternatives, each plan once: the estimates are the kernel's."""
    problem = FEW_QUERIES[1]
    default, free = default_of(problem), kernels.plan(problem, "h100")
    choices = measured_of(problem, tmp_path)
    assert {x.kernel for x in choices} == {default, *others(problem)}
    of_default = [x.numbers for x in choices if x.kernel == default]
    splits = [x["num_splits"] for x in of_default if "num_splits" in x]
    heads = [x["pack_gqa"] for x in of_default if "pack_gqa" in x]
    assert splits == [n for n in (1, 2, 4, 8, 16, 32) if n != free.num_splits]
    assert heads == [1, 2] and free.pack_gqa == 4
    assert of_default[0] == {} and len(of_default) == 1 + len(splits) + len(heads)
    assert {x.kernel.split("_m")[0] for x in choices if x.numbers} == {default.split("_m")[0]}
    plans = []
    for choice in choices:
        with kernels.only(choice.kernel, **choice.numbers):
            plans.append(kernels.plan(problem, "h100"))
    assert len(set(plans)) == len(plans)


@pytest.mark.parametrize(
    "problem",
    [
        replace(SHAPES[0], batch=64),
        replace(FEW_QUERIES[0], op="bwd", head_dim=64),
        replace(FEW_QUERIES[0], op="decode"),
        replace(FEW_QUERIES[0], dtype=torch.float32),
    ],
)
def test_only_hopper_forward_is_measured_with_numbers(problem, tmp_path):
    assert all(choice.numbers == {} for choice in measured_of(problem, tmp_path))


@pytest.mark.parametrize("numbers", [{"num_splits": 2}, {"pack_gqa": 1}])
def test_numbers_that_are_faster_are_written_and_used(numbers, tmp_path):
    def cost(problem, choice):
        return 0.8 if choice == Choice(default_of(problem), **numbers) else 1.0

    report, path = tuned(tmp_path, cost, FEW_QUERIES)
    default = default_of(FEW_QUERIES[0])
    assert list(report.rules.values()) == [Choice(default, **numbers)]
    ((name, number),) = numbers.items()
    assert f"= {default} {name}={number}" in str(report)
    assert f"{default} -> {default} {name}={number}" in str(report)
    for shape in FEW_QUERIES:
        assert getattr(kernels.plan(shape, "h100"), name) != number
    assert kernels.use_calibration(path).kernels == report.rules
    for shape in FEW_QUERIES:
        assert getattr(kernels.plan(shape, "h100"), name) == number


def test_estimates_that_are_the_fastest_are_no_rule(tmp_path):
    """Whatever differs from them is slower."""
    report, path = tuned(tmp_path, lambda _, x: 1.1 if x.numbers else 1.0, FEW_QUERIES)
    assert report.rules == {} and not path.exists()


@pytest.mark.parametrize(("factor", "numbers"), [(0.795, {}), (0.7, {"num_splits": 4})])
def test_numbers_have_to_gain_over_the_estimates_of_their_kernel(factor, numbers, tmp_path):
    winner = others(FEW_QUERIES[0])[0]

    def cost(problem, choice):
        if choice == Choice(winner, num_splits=4):
            return factor
        return 0.8 if choice.kernel == winner else 1.0

    report, _ = tuned(tmp_path, cost, FEW_QUERIES)
    assert set(report.rules.values()) == {Choice(winner, **numbers)}


def test_a_limit_around_it_changes_nothing(tmp_path):
    cost = cost_with(0.8)
    free, path = tuned(tmp_path, cost)
    path.unlink()
    with kernels.only(others(SHAPES[0])[1], num_splits=2):
        limited, _ = tuned(tmp_path, cost)
        assert kernels.plan(SHAPES[0], "h100").num_splits == 2
    assert limited.rules == free.rules
    assert [x.after for x in limited.gains] == [x.after for x in free.gains]


def test_rules_as_the_library_applies_them():
    problem = SHAPES[0]
    bucket = kernels.bucket(problem, "h100")
    a, b, c = map(Choice, ("fwd_a", "fwd_b", "fwd_c"))
    measured = rules.Measured(problem, bucket, a, {a: 2.0, b: 1.0, replace(b, num_splits=2): 0.5})
    assert rules.apply({}, measured).after == a
    assert rules.apply({measured.coarse: b}, measured).speedup == 2.0
    finer = {measured.coarse: b, bucket: a}
    assert rules.apply(finer, measured).after == a
    assert rules.apply({bucket: c}, measured).after == a
    assert rules.apply({bucket: replace(b, num_splits=2)}, measured).speedup == 4.0
    assert rules.apply({bucket: replace(b, num_splits=4)}, measured).after == b
    assert rules.apply({bucket: replace(c, num_splits=2)}, measured).after == a


def test_geomean_and_worst():
    a, b = Choice("a"), Choice("b")
    gains = [Gain(SHAPES[0], a, b, 2.0, 1.0), Gain(SHAPES[1], a, b, 0.97, 1.0)]
    report = Report({}, tuple(gains), 2, 0.0, None)
    assert report.geomean == pytest.approx((2 * 0.97) ** 0.5)
    assert report.worst == 0.97 and not report.pays


REFUSED = {
    "no problem": (dict(problems=[]), ValueError, "problems is empty"),
    "one problem": (dict(problems=SHAPES[0]), ValueError, "problems is Problem"),
    "unseen": (dict(unseen=["b1"]), ValueError, "unseen is .*; expected a sequence of Problem"),
    "rounds": (dict(rounds=0), ValueError, "rounds is 0"),
    "half a round": (dict(rounds=2.5), ValueError, "rounds is 2.5"),
    "rounds as text": (dict(rounds="3"), ValueError, "rounds is '3'"),
    "path": (dict(path="/"), ValueError, "path is '/'; expected a file"),
    "another gpu": (dict(gpu="b200"), ValueError, "gpu is 'b200'; expected one of"),
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


@pytest.mark.parametrize("time", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(time, tmp_path):
    clock = MadeUpClock(lambda problem, choice: time, noise=0)
    with pytest.raises(ValueError, match=r"clock gave .*; expected milliseconds above 0"):
        flash_cute.autotune(SHAPES[:1], clock=clock, gpu="h100", path=tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(library.can_use_cuda(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(RuntimeError, match="measures kernels on a GPU, and there is none"):
        flash_cute.autotune(SHAPES, path=path)
    result = CliRunner().invoke(cli.app, ["tune", str(SHAPES[0]), "--path", str(path)])
    assert result.exit_code == 1 and "there is none here" in result.output
    assert not path.exists()
