"""The stages of ``gpu_check.py``: each runs processes until its deadline, and says what it found.

Times are those of ``time.monotonic()``.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kernel_hash import ROOT, cuda_tool

LOGS = ROOT / "build" / "gpu_check"
LEAST_CASES = 2500
REPEATS = 1000
_STOP_S = 10.0  # for a process to end by itself after its deadline
_START_S = 20.0  # for a random run to import, and to end its last case

_PYTEST_SUMMARY = re.compile(r"^=*\s*\d+ (?:passed|failed|skipped|error|deselected).* in .*s", re.M)
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) \S+::.*", re.M)
# Errors of the sanitizer about a process that was stopped do not count.
_SANITIZER_FINDING = re.compile(
    r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY: 0|Target application|Error: process)\S.*", re.M
)


class Ended(NamedTuple):
    """How a process ended; `status` is None if it was stopped, as its time was up."""

    status: int | None
    output: str
    log: Path

    def failure(self) -> str:
        how = "was stopped" if self.status is None else f"ended with status {self.status}"
        return f"{how}, see {self.log.name}"


class Found(NamedTuple):
    """The result of a stage: figures for the record, failures, and whether its time was up."""

    figures: dict[str, Any]
    failures: list[str]
    ran_out: bool


def run_all(
    stage: str, commands: list[list[str]], deadline: float, **environment: str
) -> list[Ended]:
    """Runs commands side by side, until all have ended, or stops them at the deadline."""
    LOGS.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | environment
    logs = [LOGS / f"{stage}_{number}.log" for number in range(len(commands))]
    running = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        running.append(process)
    in_time = [_ends_by(process, deadline) for process in running]
    for number in (signal.SIGINT, signal.SIGKILL):
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + _STOP_S
        for process in running:
            _ends_by(process, deadline)
    return [
        Ended(process.returncode if ended else None, log.read_text(errors="replace"), log)
        for process, ended, log in zip(running, in_time, logs, strict=True)
    ]


def _ends_by(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _shares(names: list[str], workers: int) -> list[list[str]]:
    """The names split among at most ``workers`` workers."""
    return [names[first::workers] for first in range(min(workers, len(names)))]


def tests(deadline: float, workers: int) -> Found:
    """All tests on CUDA: by pytest-xdist if it is installed, else some files a process."""
    pytest = [sys.executable, "-m", "pytest", "--only-cuda", "-rfE", "--tb=short", "--color=no"]
    if find_spec("xdist") is not None:
        commands = [[*pytest, "-n", str(workers), "--dist", "loadgroup"]]
    else:
        files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py"))
        commands = [[*pytest, *some] for some in _shares(files, workers)]
    return tests_found(run_all("tests", commands, deadline))


def tests_found(ended: list[Ended]) -> Found:
    """The result from pytest's outputs; its status is 5 if no test was selected."""
    counts = dict.fromkeys(("passed", "failed", "skipped", "error"), 0)
    failures: list[str] = []
    for one in ended:
        for line in _PYTEST_SUMMARY.findall(one.output)[-1:]:
            for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", line):
                counts[word] += int(number)
        failed = _FAILED_TEST.findall(one.output)
        if one.status not in (0, 5, None) and not failed:
            failed.append(f"tests: pytest {one.failure()}")
        failures += failed
    ran_out = any(one.status is None for one in ended)
    if counts["passed"] == 0 and not ran_out:
        failures.append("tests: none passed")
    return Found(counts, failures, ran_out)


def fuzz(deadline: float, workers: int) -> Found:
    """Random cases until the time is up, from seeds of their own in each process."""
    seeds = [secrets.randbelow(2**31) for _ in range(workers)]
    files = [LOGS / f"fuzz_{seed}.json" for seed in seeds]
    seconds = max(1.0, deadline - time.monotonic() - _START_S)
    command = [sys.executable, "-m", "flash_cute.testing.fuzz", "--seconds", f"{seconds:.0f}"]
    commands = [
        [*command, "--device", "cuda", "--seed", str(seed), "--json", str(file)]
        for seed, file in zip(seeds, files, strict=True)
    ]
    ended = run_all("fuzz", commands, deadline)
    results = [json.loads(file.read_text()) for file in files if file.exists()]
    return fuzz_found(results, seeds, ended)


