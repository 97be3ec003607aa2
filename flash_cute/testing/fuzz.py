"""Random trials of all features against the oracle: ``python -m flash_cute.testing.fuzz``.

One trial in five is of 8 bits: e4m3 inputs, caches, and rounding to e4m3.

``--cases N --seed S`` selects trials, ``--seconds T`` is their limit of time. Each failure prints a
line: the command that repeats it, and its error. The exit status is 1 then. ``--json PATH`` writes
the failures.

``--systems`` tries the systems above the ops instead: layers, fp8 and its trainer, adaptive
precision, fusion, and ranks (``--systems ranks decode``: only these). Cases run in processes of
their own, in groups of ``--ranks`` sizes; one that takes longer than ``--seconds-a-case`` is killed
and counts as a failure.
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

from flash_cute.native import library
from flash_cute.testing import eight_bit_trials, systems
from flash_cute.testing.eight_bit_trials import AnyTrial
from flash_cute.testing.systems.runner import CASE_S, Runner
from flash_cute.testing.trials import draw

_COMMAND = "python -m flash_cute.testing.fuzz"
_CASES, _CASES_OF_SYSTEMS = 2000, 3000
_RANKS = (1, 2, 3)
_QUIET_S = 10.0  # between two lines of progress


@dataclass
class Tally:
    """The results of a run so far: a line for each failure, and `worst`, the largest error, as a
    fraction of its bound."""

    done: int = 0
    failures: list[str] = field(default_factory=list)
    worst: float = 0.0
    worst_trial: Any = None

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


def trials(seed: int, device: str) -> Iterator[AnyTrial]:
    """Trials that the device supports, one in 5 of 8 bits; equal seeds give equal ones."""
    for number in itertools.count():
        pick = random.Random(f"{seed}/{number}")
        trial = eight_bit_trials.draw(pick) if number % 5 == 4 else draw(pick)
        if trial.is_supported(device):
            yield trial


@dataclass(frozen=True)
class RunnableSystemTrial:
    """A trial of a system, in the processes of a runner."""

    trial: systems.SystemTrial
    runner: Runner

    def run(self, device: str) -> float:
        """The largest error, as a fraction of its bound. Raises AssertionError for a failure."""
        found = self.runner.run(self.trial)
        assert not found.failures, "; ".join(found.failures[:5])
        return found.worst

    def to_json(self) -> str:
        return self.trial.to_json()


def system_trials(
    seed: int, names: tuple[str, ...], ranks: tuple[int, ...], device: str
) -> Iterator[systems.SystemTrial]:
    """Trials of systems; equal seeds give equal ones."""
    for number in itertools.count():
        yield systems.draw(random.Random(f"{seed}/{number}"), names, ranks, device)


def fuzz(chosen: Iterable[Any], device: str, seconds: float, to: Progress) -> Tally:
    """Runs trials until they or the seconds are over, or the device fails."""
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


def _command(trial: Any, device: str) -> str:
    return f"{_COMMAND} --device {device} --case {shlex.quote(trial.to_json())}"


def _described(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, AssertionError) else f"{type(error).__name__}: {line}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; `chosen` are the trials that they ask for, `total` how many (None: no limit)."""
    options, parser = _arguments(argv)
    options.seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    try:
        if options.case is not None:
            options.total, options.chosen = 1, [_from_json(options.case)]
            return options
    except (ValueError, TypeError, AttributeError) as error:
        parser.error(f"--case {options.case}: {error}")
    default = _CASES if options.systems is None else _CASES_OF_SYSTEMS
    options.total = default if options.cases is None else options.cases
    if options.seconds is not None and options.cases is None:
        options.total = None
    every: Iterator[Any] = trials(options.seed, options.device)
    if options.systems is not None:
        names = tuple(options.systems) or systems.NAMES
        every = system_trials(options.seed, names, tuple(options.ranks), options.device)
    options.chosen = itertools.islice(every, options.total)
    return options


def _arguments(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog=_COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_cuda = library.can_use_cuda()
    parser.add_argument(
        "--cases", type=int,
        help=f"default {_CASES}, of systems {_CASES_OF_SYSTEMS}, with --seconds no limit",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, help="of the cases; default: a fresh one, printed")
    parser.add_argument("--seconds", type=float, help="start no case after that time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_cuda else "cpu")
    parser.add_argument("--case", metavar="JSON", help="one case, as a failure printed it")
    parser.add_argument("--json", type=Path, help="file for the seed, the tally and the failures")
    parser.add_argument(
        "--systems", nargs="*", choices=systems.NAMES, metavar="NAME",
        help=f"all, or some of {', '.join(systems.NAMES)}",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=int, nargs="+", metavar="N",
        help="of systems: sizes of groups, on CUDA a GPU a rank; default 1 2 3, on CUDA 1 and all",
    )  # fmt: skip
    parser.add_argument(
        "--seconds-a-case", type=float, default=CASE_S, help=f"of systems; default {CASE_S:.0f}"
    )
    options = parser.parse_args(argv)
    if options.device == "cuda" and not on_cuda:
        parser.error("--device cuda: no CUDA device, or a library without CUDA kernels")
    gpus = torch.cuda.device_count()
    if options.ranks is None:
        options.ranks = sorted({1, gpus}) if options.device == "cuda" else _RANKS
    most = gpus if options.device == "cuda" else 64
    if not 1 <= min(options.ranks) <= max(options.ranks) <= most:
        parser.error(f"--ranks {options.ranks}: expected 1 to {most}, a GPU a rank on CUDA")
    return options, parser


def _from_json(text: str) -> Any:
    """A trial of the ops, or of a system, which the field "system" names."""
    fields: Any = json.loads(text)
    if isinstance(fields, dict) and "system" in fields:
        return systems.SystemTrial.from_json(text)
    return eight_bit_trials.from_json(text)


def main(argv: list[str] | None = None) -> int:
    """The command; 1 if any trial failed."""
    options = parse(argv)
    seconds = float("inf") if options.seconds is None else options.seconds
    started = time.monotonic()
    with progress(options.total) as to, Runner(options.device, options.seconds_a_case) as runner:
        chosen = (
            RunnableSystemTrial(trial, runner) if isinstance(trial, systems.SystemTrial) else trial
            for trial in options.chosen
        )  # fmt: skip
        tally = fuzz(chosen, options.device, seconds, to)
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
