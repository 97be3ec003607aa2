"""From measurements to few rules: a kernel by bucket, kept where other shapes gain by it too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flash_cute.kernels import Problem
from flash_cute.tuning.report import WORST, Gain, geomean, pays

REST = " | "  # what follows may be left out of a bucket


@dataclass(frozen=True)
class Measured:
    """A problem, and the median milliseconds of each kernel that can do it."""

    problem: Problem
    bucket: str
    default: str  # the kernel of the library's estimates
    times_ms: dict[str, float]

    @property
    def coarse(self) -> str:
        return self.bucket.partition(REST)[0]

    def speedup(self, kernel: str) -> float:
        """With a kernel; 1 where it cannot do the problem, as then the default is taken."""
        return self.times_ms[self.default] / self.times_ms.get(kernel, self.times_ms[self.default])


def derive(fitted: Sequence[Measured], validation: Sequence[Measured]) -> dict[str, str]:
    """Rules that pay (report.pays) on validation, and make nothing fitted slower than WORST.

    A coarse bucket gets a rule if several buckets in it were fitted. A bucket of its own does not
    repeat what the coarse one says.
    """
    rules: dict[str, str] = {}
    groups: dict[str, list[Measured]] = defaultdict(list)
    for measured in fitted:
        groups[measured.coarse].append(measured)
    for coarse, members in groups.items():
        checks = [x for x in validation if x.coarse == coarse]
        if len({x.bucket for x in members}) > 1 and (kernel := _best(members, checks)):
            rules[coarse] = kernel
        for bucket in dict.fromkeys(x.bucket for x in members):
            inside = [x for x in members if x.bucket == bucket]
            kernel = _best(inside, [x for x in checks if x.bucket == bucket])
            if kernel and kernel != rules.get(coarse):
                rules[bucket] = kernel
    return rules


def _best(fitted: Sequence[Measured], checks: Sequence[Measured]) -> str | None:
    ids = sorted({i for x in fitted for i in x.times_ms if i.startswith(x.problem.op)})
    safe = [i for i in ids if min(x.speedup(i) for x in fitted) >= WORST]
    if not safe:
        return None
    kernel = max(safe, key=lambda i: geomean(x.speedup(i) for x in fitted))
    return kernel if pays([x.speedup(kernel) for x in checks]) else None


def apply(rules: dict[str, str], measured: Measured) -> Gain:
    """What the rules do to a problem, as csrc/core/calibration.cpp applies them."""
    kernel = rules.get(measured.bucket) or rules.get(measured.coarse) or measured.default
    if kernel not in measured.times_ms:
        kernel = measured.default
    times = measured.times_ms
    return Gain(measured.problem, measured.default, kernel, times[measured.default], times[kernel])
