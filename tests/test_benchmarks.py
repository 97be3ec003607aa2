"""The benchmark commands on the CPU: cases, FLOPs, medians and ratios, reports, one small run."""

import json
import math
import sys
import time
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise, permutations
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention, host_cost, report, rivals, suites, timing
from benchmarks.suites import SUITES, Case

CPU = torch.device("cpu")


def _sdpa(q, k, v, causal):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2)


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


def test_every_case_is_parsed_from_its_name_and_no_suite_repeats_one():
    for cases in SUITES.values():
        assert [Case.parse(str(case)) for case in cases] == cases
        assert len(set(cases)) == len(cases)
    assert {name: len(cases) for name, cases in SUITES.items()} == {
        "smoke": 1, "quick": 9, "train": 30, "short": 12, "few": 18, "decode": 35, "chunks": 46,
        "deterministic": 20, "features": 18, "fp8": 12,
    }  # fmt: skip


def test_suites_hold_the_shapes_that_give_them_their_name():
    train = {str(case) for case in SUITES["train"]}
    assert "bf16 b16 h32/32 q1024 k1024 d64/64 full" in train
    assert "bf16 b1 h8/8 q16384 k16384 d256/256 causal" in train
    assert "fp16 b4 h16/16 q4096 k4096 d128/128 causal" in train
    assert {case.dtype for case in SUITES["fp8"]} == {"e4m3"}
    assert not any(case.brief for case in SUITES["train"] + SUITES["short"])
    assert all(case.brief for case in SUITES["decode"])
    assert {case.seqlen_q for case in SUITES["decode"]} == {1}
    assert all(case.directions == ("fwd",) for case in SUITES["fp8"] + SUITES["decode"])


@pytest.mark.parametrize(
    "name",
    ["", "bf16 b1 h1/1 q8 k8 d64 full", "fp32 b1 h1/1 q8 k8 d64/64 full",
     "bf16 b1 h3/2 q8 k8 d64/64 full", "bf16 b1 h1/1 q9 k8 d64/64 causal"],
)  # fmt: skip
def test_what_is_no_case_is_refused(name):
    with pytest.raises(ValueError, match=r"no case|no multiple|a key for each query"):
        Case.parse(name)


def test_flops_bytes_and_rates_are_those_counted_by_hand():
    full = Case.parse("bf16 b2 h4/2 q10 k30 d64/32 full")
    assert full.flops("fwd") == 2 * 2 * 4 * 10 * 30 * (64 + 32) == 460_800
    assert full.flops("bwd") == 1_152_000
    causal = Case.parse("bf16 b1 h16/16 q16384 k16384 d128/128 causal")
    assert causal.flops("fwd") == 4 * 16 * 16384**2 * 128 / 2
    assert causal.rate("fwd", ms=2.0) == pytest.approx(1.099511627776 / 2 * 1000)
    decode = Case.parse("bf16 b1 h32/8 q1 k32768 d128/128 full")
    assert decode.kv_bytes() == 32768 * 8 * 128 * 2 * 2 == 134_217_728
    assert (decode.metric, decode.rate("fwd", ms=0.04)) == ("GB/s", pytest.approx(3355.4432))
    assert Case.parse("e4m3 b1 h1/1 q8 k8 d64/64 full").kv_bytes() == 8 * 128


@pytest.mark.parametrize("name", ["bf16 b2 h4/2 q50 k50 d32/32 causal",
                                  "fp16 b1 h2/2 q20 k70 d16/48 full"])  # fmt: skip
def test_the_reference_is_autograd_in_fp64_whatever_the_chunk(name, monkeypatch):
    case = Case.parse(name)
    x = suites.make_inputs(case, CPU, seed=1)
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    out = _sdpa(*leaves, case.causal)
    grads = torch.autograd.grad(out, leaves, x.dout.double())
    exact = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    monkeypatch.setattr(suites, "_SCORES_AT_ONCE", 7 * case.seqlen_k)
    truths = suites.reference(case, x, backward=True, seed=3)
    assert len(truths) == case.batch * case.heads_k  # few enough here to compare all
    for truth in truths:
        for key, value in truth.values.items():
            expected = suites._pair(case, exact[key], truth.batch, truth.head_k)
            torch.testing.assert_close(value, expected.reshape(value.shape), rtol=0, atol=1e-12)


def test_a_wrong_row_and_a_nan_are_found():
    case = Case.parse("bf16 b4 h4/4 q512 k512 d64/64 full")
    x = suites.make_inputs(case, CPU, seed=5)
    truths = suites.reference(case, x, backward=False, seed=5)
    out = _sdpa(x.q, x.k, x.v, causal=False)
    errors, fault = suites.check(case, {"out": out}, truths)
    assert fault == "" and 0 < errors["out"]["relative"] < 5e-3
    shifted = out.clone()
    shifted[0, 100, 0] = shifted[0, 101, 0]
    assert "worst row" in suites.check(case, {"out": shifted}, truths)[1]
    broken = out.clone()
    broken[-1, -1, -1, -1] = math.nan
    errors, fault = suites.check(case, {"out": broken}, truths)
    assert fault and errors["out"] == {"relative": None, "worst_row": None}
    errors, fault = suites.check(case, {"out": broken}, truths[:1])
    assert fault == "out: not finite outside the compared rows"


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


