"""Speed where nobody tuned: `python -m benchmarks.random --seed S --json F`.

Random cases of attention, op beside op in GPU time, ours and the best rival of each; without
--seed they are fresh. --case repeats one, --dry-run names them.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from flash_cute.reference import attention

from . import report, timing
from .random_cases import GROUPS, RandomCase, draw, make_inputs
from .raw_ops import CALLS
from .rivals import OURS, Work, captured, describe, load, without_folders
from .suites import Inputs
from .truth import RELATIVE_LIMITS

MISS = 0.97  # a lower ratio, of the best rival's time and ours
CLASSES = {"under 100 us": (0, 100), "100-300 us": (100, 300), "over 300 us": (300, float("inf"))}
WORST = 20

_ROUND_MS = 5.0
_CALLS = 8  # of a graph, of short calls, each of which has a cache of its own
_SHORT_FLOPS = 1e11
_BYTES_OF_CACHES = 2**30
_SCORES_IN_FP64 = 2**25  # of a case that is compared with fp64
_LIMIT = RELATIVE_LIMITS["bf16"]

Call = Callable[[RandomCase, Inputs], Work]


def truth(case: RandomCase, x: Inputs) -> tuple[torch.Tensor, ...]:
    """The fp64 results, in the ops' layout."""
    tensors, is_packed = (x.q, x.k, x.v, x.dout), case.group.startswith("packed")
    options = {n: x.options[n] for n in ("is_causal", "window_size_left") if n in x.options}
    found = []
    for i, length in enumerate(case.lengths):
        start = sum(case.lengths[:i])
        rows = slice(start, start + length) if is_packed else i
        q, k, v, dout = (t[rows].double().view(1, -1, *t.shape[-2:]) for t in tensors)
        leaves = [q, k[:, :length], v[:, :length]]
        for leaf in leaves:
            leaf.requires_grad_(case.direction == "bwd")
        out = attention(*leaves, **options).out
        whole = (out,) if case.direction == "fwd" else torch.autograd.grad(out, leaves, dout)
        found.append(whole)
    return tuple(
        torch.cat(t, 1)[0] if is_packed else torch.cat(t) for t in zip(*found, strict=True)
    )


