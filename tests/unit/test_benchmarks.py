"""The benchmark commands on the CPU: options, reports, one small run."""

import json
import sys
from contextlib import contextmanager

import pytest
import torch

from benchmarks import attention, context_parallel, host_cost, report, rivals, suites
from benchmarks.suites import Case

CPU = torch.device("cpu")


def _entry(*ms: float, rate: float) -> dict:
    rounds = [{"ms": t, "clock_mhz": 1700.0, "power_w": 690.0} for t in ms]
    return {
        "status": "ok", "message": "", "error": {"out": {"relative": 1e-3, "worst_row": 1e-2}},
        "calls": 9, "rounds": rounds, "median_ms": sorted(ms)[len(ms) // 2], "spread": 0.1,
        "rate": rate, "clock_mhz": 1700.0, "power_w": 690.0,
    }  # fmt: skip


def _result() -> dict:
    """A report of two rows as a GPU run would write it."""
    no_backward = {"status": "unsupported", "message": "no backward for dim 256"}
    wrong = {"status": "wrong", "message": "out: relative error 1", "error": {}}
    rows = [
        ("fwd", {"flash_cute": _entry(1.0, rate=600.0), "fa3": _entry(1.1, rate=640.0)}),
        ("bwd", {"flash_cute": no_backward, "fa3": _entry(2.0, rate=500.0), "fa4": wrong}),
    ]
    return {
        "command": "python -m benchmarks.attention --suite quick",
        "date": "2026-01-01T00:00:00+00:00",
        "machine": {
            "device": "NVIDIA H200", "sm_count": 132, "driver": "580.1", "power_limit_w": 700.0,
            "power_kind": "instantaneous", "nvml": "read",
        },
        "versions": {"torch": "2.11.0", "cuda": "13.0", "flash_cute": "0.1.0"},
        "settings": {
            "suite": "quick", "mode": "bursts", "rounds": 5, "round_ms": 50.0, "seed": 1,
        },
        "missing": {"cudnn": "needs a CUDA device"},
        "results": [
            attention._row(Case.parse("bf16 b4 h8/8 q4096 k4096 d256/256 causal"), *row)
            for row in rows
        ],
    }  # fmt: skip


def test_ratio_is_to_the_best_right_rival():
    entries = {
        "flash_cute": {"status": "ok", "rate": 600.0},
        "fa2": {"status": "ok", "rate": 300.0},
        "fa3": {"status": "ok", "rate": 640.0},
        "fa4": {"status": "wrong", "rate": 9000.0},
    }
    assert report.compare(entries) == ("fa3", 600 / 640)
    assert report.compare({**entries, "flash_cute": {"status": "failed"}}) == ("fa3", None)
    assert report.compare({"flash_cute": entries["flash_cute"]}) == (None, None)


def test_json_becomes_markdown_again(tmp_path, capsys):
    path = tmp_path / "folder" / "f.json"
    report.save(_result(), path)
    assert report.load(path) == _result()
    assert [p.name for p in path.parent.iterdir()] == ["f.json"], "a draft is left"
    assert report.main([str(path), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert text == report.markdown(_result())
    case = "bf16 b4 h8/8 q4096 k4096 d256/256 causal"
    assert f"| {case} | fwd | TFLOP/s | 600 | 640 | - | fa3 | 0.94 | 1700 MHz, 690 W |" in text
    assert f"| {case} | bwd | TFLOP/s | n/a | 500 | wrong | fa3 | - | - |" in text
    assert "- cudnn is missing: needs a CUDA device" in text
    assert f"- flash_cute unsupported: no backward for dim 256 ({case} bwd)" in text
    assert "NVIDIA H200, 132 SMs, limit 700 W, driver 580.1. torch 2.11.0" in text


def test_a_terminal_gets_a_table_with_the_same_cells(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    report.show(_result())
    text = capsys.readouterr().out
    assert all(cell in text for cells in report.table(_result()) for cell in cells)
    assert all(note in text for note in report.remarks(_result())) and "| ---" not in text


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_is_written(tmp_path, ending):
    path = tmp_path / f"f.{ending}"
    report.save(_result(), tmp_path / "f.json")
    assert report.main([str(tmp_path / "f.json"), "--plot", str(path)]) == 0
    assert path.stat().st_size > 5000
    report.plot({**_result(), "results": []}, path)
    assert path.stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [("--rivals fa9", "unknown rivals"), ("--rivals flash_cute", "unknown rivals"),
     ("--sustained --rounds 3", "at least 7"), ("--rounds 0", "at least 1"),
     ("--direction up", "expected fwd"), ("--suite decode --direction bwd", "nothing to measure"),
     ("--match nowhere", "nothing to measure"), ("--suite none", "invalid choice")],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        attention.parse(["--device", "cpu", *options.split()])
    assert message in capsys.readouterr().err


def test_defaults_depend_on_the_suite_and_the_mode():
    bursts = attention.parse(["--device", "cpu", "--direction", "fwd", "--match", "d64.*causal"])
    assert bursts.rivals == ["cudnn", "fa2", "fa3", "fa4"]
    assert (bursts.rounds, bursts.round_ms) == (5, 50)
    assert [str(case) for case, _ in bursts.cases] == [
        "bf16 b16 h32/32 q1024 k1024 d64/64 causal", "bf16 b4 h32/32 q4096 k4096 d64/64 causal",
    ]  # fmt: skip
    assert {tuple(directions) for _, directions in bursts.cases} == {("fwd",)}
    long = attention.parse(["--device", "cpu", "--suite", "fp8", "--sustained"])
    assert (long.rivals, long.rounds, long.round_ms >= 300) == (["fa3fp8"], 7, True)


def test_cases_of_no_suite_are_measured_by_their_names():
    names = ["bf16 b3 h2/1 q1 k96 d64/64 full +lengths", "fp16 b1 h2/2 q40 k40 d64/64 causal"]
    asked = [word for name in names for word in ("--case", name)]
    options = attention.parse(["--device", "cpu", *asked])
    assert [(str(case), directions) for case, directions in options.cases] == [
        (names[0], ["fwd"]), (names[1], ["fwd", "bwd"]),
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        attention.parse(["--device", "cpu", "--case", "bf16 b3"])


def test_requested_kernels_are_measured(monkeypatch):
    asked = []

    @contextmanager
    def only(*parts):
        asked.append(parts)
        yield

    monkeypatch.setattr("flash_cute.library.only", only)
    case = Case.parse("bf16 b1 h1/1 q8 k8 d32/32 full")
    x = suites.make_inputs(case, CPU, seed=1)
    names = [rivals.OURS, "flash_cute:_sm80_"]
    for kernels, scopes in (("", [("_sm80_",)]), ("_sm90_", [("_sm90_",), ("_sm80_",)])):
        candidates, missing = rivals.load(names, CPU, kernels)
        assert list(candidates) == names and not missing
        asked.clear()
        for candidate in candidates.values():
            for work in (candidate.forward(case, x), candidate.op(case, x)):
                with work.scope():
                    work.results(work.run())
        assert asked == [scope for scope in scopes for _ in range(2)]
        asked.clear()
        for candidate in candidates.values():  # a backward needs the forward's results
            with candidate.backward(case, x).scope():
                pass
        assert asked == [scope for scope in scopes for _ in range(2)]


def test_a_small_run_from_end_to_end(tmp_path, capsys):
    path, picture = tmp_path / "f.json", tmp_path / "f.png"
    arguments = ["--suite", "smoke", "--device", "cpu", "--rivals", "math,cudnn,fa2"]
    arguments += ["--rounds", "2", "--json", str(path), "--plot", str(picture)]
    assert attention.main(arguments) == 0
    result = json.loads(path.read_text())
    assert result["missing"].keys() == {"cudnn", "fa2"}
    assert result["machine"]["nvml"] == "a cpu run has no clock and power to read"
    assert result["versions"]["torch"] == torch.__version__
    assert [row["direction"] for row in result["results"]] == ["fwd", "bwd"]
    for row in result["results"]:
        assert row["best_rival"] == "math" and row["ratio"] > 0
        for entry in row["candidates"].values():
            assert entry["status"] == "ok" and len(entry["rounds"]) == 2 and entry["rate"] > 0
            assert all(error["relative"] < 1.2e-2 for error in entry["error"].values())
    assert row["candidates"]["flash_cute"]["error"].keys() == {"dq", "dk", "dv"}
    assert picture.stat().st_size > 0 and "best rival" in capsys.readouterr().out


def test_host_cost_of_each_way_to_call(tmp_path):
    path = tmp_path / "f.json"
    arguments = ["--device", "cpu", "--rivals", "math,fa3", "--batches", "20", "--calls", "1"]
    assert host_cost.main([*arguments, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["missing"].keys() == {"fa3"}
    ways = ("", " with grad", " backward", " varlen", " op", " through SDPA", " kvcache")
    cached = (" kvcache lengths", " kvcache pages16", " kvcache append")
    names = {"math", "empty backward", *(f"flash_cute{way}" for way in (*ways, *cached))}
    assert result["candidates"].keys() == names
    for cost in result["candidates"].values():
        assert cost["status"] == "ok" and len(cost["batches_us"]) == 20
        assert 0 < cost["least_us"] <= cost["median_us"]


def test_host_costs_are_compared_with_the_op_that_does_the_same():
    costs = {
        "fa3": {"least_us": 20.0, "median_us": 21.0},
        "fa3 lengths": {"least_us": 25.0, "median_us": 26.0},
        "flash_cute": {"least_us": 24.0, "median_us": 25.0},
        "flash_cute kvcache": {"least_us": 30.0, "median_us": 31.0},
        "flash_cute backward": {"least_us": 90.0, "median_us": 91.0},
        "flash_cute through SDPA": {"least_us": 30.0, "median_us": 31.0},
    }
    assert host_cost.line("flash_cute", costs).endswith(", 1.20 of fa3")
    assert host_cost.line("flash_cute kvcache", costs).endswith(", 1.20 of fa3 lengths")
    assert host_cost.line("flash_cute through SDPA", costs).endswith(", 1.25 of flash_cute")
    assert host_cost.line("flash_cute backward", costs).endswith("median 91.0")
    assert host_cost.line("fa3", costs) == "fa3: least 20.0 us, median 21.0"


def test_host_cost_wants_enough_batches(capsys):
    with pytest.raises(SystemExit):
        host_cost.main(["--batches", "19"])
    assert "at least 20" in capsys.readouterr().err


def test_timelines_of_context_parallel(tmp_path):
    pytest.importorskip("matplotlib")
    names = ("ncclDevKernel_AllGather", "void flash_cute::sm90::forward<>", "void at::native::fill")
    assert [context_parallel.kind_of(name) for name in names] == [
        "communication", "attention", "the rest"
    ]  # fmt: skip
    events = [
        {"name": name, "stream": 7 + i % 2, "begin_us": 10.0 * i, "us": 9.0}
        for i, name in enumerate(names)
    ]
    traces = [{"seqlen": n, "strategy": "ring", "events": events} for n in (8192, 131072)]
    context_parallel.plot(traces, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 1000


def test_table_of_context_parallel():
    rows = [
        {"seqlen": 8192, "ranks": 2, "candidate": name, "ms": ms}
        for name, ms in (("one", 30.0), ("ring", 20.0), ("torch", 150.4))
    ]
    assert context_parallel.table(rows, 2) == [
        "| tokens | one GPU | ring | torch |",
        "|---|---|---|---|",
        "| 8k | 30.0 | 20.0, 0.750 | 150, 0.100 |",
    ]
