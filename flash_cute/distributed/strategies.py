"""The strategies there are, and which one a plan takes: the least expected time."""

from __future__ import annotations

from flash_cute.distributed.all_gather import AllGather
from flash_cute.distributed.costs import Links, Sizes
from flash_cute.distributed.plan import Plan
from flash_cute.distributed.ring import Ring
from flash_cute.distributed.strategy import Strategy
from flash_cute.distributed.ulysses import TwoDimensional, Ulysses

STRATEGIES: dict[str, Strategy] = {
    each.name: each for each in (AllGather(), Ring(), Ulysses(), TwoDimensional())
}


def over_tokens(plan: Plan) -> Strategy:
    """The strategy among ranks that split tokens; all_gather if there is only one such rank."""
    return STRATEGIES["all_gather" if plan.outer == 1 else plan.strategy]


def expected_times(sizes: Sizes, ranks: int, links: Links) -> dict[str, float]:
    """Seconds of forward and backward of one layer, by strategy, for those that support it."""
    times = {name: x.expected_time(sizes, ranks, links) for name, x in STRATEGIES.items()}
    return {name: time for name, time in times.items() if time is not None}


def fastest(sizes: Sizes, ranks: int, links: Links) -> str:
    """The strategy with the least time; all_gather if no other is faster by more than 1 %."""
    times = expected_times(sizes, ranks, links)
    best = min(times, key=lambda name: times[name])
    gathered = times.get("all_gather")
    return "all_gather" if gathered is not None and gathered <= 1.01 * times[best] else best
