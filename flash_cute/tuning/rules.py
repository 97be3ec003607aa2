"""Derives rules, a choice by bucket, from measurements; kept if other shapes gain by them, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flash_cute.kernels import Problem
from flash_cute.kernels.choice import Choice
from flash_cute.tuning.report import LEAST_GAIN, WORST, Gain, geomean, pays

REST = " | "  # a coarse bucket ends before it


@dataclass(frozen=True)
class Measured:
    """A problem, and the median milliseconds of each choice that supports it."""

    problem: Problem
    bucket: str
    default: Choice  # of the library's estimates
    times_ms: dict[Choice, float]

    @property
    def coarse(self) -> str:
        return self.bucket.partition(REST)[0]

    def taken(self, choice: Choice) -> Choice:
        """The effective choice of a rule: the kernel with its own estimates if its numbers are not
        possible, the default if the kernel does not support the problem."""
        return next(x for x in (choice, Choice(choice.kernel), self.default) if x in self.times_ms)

    def speedup(self, choice: Choice) -> float:
        return self.times_ms[self.default] / self.times_ms[self.taken(choice)]


def derive(fitted: Sequence[Measured], validation: Sequence[Measured]) -> dict[str, Choice]:
    """Rules that pay (report.pays) on validation, and slow no fitted problem down below WORST.

    A coarse bucket gets a rule if several buckets in it were fitted. A full bucket gets none if it
    would repeat the coarse one's.
    """
    rules: dict[str, Choice] = {}
    groups: dict[str, list[Measured]] = defaultdict(list)
    for measured in fitted:
        groups[measured.coarse].append(measured)
    for coarse, members in groups.items():
        checks = [x for x in validation if x.coarse == coarse]
        if len({x.bucket for x in members}) > 1 and (choice := _best(members, checks)):
            rules[coarse] = choice
        for bucket in dict.fromkeys(x.bucket for x in members):
            inside = [x for x in members if x.bucket == bucket]
            choice = _best(inside, [x for x in checks if x.bucket == bucket])
            if choice and choice != rules.get(coarse):
                rules[bucket] = choice
    return rules


def _best(fitted: Sequence[Measured], checks: Sequence[Measured]) -> Choice | None:
    """The best choice; one with numbers must gain LEAST_GAIN over the estimates, which suit more
    calls."""
    choices = {c for x in fitted for c in x.times_ms if c.kernel.startswith(x.problem.op)}
    gains = {
        c: geomean(x.speedup(c) for x in fitted) / (LEAST_GAIN if c.numbers else 1)
        for c in sorted(choices, key=str)
        if min(x.speedup(c) for x in fitted) >= WORST
    }
    if not gains:
        return None
    choice = max(gains, key=gains.__getitem__)
    return choice if pays([x.speedup(choice) for x in checks]) else None


def apply(rules: dict[str, Choice], measured: Measured) -> Gain:
    """The choice of the rules for a problem, applied as in csrc/core/calibration.cpp."""
    rule = rules.get(measured.bucket) or rules.get(measured.coarse) or measured.default
    choice, times = measured.taken(rule), measured.times_ms
    return Gain(measured.problem, measured.default, choice, times[measured.default], times[choice])
