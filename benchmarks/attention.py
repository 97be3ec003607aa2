"""Measures attention side by side: `python -m benchmarks.attention --suite quick --json F`."""

from __future__ import annotations

import argparse
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flash_cute.hardware import available_memory

from . import report, timing
from .rivals import (
    LOADERS,
    OURS,
    Candidate,
    Work,
    captured,
    describe,
    load,
    scores_bytes,
    without_folders,
)
from .suites import SUITES, Case, Inputs, make_inputs
from .truth import Truth, check, reference

_GRADIENTS = ("dq", "dk", "dv")
_BYTES_OF_CACHES = 8 << 30
_SHARE_OF_MEMORY = {"cpu": 0.1, "cuda": 0.8}  # of what is free, for one candidate
_WITHOUT = " without the feature"
_OTHERS, _IS_OTHER = f"{OURS}:PART, NAME=LIBRARY", rf"{OURS}:|(?!{OURS}=)\w+="


@dataclass(frozen=True)
class Session:
    """What all cases of a run share."""

    candidates: dict[str, Candidate]
    device: torch.device
    monitor: timing.Monitor
    rounds: int
    round_ms: float
    caches: int = 1  # of which calls of a graph read one each by turns


def prepare(
    candidate: Candidate,
    case: Case,
    x: Inputs,
    direction: str,
    truths: list[Truth],
    others: Sequence[Inputs] = (),
) -> tuple[dict[str, Any], list[Work]]:
    """A candidate's entry in the report after one checked call, and the work to time if right.

    For a case with a feature, the one that it is measured beside is the second work. Calls of a
    graph take x and the others by turns.
    """
    try:
        if too_much := _too_much(candidate, case, direction, x.q.device):
            return {"status": "left out", "message": too_much}, []
        _poison(x)
        make = candidate.forward if direction == "fwd" else candidate.backward
        brief = case.brief and x.q.is_cuda
        kept = partial(captured, calls=case.calls_a_graph) if brief else lambda works: works[0]
        work = kept([make(case, inputs) for inputs in (x, *others)])
        with work.scope():
            results = work.results(work.run())
        names = ("out",) if direction == "fwd" else _GRADIENTS
        named = dict(zip(names, results, strict=True))
        errors, fault = check(case, named, truths if work.comparable else None, work.slack)
        works = [work]
        if case.feature:
            works.append(kept([make(case.beside, replace(i, options={})) for i in (x, *others)]))
    except NotImplementedError as error:
        return {"status": "unsupported", "message": describe(error)}, []
    except Exception as error:
        return {"status": "failed", "message": describe(error)}, []
    entry = {"status": "wrong" if fault else "ok", "message": fault, "error": errors}
    return entry, [] if fault else works


def _too_much(candidate: Candidate, case: Case, direction: str, device: torch.device) -> str:
    """Why a candidate does not get the memory that it needs; "" if it does."""
    needed = scores_bytes(candidate, case, direction)
    given = int(available_memory(device) * _SHARE_OF_MEMORY[device.type]) if needed else 0
    if needed <= given:
        return ""
    return f"needs {needed / 1e9:.1f} GB for its scores, and gets {given / 1e9:.1f} GB here"


def _poison(x: Inputs) -> None:
    """Leaves NaN in the memory that the next outputs get: a result left over from another
    candidate must not pass for one's own."""
    outputs = (x.dout, x.q, x.k, x.v)  # shaped like out, dq, dk, dv
    blocks = [torch.full(t.shape, torch.nan, device=t.device, dtype=x.dout.dtype) for t in outputs]
    del blocks


