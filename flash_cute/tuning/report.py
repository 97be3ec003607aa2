"""The report of tuning: times before and after, on shapes that rules were not fitted to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_cute.kernels import Problem
from flash_cute.kernels.choice import Choice

LEAST_GAIN = 1.01  # the least geomean of speedups with which rules are written
WORST = 0.98  # the least speedup of any shape with which rules are written


@dataclass(frozen=True)
class Gain:
    """One shape with the default choice, and with the calibrated one."""

    problem: Problem
    before: Choice
    after: Choice
    before_ms: float
    after_ms: float

    @property
    def speedup(self) -> float:
        return self.before_ms / self.after_ms


def geomean(values: Iterable[float]) -> float:
    """1 if there is none."""
    logs = [math.log(x) for x in values]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def pays(speedups: Sequence[float]) -> bool:
    """Whether the geomean is at least LEAST_GAIN, and no speedup is below WORST."""
    return geomean(speedups) >= LEAST_GAIN and min(speedups, default=0.0) >= WORST


@dataclass(frozen=True)
class Report:
    """``rules`` are choices by bucket; ``gains`` are for shapes that they were not fitted to."""

    rules: dict[str, Choice]
    gains: tuple[Gain, ...]
    measured: int  # problems
    seconds: float  # that tuning took
    path: Path | None  # the written file; None if nothing was written
    not_written: str | None = None  # why nothing was written although it pays

    @property
    def geomean(self) -> float:
        return geomean(gain.speedup for gain in self.gains)

    @property
    def worst(self) -> float:
        return min((gain.speedup for gain in self.gains), default=1.0)

    @property
    def pays(self) -> bool:
        return pays([gain.speedup for gain in self.gains])

    def __str__(self) -> str:
        """Rules, then a line a shape, then geomeans, in milliseconds."""
        lines = [f"{bucket} = {self.rules[bucket]}" for bucket in sorted(self.rules)]
        lines = ["rules:", *(lines or ["none"]), "shapes that were not fitted:"]
        for gain in self.gains:
            same = "same choice" if gain.after == gain.before else f"{gain.before} -> {gain.after}"
            times = f"{gain.before_ms:.4f} -> {gain.after_ms:.4f} ms, {gain.speedup:.3f}x"
            lines.append(f"{gain.problem}: {times}, {same}")
        before = geomean(gain.before_ms for gain in self.gains)
        after = geomean(gain.after_ms for gain in self.gains)
        lines.append(
            f"geomean {before:.4f} -> {after:.4f} ms, {self.geomean:.3f}x; "
            f"worst {self.worst:.3f}x; {self.measured} problems measured in {self.seconds:.1f} s"
        )
        no_gain = f"it pays from {LEAST_GAIN}x on, with no shape below {WORST}x"
        lines.append(
            f"written to {self.path}" if self.path else
            f"nothing written: {self.not_written or no_gain}"
        )  # fmt: skip
        return "\n".join(lines)