def fuzz_found(results: list[dict[str, Any]], seeds: list[int], ended: list[Ended]) -> Found:
    """The result of all runs, which end when their time is up; being stopped is a failure."""
    cases = sum(result["cases"] for result in results)
    failures = [line for result in results for line in result["failures"]]
    failures += [
        f"fuzz: --seed {seed} {one.failure()}"
        for seed, one in zip(seeds, ended, strict=True)
        if one.status not in (0, 1)
    ]
    if cases < LEAST_CASES:
        failures.append(f"fuzz: {cases} cases, fewer than {LEAST_CASES}")
    worst = max((result["worst"] for result in results), default=0.0)
    cases_of_seed: dict[str, int | None] = {str(seed): None for seed in seeds}
    cases_of_seed |= {str(result["seed"]): result["cases"] for result in results}
    figures = {"cases": cases, "cases_of_seed": cases_of_seed, "worst": round(worst, 3)}
    return Found(figures, failures, any(one.status is None for one in ended))


def memcheck(ids: list[str], deadline: float, workers: int) -> Found:
    """Kernels under compute-sanitizer; the figure `checked` has the ids of those without error."""
    sanitizer = cuda_tool("compute-sanitizer")
    if sanitizer is None:
        return Found({"checked": []}, ["memcheck: compute-sanitizer is not installed"], False)
    if not ids:
        return Found({"checked": []}, [], False)
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "1"]
    command += [sys.executable, "-m", "flash_cute.testing.smoke"]
    shares = _shares(ids, workers)
    commands = [[*command, *share] for share in shares]
    # torch's caching allocator would hide accesses outside of a tensor.
    ended = run_all("memcheck", commands, deadline, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return memcheck_found(shares, ended)


def memcheck_found(shares: list[list[str]], ended: list[Ended]) -> Found:
    """The result: kernels that had run count if the process was stopped, but not after an error."""
    checked: list[str] = []
    failures = []
    for share, one in zip(shares, ended, strict=True):
        findings = _SANITIZER_FINDING.findall(one.output)
        if one.status in (0, None) and not findings:
            checked += [id for id in share if f"ran {id}\n" in one.output]
        else:
            messages = findings or re.findall(r"^(?!=).+", one.output, re.M)[-1:]
            failures.append("; ".join(("memcheck", *messages[:1], one.failure())))
    ran_out = any(one.status is None for one in ended)
    missing = sum(map(len, shares)) - len(checked)
    if missing and not failures:
        failures.append(f"memcheck: {missing} of {sum(map(len, shares))} kernels did not run")
    return Found({"checked": sorted(checked)}, failures, ran_out)


def repeats(deadline: float) -> Found:
    """The same calls again and again."""
    command = [sys.executable, "-m", "flash_cute.testing.repeats", "--times", str(REPEATS)]
    return repeats_found(*run_all("repeats", [[*command, "--device", "cuda"]], deadline))


def repeats_found(ended: Ended) -> Found:
    lines = [line for line in ended.output.splitlines() if line.startswith('{"times"')]
    if ended.status not in (0, 1) or not lines:
        failures = [] if ended.status is None else [f"repeats: {ended.failure()}"]
        return Found({"times": 0, "calls": 0}, failures, ended.status is None)
    found = json.loads(lines[-1])
    different = {name: times for name, times in found["different"].items() if times}
    failures = [f"repeats: {name} differed {times} times" for name, times in different.items()]
    return Found({"times": found["times"], "calls": len(found["different"])}, failures, False)