def test_missing_rivals_are_reported_with_a_reason(monkeypatch, tmp_path):
    found, missing = rivals.load(["cudnn", "fa2", "fa3", "fa3fp8", "fa4", "math"], CPU)
    assert list(found) == ["math"]
    assert set(missing.values()) == {"needs a CUDA device, the run is on cpu"}
    monkeypatch.delenv("FLASH_CUTE_RIVALS", raising=False)
    _, missing = rivals.load(["fa3", "fa4"], torch.device("cuda"))
    assert set(missing.values()) == {"FLASH_CUTE_RIVALS names no folder"}
    monkeypatch.setenv("FLASH_CUTE_RIVALS", str(tmp_path))
    _, missing = rivals.load(["fa3", "fa3fp8", "fa4"], torch.device("cuda"))
    assert missing["fa3"] == "fa3.so does not exist"
    assert missing["fa4"] == "fa4 does not exist"
    (tmp_path / "fa3fp8").mkdir()
    _, missing = rivals.load(["fa3fp8"], torch.device("cuda"))
    assert missing["fa3fp8"].startswith("ModuleNotFoundError: No module named 'fa3_fwd_interface'")


def test_what_a_candidate_lacks_is_told_apart_from_what_breaks():
    class Lacking:
        version = "1"

        def forward(self, case, x):
            raise NotImplementedError("head dim 64 is not supported")

        def backward(self, case, x):
            raise RuntimeError("CUDA error: misaligned address\nmore lines")

    class Shifted:
        version = "1"

        def forward(self, case, x):
            return rivals.Work(lambda: (x.q + 1,), tuple)

        backward = forward

    case = SUITES["smoke"][0]
    x = suites.make_inputs(case, CPU, seed=1)
    truths = suites.reference(case, x, backward=True, seed=1)
    session = attention.Session(
        {"a": Lacking(), "b": Shifted()}, CPU, timing.Monitor(CPU), rounds=1, round_ms=1.0
    )
    forward, backward = (attention.measure(session, case, x, d, truths) for d in ("fwd", "bwd"))
    lacking = {"status": "unsupported", "message": "head dim 64 is not supported"}
    assert forward["candidates"]["a"] == lacking
    assert forward["candidates"]["b"]["status"] == "wrong"
    assert "rate" not in forward["candidates"]["b"] and forward["ratio"] is None
    assert backward["candidates"]["a"]["status"] == "failed"
    assert backward["candidates"]["a"]["message"] == "RuntimeError: CUDA error: misaligned address"


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


def test_kernels_asked_for_are_the_ones_measured(monkeypatch):
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


def test_kernels_that_are_not_there_are_missing():
    candidates, missing = rivals.load([rivals.OURS, "flash_cute:sm75"], CPU, kernels="fwd_sm70")
    assert not candidates
    assert "no kernel's id contains any of ('fwd_sm70',)" in missing[rivals.OURS]
    assert "no kernel's id contains any of ('sm75',)" in missing["flash_cute:sm75"]


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
    names = {"flash_cute", "flash_cute with grad", "flash_cute op", "math"}
    assert result["candidates"].keys() == names
    for cost in result["candidates"].values():
        assert cost["status"] == "ok" and len(cost["batches_us"]) == 20 and cost["median_us"] > 0


def test_host_cost_wants_enough_batches(capsys):
    with pytest.raises(SystemExit):
        host_cost.main(["--batches", "19"])
    assert "at least 20" in capsys.readouterr().err


def _right(candidate: rivals.Candidate) -> bool:
    """Whether both directions of a candidate pass the check of the smoke case."""
    case = SUITES["smoke"][0]
    x = suites.make_inputs(case, CPU, seed=11)
    truths = suites.reference(case, x, backward=True, seed=11)
    entries = [attention.prepare(candidate, case, x, d, truths)[0] for d in ("fwd", "bwd")]
    return [entry["status"] for entry in entries] == ["ok", "ok"]


def test_a_library_with_a_python_function_is_loaded_from_its_folder(monkeypatch, tmp_path):
    folder = tmp_path / "fa3fp8"
    folder.mkdir()
    source = "from test_benchmarks import _sdpa\n"
    source += "def flash_attn_func(q, k, v, causal=False): return _sdpa(q, k, v, causal), None\n"
    (folder / "fa3_fwd_interface.py").write_text(source)
    monkeypatch.setenv("FLASH_CUTE_RIVALS", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "test_benchmarks", sys.modules[__name__])
    found, missing = rivals.load(["fa3fp8"], torch.device("cuda"))
    monkeypatch.delitem(sys.modules, "fa3_fwd_interface")
    assert not missing and _right(found["fa3fp8"])


def test_flash_attention_3_is_called_with_gradients_to_fill():
    class Ops:
        @staticmethod
        def fwd(q, k, v, *, softmax_scale, is_causal):
            assert softmax_scale == q.shape[-1] ** -0.5
            return _sdpa(q, k, v, is_causal), "lse", None, None

        @staticmethod
        def bwd(dout, q, k, v, out, lse, dq, dk, dv, *, softmax_scale, is_causal):
            assert lse == "lse" and softmax_scale == q.shape[-1] ** -0.5
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            grads = torch.autograd.grad(_sdpa(*leaves, is_causal), leaves, dout)
            for grad, filled in zip(grads, (dq, dk, dv), strict=True):
                filled.copy_(grad)

    candidate = object.__new__(rivals.FlashAttention3)
    candidate._ops = Ops
    assert _right(candidate)


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
