"""The check of kernels on a GPU: its budgets, its findings and what it records."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from types import SimpleNamespace

import gpu_check
import gpu_stages
import kernel_hash
import pytest
import torch
from gpu_stages import Ended, Found
from made_up_kernels import BWD_ID, CHECKED, FWD_ID, code, recorded
from only_cuda import runs_on_cuda

from flash_cute.native import library
from flash_cute.testing import fuzz, repeats, smoke, trials


def test_memcheck_is_of_kernels_that_changed():
    def ids(before, now):
        return gpu_check.to_memcheck(before, now, ["sm_90"])

    every = sorted((FWD_ID, BWD_ID))
    assert ids(None, CHECKED) == every
    assert ids(recorded(CHECKED), CHECKED) == []
    assert ids(recorded(CHECKED), code(FWD=b"1", BWD=b"5", PASS=b"3")) == [BWD_ID]
    assert ids(recorded(CHECKED, not_memchecked=[FWD_ID, "gone"]), CHECKED) == [FWD_ID]
    assert ids(recorded(CHECKED), code(FWD=b"1", BWD=b"2", PASS=b"6")) == every


def test_stages_end_one_after_another_within_the_time():
    ends = gpu_check.deadlines(100.0, 9.0)
    assert list(ends) == ["repeats", "tests", "memcheck", "fuzz"]
    assert sorted(ends.values()) == list(ends.values())
    assert ends["fuzz"] + gpu_stages._STOP_S < 100.0 + 9 * 60


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


def test_processes_are_stopped_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_stages, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(gpu_stages, "_STOP_S", 0.5)
    stubborn = "trap '' INT; echo on; exec sleep 60"
    commands = [shell("echo $A; exit 3"), shell(stubborn)]  # a busy machine takes 2 s for Python
    started = time.monotonic()
    first, second = gpu_stages.run_all("x", commands, started + 2, A="b")
    assert time.monotonic() - started < 10
    assert (first.status, first.output) == (3, "b\n")
    assert (second.status, second.output) == (None, "on\n")
    assert "status 3, see x_0.log" in first.failure() and "was stopped" in second.failure()


def ended(status: int | None, *lines: str) -> Ended:
    return Ended(status, "".join(f"{line}\n" for line in lines), gpu_stages.LOGS / "x_0.log")


def test_tests_are_counted():
    failed = "FAILED tests/test_a.py::test_b[1] - AssertionError: no"
    some = [
        ended(1, "..F", failed, "1 failed, 2 passed, 3 skipped, 9 deselected in 1.50s"),
        ended(0, "== 5 passed, 1 skipped, 1 warning in 70.00s (0:01:10) =="),
        ended(5, "4 deselected in 0.10s"),
    ]
    found = gpu_stages.tests_found(some)
    assert found == ({"passed": 7, "failed": 1, "skipped": 4, "error": 0}, [failed], False)
    assert gpu_stages.tests_found([ended(None, "...")]).ran_out
    assert gpu_stages.tests_found([ended(4, "usage"), ended(0, "1 passed in 1s")]).failures == [
        "tests: pytest ended with status 4, see x_0.log"
    ]
    assert gpu_stages.tests_found([ended(5, "4 deselected in 0.10s")]).failures


def test_random_cases_are_added_up():
    results = [
        {"seed": 3, "cases": 2000, "worst": 0.5, "failures": []},
        {"seed": 4, "cases": 400, "worst": 0.75, "failures": ["python -m ..."]},
    ]
    found = gpu_stages.fuzz_found(results, [3, 4, 5], [ended(0), ended(1), ended(-11)])
    of_seed = {"3": 2000, "4": 400, "5": None}
    assert found.figures == {"cases": 2400, "cases_of_seed": of_seed, "worst": 0.75}
    assert found.failures == [
        "python -m ...",
        "fuzz: --seed 5 ended with status -11, see x_0.log",
        "fuzz: 2400 cases, fewer than 2500",
    ]
    results[0]["cases"] = 2500
    assert gpu_stages.fuzz_found(results[:1], [3], [ended(0)]).failures == []


STOPPED = "========= Target application returned an error"


def test_findings_of_memcheck():
    head, clean = "========= COMPUTE-SANITIZER", "========= ERROR SUMMARY: 0 errors"
    shares = [["a"], ["b", "c"], ["d"]]
    some = [
        ended(0, head, "ran a", clean),
        ended(None, head, "ran b", STOPPED),
        ended(0, "ran d", clean),
    ]
    found = gpu_stages.memcheck_found(shares, some)
    assert found.figures == {"checked": ["a", "b", "d"]} and found.ran_out
    assert found.failures == ["memcheck: 1 of 4 kernels did not run"]
    broken = ended(1, head, "========= Invalid __global__ read of size 4 bytes", "ran d")
    found = gpu_stages.memcheck_found(shares, [*some[:2], broken])
    assert found.figures == {"checked": ["a", "b"]}
    (failure,) = found.failures
    assert failure.startswith("memcheck; ========= Invalid __global__ read of size 4 bytes; ended")
    raised = ended(1, head, "RuntimeError: no", STOPPED, clean)
    (failure,) = gpu_stages.memcheck_found([["a"]], [raised]).failures
    assert failure == "memcheck; RuntimeError: no; ended with status 1, see x_0.log"


def test_a_missing_sanitizer_is_a_failure(monkeypatch):
    monkeypatch.setattr(gpu_stages, "cuda_tool", lambda _: None)
    found = gpu_stages.memcheck(["a"], 0.0, 1)
    assert found.failures == ["memcheck: compute-sanitizer is not installed"]


def test_only_what_runs_on_cuda_is_kept(request):
    def item(*fixtures, **params):
        return SimpleNamespace(fixturenames=fixtures, callspec=SimpleNamespace(params=params))

    assert runs_on_cuda(item("cuda")) and runs_on_cuda(item(device="cuda"))
    assert not runs_on_cuda(item("device", device="cpu"))
    assert not runs_on_cuda(request.node)


def test_whole_ids_are_run_with_the_help_of_others(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(library, "kernels", lambda: (FWD_ID, BWD_ID, f"{BWD_ID}0"))
    monkeypatch.setattr(library, "only", lambda *ids: nullcontext(seen.append(ids)))
    monkeypatch.setattr(smoke, "trained", lambda _: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    smoke.main(BWD_ID)
    assert seen == [(BWD_ID, FWD_ID)]
    assert capsys.readouterr().out == f"ran {BWD_ID}\n1 kernels ran\n"
    smoke.main("_sm80_")
    assert seen[1:] == [(BWD_ID,), (f"{BWD_ID}0",)]


def test_repeats_say_what_differed(monkeypatch, capsys):
    assert repeats.main(["--times", "2", "--device", "cpu"]) == 0
    found = gpu_stages.repeats_found(ended(0, capsys.readouterr().out))
    assert found.figures["times"] == 2 and found.figures["calls"] >= 7 and found.failures == []
    calls = iter(range(3))
    monkeypatch.setattr(
        repeats,
        "calls",
        lambda _: {"x": lambda: [torch.tensor([next(calls) // 2], dtype=torch.int16)]},
    )
    assert repeats.main(["--times", "2", "--device", "cpu"]) == 1
    found = gpu_stages.repeats_found(ended(1, capsys.readouterr().out))
    assert found.failures == ["repeats: x differed 1 times"]
    assert (
        gpu_stages.repeats_found(ended(-9)).failures
        and gpu_stages.repeats_found(ended(None)).ran_out
    )


def test_random_cases_leave_their_tally(tmp_path, monkeypatch):
    file = tmp_path / "fuzz.json"
    monkeypatch.setattr(trials.Trial, "run", lambda *_: 1 // 0)
    arguments = ["--cases", "2", "--seed", "7", "--device", "cpu", "--json", str(file)]
    assert fuzz.main(arguments) == 1
    found = json.loads(file.read_text())
    assert (found["seed"], found["cases"], found["device"]) == (7, 2, "cpu")
    assert all("ZeroDivisionError" in line for line in found["failures"])


@pytest.fixture
def stages(monkeypatch):
    """Stages that find what they are told to, and a GPU for them."""
    found = {
        "repeats": Found({"times": 1000, "calls": 9}, [], False),
        "tests": Found({"passed": 10, "failed": 0, "skipped": 2, "error": 0}, [], False),
        "memcheck": Found({"checked": [FWD_ID]}, [], False),
        "fuzz": Found({"cases": 3000, "cases_of_seed": {"1": 3000}, "worst": 0.5}, [], False),
    }
    for name in found:
        monkeypatch.setattr(gpu_stages, name, lambda *_, name=name: found[name])
    monkeypatch.setattr(gpu_check, "most_at_once", lambda: 1)
    monkeypatch.setattr(gpu_check, "described", lambda *_: {"commit": "abc", "gpu": "some"})
    return found


def checked(**options: object) -> dict:
    options = {"workers": 2, "minutes": 9.0, "commit": None, "no_memcheck": False} | options
    options["started"] = time.monotonic()
    now = argparse.Namespace(**options)
    return gpu_check.check(CHECKED, ["sm_90"], None, now)


def test_the_record(stages):
    record = checked()
    assert record["commit"] == "abc" and record["failures"] == []
    assert record["not_memchecked"] == [BWD_ID]
    assert list(record["stages"]) == ["repeats", "tests", "memcheck", "fuzz"]
    for stage in record["stages"].values():
        assert stage["seconds"] < stage["budget"] and not stage["ran_out"]
    assert record["stages"]["memcheck"]["checked"] == 1
    assert record["stages"]["memcheck"]["kernels"] == 2
    assert record["stages"]["fuzz"]["cases_of_seed"] == {"1": 3000}
    assert json.loads(json.dumps(record)) == record


def test_what_was_not_asked_for_is_recorded(stages):
    record = checked(no_memcheck=True)
    assert record["failures"] == []
    assert record["stages"]["memcheck"]["asked_for"] is False
    assert record["not_memchecked"] == sorted((FWD_ID, BWD_ID))


def test_failures_are_recorded_and_stay_few(stages):
    stages["tests"] = Found({"passed": 1}, [f"FAILED {'x' * 999}"] * 99, True)
    failures = checked()["failures"]
    assert len(failures) == 41 and failures[-1] == "and 60 more"
    assert max(map(len, failures)) == 300
    stages["tests"] = Found({"passed": 1}, [], True)
    record = checked()
    assert record["failures"] == ["tests: the time was up after 0 s"]
    assert record["stages"]["tests"]["ran_out"]


def test_the_record_says_what_is_checked(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "some GPU")
    monkeypatch.setenv("FLASH_CUTE_COMMIT", "def")
    record = gpu_check.described(CHECKED, ["sm_90"], None)
    assert (record["commit"], record["gpu"]) == ("def", "some GPU")
    assert gpu_check.described(CHECKED, ["sm_90"], "abc")["commit"] == "abc"
    assert (record["source"], record["host"]) == (
        kernel_hash.source_hash(),
        kernel_hash.host_hash(),
    )
    assert (record["sass"], record["kernels"]) == (CHECKED.sass, CHECKED.kernels)
