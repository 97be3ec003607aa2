"""Chooses a layout for each block of rows, under a budget of bytes.

It is a knapsack with several choices per item. Choices on the lower convex hull of (bytes, error)
of each block are taken in the order of their gain per byte: the result is optimal for the bytes
that it uses, and less than one step of one block below the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from flash_cute.precision.quantize import Layout


class BudgetError(ValueError):
    """The smallest possible size, ``least`` bytes, is above the budget."""

    def __init__(self, least: int, budget: int) -> None:
        super().__init__(f"the smallest choice is {least} bytes, more than {budget}")
        self.least = least


@dataclass(frozen=True)
class Choice:
    """One way to store a block: its bytes, and the error that it adds to the model's."""

    layout: Layout
    nbytes: int
    error: float


def hull(choices: Sequence[Choice]) -> list[Choice]:
    """Choices on the lower convex hull, by increasing bytes and decreasing gain per byte."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.nbytes, c.error)):
        if kept and choice.error >= kept[-1].error:
            continue
        while len(kept) > 1 and gain(kept[-2], kept[-1]) <= gain(kept[-2], choice):
            kept.pop()
        kept.append(choice)
    return kept


def gain(before: Choice, after: Choice) -> float:
    """The decrease of the error per additional byte."""
    return (before.error - after.error) / (after.nbytes - before.nbytes)


def allocate(blocks: Sequence[Sequence[Choice]], budget: int) -> list[Choice]:
    """A choice for each block. Raises BudgetError if none fits."""
    hulls = [hull(choices) for choices in blocks]
    taken = [steps[0] for steps in hulls]
    left = budget - sum(choice.nbytes for choice in taken)
    if left < 0:
        raise BudgetError(budget - left, budget)
    steps = sorted(
        (-gain(before, after), block, number, after)
        for block, choices in enumerate(hulls)
        for number, (before, after) in enumerate(pairwise(choices))
    )
    full: set[int] = set()
    for _, block, _, after in steps:
        more = after.nbytes - taken[block].nbytes
        if block in full or more > left:
            full.add(block)
            continue
        taken[block], left = after, left - more
    return taken


def uniform(blocks: Sequence[Sequence[Choice]], budget: int) -> list[Choice]:
    """One layout for all blocks: of those that fit and that all blocks have, the one with the least
    error. Raises BudgetError if none fits."""
    tables = [{choice.layout: choice for choice in choices} for choices in blocks]
    shared = set(tables[0]).intersection(*tables[1:]) if tables else set()
    totals = {
        layout: (
            sum(table[layout].error for table in tables),
            sum(table[layout].nbytes for table in tables),
        )
        for layout in shared
    }
    fitting = {layout: total for layout, total in totals.items() if total[1] <= budget}
    if tables and not fitting:
        raise BudgetError(min(total[1] for total in totals.values()), budget)
    if not tables:
        return []
    best = min(fitting, key=lambda layout: fitting[layout])
    return [table[best] for table in tables]
