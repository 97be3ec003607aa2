"""Random trials of all features against the oracle: ``python -m flash_cute.testing.fuzz``.

``--cases N --seed S`` says which trials, ``--seconds T`` when to stop. Each failure prints a line:
the command that repeats it, and what was wrong. The exit status is 1 then. ``--json PATH`` writes
what was found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import secrets
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flash_cute import library
from flash_cute.testing.cases import unsupported_on_cuda
from flash_cute.testing.trials import Trial, draw

_COMMAND = "python -m flash_cute.testing.fuzz"
_CASES = 2000
_QUIET_S = 10.0  # between two lines of progress


@dataclass
class Tally:
    """What a run has found so far: a line of each failure, and `worst`, the largest error, as a
    fraction of its bound."""

    done: int = 0
    failures: list[str] = field(default_factory=list)
    worst: float = 0.0
    worst_trial: Trial | None = None

    def __str__(self) -> str:
        return (
            f"{self.done} cases, {len(self.failures)} failures, "
            f"errors up to {self.worst:.2f} bounds"
        )


class Progress:
    """Lines on standard output, one of progress every 10 s."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _QUIET_S

    def show(self, tally: Tally) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _QUIET_S
            self.say(str(tally))

    def say(self, line: str) -> None:
        print(line, flush=True)


class Bar(Progress):
    """A bar of the package rich, with lines above it."""

    def __init__(self, bar: Any, total: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def show(self, tally: Tally) -> None:
        self._bar.update(self._task, completed=tally.done, description=str(tally))

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(total: int | None) -> Iterator[Progress]:
    """A bar in a terminal, if rich is installed, else lines."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        yield Progress()
        return
    import rich.progress

    with rich.progress.Progress() as bar:
        yield Bar(bar, total)


def trials(seed: int, device: str) -> Iterator[Trial]:
    """Trials that the device can do; equal seeds give equal ones."""
    for number in itertools.count():
        trial = draw(random.Random(f"{seed}/{number}"))
        if device == "cpu" or unsupported_on_cuda(trial.case) is None:
            yield trial


def fuzz(chosen: Iterable[Trial], device: str, seconds: float, to: Progress) -> Tally:
    """Runs trials until they or the seconds are over, or the device takes no more work."""
    tally, end = Tally(), time.monotonic() + seconds
    for trial in chosen:
        if time.monotonic() >= end:
            break
        tally.done += 1
        try:
            ratio = trial.run(device)
        except Exception as error:  # whatever an op raises is a finding
            tally.failures.append(f"{_command(trial, device)}  # {_described(error)}")
            to.say(tally.failures[-1])
            if isinstance(error, torch.AcceleratorError):
                to.say("the device takes no more work after this error")
                break
        else:
            if ratio >= tally.worst:
                tally.worst, tally.worst_trial = ratio, trial
        to.show(tally)
    return tally


def _command(trial: Trial, device: str) -> str:
    return f"{_COMMAND} --device {device} --case {shlex.quote(trial.to_json())}"


def _described(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, AssertionError) else f"{type(error).__name__}: {line}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; `chosen` are the trials that they ask for, `total` how many (None: no limit)."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    on_cuda = library.can_use_cuda()
    parser.add_argument("--cases", type=int, help=f"default {_CASES}, with --seconds no limit")
    parser.add_argument("--seed", type=int, help="of the cases; default: a fresh one, printed")
    parser.add_argument("--seconds", type=float, help="start no case after that time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_cuda else "cpu")
    parser.add_argument("--case", metavar="JSON", help="one case, as a failure printed it")
    parser.add_argument("--json", type=Path, help="file for the seed, the tally and the failures")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not on_cuda:
        parser.error("--device cuda: no CUDA device, or a library without CUDA kernels")
    options.seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    try:
        if options.case is not None:
            options.total, options.chosen = 1, [Trial.from_json(options.case)]
            return options
    except (ValueError, TypeError, AttributeError) as error:
        parser.error(f"--case {options.case}: {error}")
    options.total = _CASES if options.cases is None else options.cases
    if options.seconds is not None and options.cases is None:
        options.total = None
    options.chosen = itertools.islice(trials(options.seed, options.device), options.total)
    return options


def main(argv: list[str] | None = None) -> int:
    """The command; 1 if any trial failed."""
    options = parse(argv)
    seconds = float("inf") if options.seconds is None else options.seconds
    started = time.monotonic()
    with progress(options.total) as to:
        tally = fuzz(options.chosen, options.device, seconds, to)
    took = time.monotonic() - started
    origin = "" if options.case is not None else f", --seed {options.seed}"
    print(f"{tally} on {options.device} in {took:.0f} s{origin}")
    if tally.worst_trial is not None:
        print(f"largest error: {_command(tally.worst_trial, options.device)}")
    if options.json is not None:
        found: dict[str, Any] = {
            "device": options.device,
            "seed": options.seed,
            "seconds": round(took, 1),
            "cases": tally.done,
            "worst": tally.worst,
            "failures": tally.failures,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
