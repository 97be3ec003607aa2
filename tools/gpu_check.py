"""Checks the kernels on a GPU, and records it: ``PYTHONPATH=. python tools/gpu_check.py``.

Stages are tests, random cases, memcheck of the kernels that changed since the last check, and
repeats, within ``--minutes``. It writes ``benchmarks/results/gpu_check.json``; the exit status is 1
if anything failed or did not end in time. Logs are in ``build/gpu_check``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_stages
from gpu_stages import Found
from kernel_hash import (
    PASSES,
    RECORD,
    ROOT,
    Code,
    archs_of_gpu,
    host_hash,
    library_code,
    source_hash,
)

# Shares of the time, in order; a stage's unused time goes to the next. The rest is for the end.
SHARES = {"repeats": 0.04, "tests": 0.64, "memcheck": 0.12, "fuzz": 0.17}
_BYTES_OF_TESTS = 12 * 2**30  # of GPU memory, that a process of tests may need
_MOST_FAILURES, _MOST_CHARACTERS = 40, 300  # in the record


def deadlines(start: float, minutes: float) -> dict[str, float]:
    """The deadline of each stage, on the clock of `start`."""
    ends, share = {}, 0.0
    for name, part in SHARES.items():
        share += part
        ends[name] = start + 60 * minutes * share
    return ends


def to_memcheck(before: dict[str, Any] | None, code: Code, archs: list[str]) -> list[str]:
    """Kernels whose code changed since the last check, or that it left unchecked.

    If the passes changed, that is all kernels.
    """
    ids: set[str] = set()
    for arch in archs:
        now = code.kernels[arch]
        then = {} if before is None else before["kernels"].get(arch, {})
        changed = {id for id in now if now[id] != then.get(id)}
        left = set() if before is None else now.keys() & set(before["not_memchecked"])
        ids |= now.keys() if PASSES in changed else changed | left
    return sorted(ids - {PASSES})


def run_stages(
    stages: dict[str, Callable[[float], Found]], ends: dict[str, float]
) -> dict[str, Any]:
    """Runs the stages; returns their parts of the record: `stages` by name, and `failures`."""
    done: dict[str, Any] = {}
    failures: list[str] = []
    for name, run in stages.items():
        started = time.monotonic()
        found = run(ends[name])
        seconds = time.monotonic() - started
        timing = {"seconds": round(seconds, 1), "budget": round(ends[name] - started, 1)}
        done[name] = {**timing, "ran_out": found.ran_out, **found.figures}
        failures += found.failures
        if found.ran_out:
            failures.append(f"{name}: the time was up after {seconds:.0f} s")
        print(f"{name}: {json.dumps(done[name])}", *found.failures, sep="\n", flush=True)
    return {"stages": done, "failures": shortened(failures)}


def shortened(failures: list[str]) -> list[str]:
    """The first failures, shortened, so that the record stays small."""
    some = [line[:_MOST_CHARACTERS] for line in failures[:_MOST_FAILURES]]
    rest = len(failures) - len(some)
    return [*some, f"and {rest} more"] if rest else some


def described(code: Code, archs: list[str], commit: str | None) -> dict[str, Any]:
    """The parts of the record that need no stage: the commit, the library, the GPU."""
    import torch

    return {
        "commit": commit or os.environ.get("FLASH_CUTE_COMMIT") or commit_of_tree(),
        "source": source_hash(),
        "host": host_hash(),
        "sass": {arch: code.sass[arch] for arch in archs},
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernels": {arch: code.kernels[arch] for arch in archs},
    }


def most_at_once() -> int:
    """How many processes of tests the GPU has memory for."""
    import torch

    return max(1, torch.cuda.get_device_properties(0).total_memory // _BYTES_OF_TESTS)


def commit_of_tree() -> str | None:
    """The commit that is checked out, with "-dirty" if files differ; None without a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return run.stdout.strip() or None


def check(
    code: Code, archs: list[str], before: dict[str, Any] | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs all stages; the record."""
    ids, workers = to_memcheck(before, code, archs), options.workers
    stages: dict[str, Callable[[float], Found]] = {
        "repeats": gpu_stages.repeats,
        "tests": lambda end: gpu_stages.tests(end, min(workers, most_at_once())),
        "memcheck": lambda end: gpu_stages.memcheck(ids, end, workers),
        "fuzz": lambda end: gpu_stages.fuzz(end, workers),
    }
    if options.no_memcheck:
        stages["memcheck"] = lambda _: Found({"checked": [], "asked_for": False}, [], False)
    ends = deadlines(options.started, options.minutes)
    record = described(code, archs, options.commit) | run_stages(stages, ends)
    checked = record["stages"]["memcheck"]["checked"]
    record["stages"]["memcheck"] |= {"checked": len(checked), "kernels": len(ids)}
    return record | {"not_memchecked": sorted(set(ids) - set(checked))}


def main(argv: list[str] | None = None) -> int:
    """The command; 1 if anything failed."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="within which all ends")
    workers = min(8, os.cpu_count() or 1)
    parser.add_argument("--workers", type=int, default=workers, help="processes side by side")
    parser.add_argument("--commit", help="default: $FLASH_CUTE_COMMIT, or the repository's")
    parser.add_argument("--no-memcheck", action="store_true", help="which is recorded")
    parser.add_argument("--json", type=Path, default=RECORD, help="file for the record")
    options = parser.parse_args(argv, argparse.Namespace(started=started))

    import torch

    from flash_cute.native import library

    if not library.can_use_cuda():
        parser.error("no CUDA device, or a library without CUDA kernels")
    path = library.find().resolve()
    os.environ["FLASH_CUTE_LIBRARY"] = str(path)  # every stage uses the one that is hashed
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.workers))
    code = library_code(path)
    archs = archs_of_gpu(code.sass, *torch.cuda.get_device_capability())
    if not archs:
        parser.error(f"{path} has no code for this GPU, but for {', '.join(code.sass)}")
    before = json.loads(RECORD.read_text()) if RECORD.exists() else None
    record = check(code, archs, before, options)
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{options.json}: {len(record['failures'])} failures")
    return int(bool(record["failures"]))


if __name__ == "__main__":
    sys.exit(main())
