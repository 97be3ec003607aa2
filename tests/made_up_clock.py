"""The tuner with a made-up clock: a cost model in place of a GPU."""

from __future__ import annotations

import random

import flash_cute
from flash_cute import kernels
from flash_cute.kernels import Problem

SHAPES = [
    Problem(batch=batch, heads=16, seqlen_q=n, causal=True)
    for batch in (1, 4)
    for n in (1024, 2048, 4096)
]


class MadeUpClock:
    """``cost(problem, choice)`` in milliseconds, with noise of some per mille; it counts calls."""

    def __init__(self, cost, noise=0.002):
        self.cost, self.noise, self.calls, self.random = cost, noise, [], random.Random()

    def measure(self, problem, choices, rounds):
        self.calls.append((problem, tuple(choices), rounds))
        return {
            choice: [
                self.cost(problem, choice) * self.random.uniform(1, 1 + self.noise)
                for _ in range(rounds)
            ]
            for choice in choices
        }


def default_of(problem):
    return kernels.plan(problem, "h100").kernel.id


def others(problem):
    rows = kernels.explain(problem, "h100")
    return [x.id for x in rows if x.verdict == "fits" and x.id.startswith(problem.op)]


WINNER = others(SHAPES[0])[0]


def cost_with(factor, applies=lambda problem: True, winner=WINNER):
    """The winner takes `factor` of the default's time where it applies; all others three times."""

    def cost(problem, choice):
        if choice.kernel == winner and default_of(problem) != winner:
            return factor if applies(problem) else 1.0
        return 1.0 if choice.kernel == default_of(problem) else 3.0

    return cost


def tuned(tmp_path, cost, shapes=SHAPES, **options):
    path = tmp_path / "calibration.json"
    report = flash_cute.autotune(shapes, path=path, clock=MadeUpClock(cost), gpu="h100", **options)
    return report, path