def measure(
    session: Session,
    case: Case,
    x: Inputs,
    direction: str,
    truths: list[Truth],
    others: Sequence[Inputs] = (),
) -> dict[str, Any]:
    """One row of the report: every candidate on one case in one direction.

    A case with a feature is measured beside another, most often without it, in the same rounds.
    """
    entries: dict[str, dict[str, Any]] = {}
    works: dict[str, Work] = {}
    for name, candidate in session.candidates.items():
        entries[name], prepared = prepare(candidate, case, x, direction, truths, others)
        works.update(zip((name, name + _WITHOUT), prepared, strict=False))
    measured = timing.interleave(
        works, session.rounds, session.round_ms, session.device, session.monitor
    )
    for name, entry in entries.items():
        turn, without = measured.get(name), measured.get(name + _WITHOUT)
        if turn is None:
            continue
        if failure := turn.failure or (without.failure if without else ""):
            entry.update(status="failed", message=failure)
            continue
        entry.update(_timed(case, direction, turn))
        if without is not None:
            entry["feature_speed"] = without.median_ms / turn.median_ms
    return _row(case, direction, entries)


def _timed(case: Case, direction: str, turn: timing.Measured) -> dict[str, Any]:
    def middle(values: list[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return median(known) if known else None

    return {
        "calls": turn.calls,
        "rounds": [asdict(r) for r in turn.rounds],
        "median_ms": turn.median_ms,
        "spread": turn.spread,
        "rate": case.rate(direction, turn.median_ms),
        "clock_mhz": middle([r.clock_mhz for r in turn.rounds]),
        "power_w": middle([r.power_w for r in turn.rounds]),
    }


def _row(case: Case, direction: str, entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    best, ratio = report.compare(entries)
    return {
        "case": str(case),
        "direction": direction,
        "metric": case.metric,
        "candidates": entries,
        "best_rival": best,
        "ratio": ratio,
    }


def measure_case(
    session: Session, case: Case, directions: Sequence[str], seed: int
) -> list[dict[str, Any]]:
    """The rows of one case, one a direction; a failure outside a candidate fails all of them."""
    try:
        x = make_inputs(case, session.device, seed)
        truths = reference(case, x, "bwd" in directions, seed)
        others = _other_caches(session, case, x, seed)
    except Exception as error:
        entry = {"status": "failed", "message": f"the case could not be set up: {describe(error)}"}
        entries = {name: dict(entry) for name in session.candidates}
        return [_row(case, direction, entries) for direction in directions]
    return [measure(session, case, x, direction, truths, others) for direction in directions]


def _other_caches(session: Session, case: Case, x: Inputs, seed: int) -> list[Inputs]:
    """Further keys and values for the same queries, as many as asked for and as find room."""
    if not case.cached:
        return []
    count = min(session.caches, max(2, _BYTES_OF_CACHES // case.kv_bytes()), case.calls_a_graph)
    made = (make_inputs(case, session.device, (seed + i) % 2**31) for i in range(1, count))
    return [replace(x, k=other.k, v=other.v) for other in made]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures what the options ask for; the JSON file is complete after every case."""
    device = options.device
    candidates, missing = load([OURS, *options.rivals], device, options.kernels)
    monitor = timing.Monitor(device)
    session = Session(candidates, device, monitor, options.rounds, options.round_ms, options.caches)
    result: dict[str, Any] = {
        "command": "python -m benchmarks.attention " + _without_folders(options),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": report.machine(device, monitor),
        "versions": report.versions({n: c.version for n, c in candidates.items()}),
        "settings": {
            "suite": options.suite,
            "mode": "sustained" if options.sustained else "bursts",
            "rounds": options.rounds,
            "round_ms": options.round_ms,
            "seed": options.seed,
            "caches": options.caches,
        },
        "missing": missing,
        "results": [],
    }
    for case, directions in options.cases:
        rows = measure_case(session, case, directions, (options.seed + case.seed) % 2**31)
        result["results"] += rows
        for row in rows:
            report.say(report.line(row, in_ms=device.type != "cuda"))
        if options.json:
            report.save(result, options.json)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def _without_folders(options: argparse.Namespace) -> str:
    """The arguments, of output files the names alone."""
    outputs = {path for path in (options.json, options.plot) if path is not None}
    words = []
    for word in options.argv:
        name, equals, value = word.rpartition("=")
        value = Path(value).name if Path(value) in outputs else value
        words.append(without_folders(name + equals + value))
    return shlex.join(words)


def parse(argv: list[str]) -> argparse.Namespace:
    """What `read` returns; options that make no sense end the program."""
    try:
        return read(argv)
    except (ValueError, re.error) as error:
        _parser().error(str(error))


def read(argv: list[str]) -> argparse.Namespace:
    """The options, with `cases`: the suite's (case, directions) that are left to measure.

    Raises ValueError or re.error for values that make no sense.
    """
    options = _parser().parse_args(argv)
    options.argv = argv
    _complete(options)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.attention", description=__doc__)
    parser.add_argument("--suite", choices=sorted(SUITES), default="quick")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        help="measure this case, and others so named, instead",
    )
    parser.add_argument(
        "--rivals",
        help=f"comma-separated, of {', '.join(sorted(LOADERS))}, {_OTHERS}",
    )
    parser.add_argument("--kernels", default="", help="flash_cute with kernels of this in their id")
    parser.add_argument("--direction", default="fwd,bwd", help="fwd, bwd or fwd,bwd (default)")
    parser.add_argument("--match", default="", help="regular expression: measure these cases only")
    parser.add_argument("--rounds", type=int, help="default 5, sustained 7 (its least)")
    parser.add_argument("--sustained", action="store_true", help="rounds of 0.3 s, not 50 ms")
    parser.add_argument(
        "--caches",
        type=int,
        default=8,
        help="of keys and values, of which calls of a graph read one each by turns (default: 8)",
    )
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N or cpu")
    parser.add_argument("--seed", type=int, help="of the inputs; default: a fresh one, recorded")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--plot", type=Path, help="write a plot to this file (needs matplotlib)")
    return parser


def _complete(options: argparse.Namespace) -> None:
    """Fills the defaults that depend on other options; ValueError for what makes no sense."""
    default_rivals = {"fp8": "fa3fp8", "smoke": "math", "features": "fa2"}
    rivals = options.rivals
    if rivals is None and options.case and options.device == "cpu":
        rivals = "sdpa,math"
    if rivals is None:
        rivals = default_rivals.get(options.suite, "cudnn,fa2,fa3,fa4")
    options.rivals = [n for n in rivals.split(",") if n]
    if unknown := [n for n in options.rivals if n not in LOADERS and not re.match(_IS_OTHER, n)]:
        raise ValueError(f"unknown rivals {unknown}, known: {sorted(LOADERS)}, {_OTHERS}")
    least = timing.SUSTAINED_ROUNDS if options.sustained else 1
    if options.rounds is None:
        options.rounds = timing.SUSTAINED_ROUNDS if options.sustained else 5
    if options.caches < 1:
        raise ValueError(f"--caches {options.caches}: expected 1 or more")
    if options.rounds < least:
        raise ValueError(f"--rounds {options.rounds}: at least {least} are needed")
    options.round_ms = timing.SUSTAINED_MS if options.sustained else timing.BURST_MS
    options.seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    wanted = options.direction.split(",")
    if not set(wanted) <= {"fwd", "bwd"}:
        raise ValueError(f"--direction {options.direction}: expected fwd, bwd or fwd,bwd")
    options.cases = [
        (case, directions)
        for case in [Case.parse(name) for name in options.case] or SUITES[options.suite]
        if re.search(options.match, str(case))
        and (directions := [d for d in case.directions if d in wanted])
    ]
    if not options.cases:
        raise ValueError("nothing to measure: no case has that match and direction")
    if options.plot and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    options.device = timing.use_device(options.device)


def main(argv: list[str] | None = None) -> int:
    """The command; 1 if a result of flash_cute was wrong or is missing, else 0."""
    return measured(parse(sys.argv[1:] if argv is None else argv))


def measured(options: argparse.Namespace) -> int:
    """Measures what was asked for and shows it; the status of `main`."""
    result = run(options)
    report.show(result)
    if options.plot:
        report.plot(result, options.plot)
    ours = [row["candidates"].get(OURS, {}) for row in result["results"]]
    return int(any(entry.get("status") not in ("ok", "unsupported") for entry in ours))


if __name__ == "__main__":
    sys.exit(main())
