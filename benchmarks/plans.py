"""Whether the cost models pick the fastest plan: `python -m benchmarks.plans --seed S --json F`.

Random cases of forward and of decode; the plan that a call takes beside every other kernel that
fits and other numbers of splits, in GPU time. Seeds that nothing was fitted to are held out.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from flash_cute import kernels
from flash_cute.kernels.choice import Choice

from . import raw_ops, report, timing
from .random import Call, failure, prepare, timed
from .random_cases import RandomCase, draw
from .rivals import OURS
from .suites import FEATURES

GROUPS = ("dense-forward", "packed-forward", "decode")
NEAR = 1.05  # a pick is good if it takes at most so much of the fastest plan's time


def problem_of(case: RandomCase) -> kernels.Problem:
    """The problem of the case's call, as far as the host knows it."""
    left = FEATURES.get(case.mask, {}).get("window_size_left", -1)
    known: dict[str, Any] = {
        "batch": len(case.lengths), "heads": case.heads, "heads_k": case.heads_k,
        "head_dim": case.dim, "causal": case.mask != "full", "window_size": (left, -1),
    }  # fmt: skip
    if case.group == "decode":
        known |= {"seqlen_q": case.queries, "seqlen_k": case.capacity}
        return kernels.Problem("decode", lengths=True, **known)
    packed = case.group.startswith("packed")
    total = sum(case.lengths) if packed else None
    return kernels.Problem(
        seqlen_q=max(case.lengths), varlen=packed, total_q=total, total_k=total, **known
    )


def plan_of(choice: Choice, problem: kernels.Problem, gpu: int | str) -> kernels.Plan | None:
    """The plan of a call that may take this choice alone; None if it does not fit."""
    try:
        with kernels.only(choice.kernel, **choice.numbers):
            return kernels.plan(problem, gpu)
    except RuntimeError:
        return None


def others(problem: kernels.Problem, gpu: int | str) -> dict[Choice, kernels.Plan]:
    """The plans that a call does not take: of decode's kernels and Hopper's plain ones, of those
    with the least head dim that fits, also with other numbers of splits."""
    taken = kernels.plan(problem, gpu)
    fitting = {
        kernel: own
        for kernel in kernels.kernels()
        if kernel.op == "decode" or (kernel.arch, kernel.tier) == (90, "plain")
        if (own := plan_of(Choice(kernel.id), problem, gpu)) is not None
    }
    found: dict[Choice, kernels.Plan] = {}
    for kernel, own in fitting.items():
        if kernel.head_dim > min(other.head_dim for other in fitting if other.op == kernel.op):
            continue
        if kernel.id != taken.kernel.id:
            found[Choice(kernel.id)] = own
        n = own.num_splits
        numbers = set() if kernel.op == "decode" else {1, n // 2, n * 3 // 4, n * 3 // 2, n * 2}
        for number in sorted(numbers - {n, 0}):
            choice = Choice(kernel.id, num_splits=number)
            if (plan := plan_of(choice, problem, gpu)) is not None:
                found[choice] = plan
    return found


def measure(case: RandomCase, device: torch.device, rounds: int) -> dict[str, Any]:
    """The row of a case: microseconds of each plan, once more if the pick was not near the best."""

    def limited(choice: Choice) -> Call:
        scope = partial(kernels.only, choice.kernel, **choice.numbers)
        return lambda case, x: replace(raw_ops.flash_cute(case, x), scope=scope)

    problem, gpu = problem_of(case), device.index or 0
    found = others(problem, gpu)
    calls = {OURS: raw_ops.flash_cute} | {str(choice): limited(choice) for choice in found}
    row: dict[str, Any] = {"case": str(case), "group": case.group, "ratio": None, "us": {}}
    row["plans"] = {OURS: str(kernels.plan(problem, gpu))}
    row["plans"] |= {str(choice): str(plan) for choice, plan in found.items()}
    try:
        works, row["notes"] = prepare(case, calls, device, case.seed % 2**31)
        for _ in range(2):
            row["us"] = timed(works, device, rounds, row["notes"]) if OURS in works else {}
            if OURS not in row["us"]:
                row["ratio"] = None
                break
            row["best"] = min(row["us"], key=row["us"].__getitem__)
            row["ratio"] = row["us"][OURS] / row["us"][row["best"]]
            if row["ratio"] <= NEAR:
                break
    except Exception as error:
        row |= {"ratio": None, "us": {}, "notes": {OURS: failure(error)}}
    return row


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By group: the cases, the share of good picks, the mean and the largest time over the best."""
    found = {}
    for group in GROUPS:
        ratios = [r["ratio"] for r in rows if r["group"] == group and r["ratio"] is not None]
        if ratios:
            found[group] = {
                "cases": len(ratios),
                "near": sum(ratio <= NEAR for ratio in ratios) / len(ratios),
                "geomean": geometric_mean(ratios),
                "most": max(ratios),
            }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if a result of the pick was wrong or is missing, 2 without a GPU, else 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.plans", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the cases; default: a fresh one, recorded")
    parser.add_argument("--cases", type=int, default=300, help="in all groups together")
    parser.add_argument("--rounds", type=int, default=3, help="of each run, whose median counts")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no case after them")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.cases < 1:
        parser.error("a round and a case are the least")
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    try:
        device = timing.use_device("cuda")
    except ValueError as error:
        print(f"{error}, whose times these are", file=sys.stderr)
        return 2
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "machine": report.machine(device, timing.Monitor(device)),
        "versions": report.versions({}),
        "settings": {"seed": seed, "rounds": options.rounds, "near": NEAR},
        "rows": rows,
    }
    for i in range(options.cases):
        if time.monotonic() - started > options.minutes * 60:
            break
        case = draw(GROUPS[i % len(GROUPS)], seed, i // len(GROUPS))
        rows.append(measure(case, device, options.rounds))
        ratio = rows[-1]["ratio"]
        report.say(f"{case}: " + (f"{ratio:.2f} {rows[-1]['best']}" if ratio else "no ratio"))
        result["summary"] = summary(rows)
        if options.json:
            report.save(result, options.json)
        torch.cuda.empty_cache()
    print(f"{result['machine']['device']}, seed {seed}:")
    for group, found in summary(rows).items():
        print(
            f"{group}: {found['near']:.0%} of {found['cases']:.0f} picks within {NEAR - 1:.0%} of "
            f"the best plan, geomean {found['geomean']:.3f}, most {found['most']:.2f}"
        )
    return int(any(row["ratio"] is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
