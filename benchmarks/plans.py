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
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch

from flash_cute import kernels

from . import raw_ops, report, timing
from .random import prepare, timed
from .random_cases import RandomCase, draw
from .rivals import OURS, Work
from .suites import Inputs

GROUPS = ("dense-forward", "packed-forward", "decode")
NEAR = 1.05  # a pick is good if it takes at most so much of the fastest plan's time


def problem_of(case: RandomCase) -> kernels.Problem:
    """The problem of the case's call, as far as the host knows it."""
    sizes: dict[str, Any] = {"heads": case.heads, "heads_k": case.heads_k, "head_dim": case.dim}
    masks: dict[str, Any] = {"causal": case.mask != "full"}
    batch, longest, total = len(case.lengths), max(case.lengths), sum(case.lengths)
    if case.mask == "window1024":
        masks["window_size"] = (1024, 0)
    if case.group == "decode":
        return kernels.Problem(
            "decode", batch=batch, seqlen_q=case.queries, seqlen_k=case.capacity, lengths=True,
            **sizes, **masks,
        )  # fmt: skip
    packed: dict[str, Any] = {"varlen": True, "total_q": total, "total_k": total}
    return kernels.Problem(
        "bwd" if case.direction == "bwd" else "fwd", batch=batch, seqlen_q=longest,
        **sizes, **masks, **(packed if case.group.startswith("packed") else {}),
    )  # fmt: skip


class Limit(NamedTuple):
    """A plan other than the one that a call takes: of this kernel, with so many splits of the keys
    or (None) as many as its own estimate says."""

    id: str
    num_splits: int | None = None

    def __str__(self) -> str:
        return self.id if self.num_splits is None else f"{self.id} num_splits={self.num_splits}"

    def scope(self) -> AbstractContextManager[None]:
        return kernels.only(self.id, num_splits=self.num_splits)

    def plan(self, problem: kernels.Problem, gpu: int | str) -> kernels.Plan | None:
        try:
            with self.scope():
                return kernels.plan(problem, gpu)
        except RuntimeError:  # it does not fit
            return None

    def call(self, case: RandomCase, x: Inputs) -> Work:
        return replace(raw_ops.flash_cute(case, x), scope=self.scope)


def others(problem: kernels.Problem, gpu: int | str) -> list[Limit]:
    """The limits under which a call takes another plan: decode's kernels and Hopper's plain ones of
    the least head dim that fits."""
    taken = kernels.plan(problem, gpu)
    fitting = [
        (kernel, own)
        for kernel in kernels.kernels()
        if kernel.op == "decode" or (kernel.arch, kernel.tier) == (90, "plain")
        if (own := Limit(kernel.id).plan(problem, gpu)) is not None
    ]
    found = []
    for kernel, own in fitting:
        if kernel.head_dim > min(k.head_dim for k, _ in fitting if k.op == kernel.op):
            continue
        if kernel.id != taken.kernel.id:
            found.append(Limit(kernel.id))
        n = own.num_splits
        numbers = set() if kernel.op == "decode" else {1, n // 2, n * 3 // 4, n * 3 // 2, n * 2}
        limits = [Limit(kernel.id, splits) for splits in sorted(numbers - {n, 0})]
        found += [limit for limit in limits if limit.plan(problem, gpu) is not None]
    return found


def measure(case: RandomCase, device: torch.device, rounds: int) -> dict[str, Any]:
    """The row of a case: microseconds of each plan, once more if the pick was not near the best."""
    problem, gpu = problem_of(case), device.index or 0
    limits = {str(limit): limit for limit in others(problem, gpu)}
    calls = {OURS: raw_ops.flash_cute} | {name: limit.call for name, limit in limits.items()}
    row: dict[str, Any] = {"case": str(case), "group": case.group, "ratio": None}
    row["plans"] = {OURS: str(kernels.plan(problem, gpu))}
    row["plans"] |= {name: str(limit.plan(problem, gpu)) for name, limit in limits.items()}
    works, row["notes"] = prepare(case, calls, device, case.seed % 2**31)
    if OURS not in works:
        return row
    for _ in range(2):
        row["us"] = timed(works, device, rounds, row["notes"])
        row["best"] = min(row["us"], key=row["us"].__getitem__)
        row["ratio"] = row["us"][OURS] / row["us"][row["best"]]
        if row["ratio"] <= NEAR:
            break
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
    """The command; 1 if a result was wrong, 2 without a GPU, else 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.plans", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the cases; default: a fresh one, recorded")
    parser.add_argument("--cases", type=int, default=300, help="in all groups together")
    parser.add_argument("--rounds", type=int, default=3, help="of each run, whose median counts")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no case after them")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args(argv)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    try:
        device = timing.use_device("cuda")
    except ValueError as error:
        print(f"{error}, whose times these are", file=sys.stderr)
        return 2
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    for i in range(options.cases):
        if time.monotonic() - started > options.minutes * 60:
            break
        case = draw(GROUPS[i % len(GROUPS)], seed, i // len(GROUPS))
        rows.append(measure(case, device, options.rounds))
        row = rows[-1]
        report.say(f"{case}: {row['ratio'] and round(row['ratio'], 2)} {row.get('best', '')}")
        result = {"seed": seed, "near": NEAR, "summary": summary(rows), "rows": rows}
        if options.json:
            report.save(result, options.json)
        torch.cuda.empty_cache()
    for group, found in summary(rows).items():
        print(
            f"{group}: {found['near']:.0%} of {found['cases']:.0f} picks within {NEAR - 1:.0%} of "
            f"the best plan, geomean {found['geomean']:.3f}, most {found['most']:.2f}"
        )
    return int(any(OURS in row["notes"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