def _error(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative error of the results; nan if any is not finite."""
    errors = [
        (result.double() - true.double()).norm() / true.double().norm().clamp_min(1e-30)
        for result, true in zip(results, expected, strict=True)
    ]
    return float(torch.stack(errors).max())


def faults(
    case: RandomCase, x: Inputs, results: Mapping[str, Sequence[torch.Tensor]]
) -> dict[str, str]:
    """What is wrong with whose results: those of small cases are compared with fp64, those of
    others with ours, and ours are wrong if they are like nobody's."""
    expected: Sequence[torch.Tensor]
    scores = case.heads * sum(s.seqlen_q * s.seqlen_k for s in case.sequences)
    if scores <= _SCORES_IN_FP64:
        expected, limit, what, compared = truth(case, x), _LIMIT, "relative error", [*results]
    else:
        expected, limit, what = results[OURS], 2 * _LIMIT, "unlike ours, by"
        compared = [name for name in results if name != OURS]
    errors = {name: _error(results[name], expected) for name in compared}
    found = {n: f"{what} {error:.2g}" for n, error in errors.items() if not error <= limit}
    if compared and len(found) == len(compared):
        found[OURS] = found.get(OURS, "unlike all rivals")
    return found


def prepare(
    case: RandomCase, calls: Mapping[str, Call], device: torch.device, seed: int
) -> tuple[dict[str, Work], dict[str, str]]:
    """The candidates to time, by name, and notes: why one is left out, or is not captured."""
    inputs = [make_inputs(case, device, seed)]
    if case.group == "decode":  # else L2 would keep the cache
        count = min(_CALLS, max(1, _BYTES_OF_CACHES // case.bytes))
        others = (make_inputs(case, device, seed + i) for i in range(1, count))
        inputs += [replace(inputs[0], k=x.k, v=x.v) for x in others]
    works: dict[str, Work] = {}
    notes: dict[str, str] = {}
    results = {}
    for name, call in calls.items():
        try:
            made = [call(case, x) for x in inputs]
            works[name], notes[name] = (
                _replayed(made, case) if device.type == "cuda" else (made[0], "")
            )
            results[name] = works[name].results(works[name].run())
        except Exception as error:
            works.pop(name, None)
            notes[name] = describe(error)
    wrong = faults(case, inputs[0], results) if OURS in works else {}
    works = {name: work for name, work in works.items() if name not in wrong}
    return works, {name: note for name, note in (notes | wrong).items() if note}


def _replayed(works: list[Work], case: RandomCase) -> tuple[Work, str]:
    """A CUDA graph; the first work and why, if it cannot be captured."""
    is_long = case.flops > _SHORT_FLOPS and case.group != "decode"
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):  # captures that fail leave another
            return captured(works, 1 if is_long else _CALLS), ""
    except Exception as error:
        return works[0], f"without a CUDA graph: {describe(error)}"


def measure(
    case: RandomCase, calls: Mapping[str, Call], device: torch.device, seed: int, rounds: int
) -> dict[str, Any]:
    """The row of one case: microseconds of each run, one more if the first one missed.

    The last run counts, so that noise is no miss.
    """
    row: dict[str, Any] = {"case": str(case), "group": case.group, "dim": case.dim, "ratio": None}
    row |= {"runs": [], "notes": {}}
    try:
        works, row["notes"] = prepare(case, calls, device, seed)
        if OURS not in works:
            return row
        for _ in range(2):
            us = timed(works, device, rounds, row["notes"])
            row["runs"].append(us)
            rivals = [name for name in us if name != OURS]
            if OURS not in us or not rivals:
                row["ratio"] = None
                break
            row["rival"] = min(rivals, key=us.__getitem__)
            row["rival_us"], row["us"] = us[row["rival"]], us[OURS]
            row["ratio"] = row["rival_us"] / row["us"]
            if row["ratio"] >= MISS:
                break
    except Exception as error:
        row |= {"ratio": None, "runs": [], "notes": {OURS: failure(error)}}
    return row


def failure(error: Exception) -> str:
    """The note of a case that an error ended."""
    return f"the case could not be measured: {describe(error)}"


def timed(
    works: Mapping[str, Work], device: torch.device, rounds: int, notes: dict[str, str]
) -> dict[str, float]:
    monitor = timing.Monitor(torch.device("cpu"))  # a thread that reads would disturb short calls
    turns = timing.interleave(works, rounds, _ROUND_MS, device, monitor)
    notes |= {name: turn.failure for name, turn in turns.items() if turn.failure}
    return {name: turn.median_ms * 1e3 for name, turn in turns.items() if not turn.failure}


def statistics(rows: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Of the ratios: how many, their geometric mean, the least, and the share that is no miss."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    if not ratios:
        return None
    share = sum(ratio >= MISS for ratio in ratios) / len(ratios)
    return {
        "cases": len(ratios), "geomean": geometric_mean(ratios), "least": min(ratios),
        "share": share,
    }  # fmt: skip


def in_class(rows: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The rows whose best rival takes so long."""
    least, most = CLASSES[name]
    return [r for r in rows if r["ratio"] is not None and least <= r["rival_us"] < most]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics by group and class, of the longest class by group and head dim, and the worst."""
    *_, longest = CLASSES
    groups = {g: of_g for g in GROUPS if (of_g := [row for row in rows if row["group"] == g])}
    dims = sorted({row["dim"] for row in in_class(rows, longest)})
    known = [row for row in rows if row["ratio"] is not None]
    return {
        "classes": {
            g: {c: statistics(in_class(of_g, c)) for c in CLASSES} for g, of_g in groups.items()
        },
        "dims": {
            d: {
                g: statistics(row for row in in_class(of_g, longest) if row["dim"] == d)
                for g, of_g in groups.items()
            }
            for d in dims
        },
        "worst": sorted(known, key=lambda row: row["ratio"])[:WORST],
    }


def _cell(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "-"
    text = f"{found['geomean']:.2f}, least {found['least']:.2f}, {found['share']:.0%} of "
    return text + f"{found['cases']:.0f}"


def _table(corner: str, rows: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    columns = next(iter(rows.values()), {})
    lines = [[corner, *columns], ["---"] * (1 + len(columns))]
    lines += [[str(name), *map(_cell, cells.values())] for name, cells in rows.items()]
    return ["| " + " | ".join(line) + " |" for line in lines]


def markdown(result: Mapping[str, Any]) -> str:
    """The report: of each class the geometric mean of best rival / ours, the least, and the share
    that is no miss."""
    found = result["summary"]
    where, libraries = result["machine"]["device"], result["versions"]
    lines = [f"{where}. " + ", ".join(f"{n} {v}" for n, v in libraries.items() if v), ""]
    lines += [f"`{result['command']}`, seed {result['settings']['seed']}"]
    if found["worst"]:
        *_, longest = CLASSES
        lines += ["", *_table("best rival", found["classes"])]
        lines += ["", *_table(f"head dim, {longest}", found["dims"])] if found["dims"] else []
        lines += ["", f"The worst of {len(result['rows'])} cases:"]
        lines += [f'{_line(row)}: --case "{row["case"]}"' for row in found["worst"]]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        for name, reason in row["notes"].items():
            reasons.setdefault((name, reason), []).append(row["case"])
    lines += [""] if reasons else []
    for (name, reason), cases in reasons.items():
        lines.append(f"{name}: {reason} ({len(cases)} cases, first {cases[0]})")
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        us = "".join(f", {us:.1f} us" for us in row["runs"][-1].values()) if row["runs"] else ""
        return f"no ratio{us}"
    again = " again" if len(row["runs"]) > 1 else ""
    return f"{row['ratio']:.2f}{again}, {row['us']:.1f} us, {row['rival']} {row['rival_us']:.1f}"


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measures the cases until the time is over; the JSON file is complete after each."""
    started = time.monotonic()
    candidates, missing = load([OURS, *options.rivals], device)
    for name, reason in missing.items():
        report.say(f"{name} is missing: {reason}")
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.random {without_folders(shlex.join(options.argv))}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": report.machine(device, timing.Monitor(device)),
        "versions": report.versions({n: c.version for n, c in candidates.items()}),
        "settings": {name: getattr(options, name) for name in ("seed", "rounds", "minutes")},
        "missing": missing,
        "rows": rows,
        "summary": summary(rows),
    }
    calls = {name: CALLS[name] for name in candidates}
    for case in options.cases:
        if options.minutes is not None and time.monotonic() - started > options.minutes * 60:
            break
        rows.append(measure(case, calls, device, case.seed % 2**31, options.rounds))
        report.say(f"{case}: {_line(rows[-1])}")
        result["summary"] = summary(rows)
        if options.json:
            report.save(result, options.json)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, with the cases; such as make no sense end the program."""
    parser = argparse.ArgumentParser(prog="benchmarks.random", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the cases; default: a fresh one, recorded")
    parser.add_argument("--cases", type=int, default=500, help="in all groups together")
    parser.add_argument("--groups", default=",".join(GROUPS), help="comma-separated")
    parser.add_argument("--case", help="measure the case of this name alone")
    rivals = [name for name in CALLS if name != OURS]
    parser.add_argument("--rivals", default=",".join(rivals), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="of each run, whose median counts")
    parser.add_argument("--minutes", type=float, help="begin no case after them")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N or cpu")
    parser.add_argument("--dry-run", action="store_true", help="print the cases, measure nothing")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args(argv)
    options.argv = argv
    groups, options.rivals = (
        [name for name in names.split(",") if name] for names in (options.groups, options.rivals)
    )
    for given, known in ((groups, GROUPS), (options.rivals, rivals)):
        if unknown := {*given} - {*known}:
            parser.error(f"unknown {sorted(unknown)}, known: {', '.join(known)}")
    if options.rounds < 1 or options.cases < 1 or not groups:
        parser.error("a round, a case and a group are the least")
    options.seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    turns = [divmod(i, len(groups)) for i in range(options.cases)]
    options.cases = [draw(groups[turn], options.seed, index) for index, turn in turns]
    try:
        options.cases = [RandomCase.parse(options.case)] if options.case else options.cases
    except ValueError as error:
        parser.error(str(error))
    return options


def main(argv: list[str] | None = None) -> int:
    """The command; 1 if a result of flash_cute was wrong or is missing, 2 without a GPU, else 0."""
    options = parse(sys.argv[1:] if argv is None else argv)
    if options.dry_run:
        print(f"seed {options.seed}:")
        print(*options.cases, sep="\n")
        return 0
    try:
        device = timing.use_device(options.device)
    except ValueError as error:
        print(f"{error}, whose times these are; --dry-run prints the cases", file=sys.stderr)
        return 2
    result = run(options, device)
    print(markdown(result), end="")
    return int(any(OURS not in us for row in result["rows"] for us in row["runs"] or [{}]))


if __name__ == "__main__":
    sys.exit(main())
