"""Pairwise testing: few combinations that cover every pair of values of any two factors."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Choice = tuple[int, int]  # indices of a factor and of one of its values


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    excluded: Callable[[Mapping[str, Any]], bool] = lambda pair: False,
) -> list[dict[str, Any]]:
    """Rows of one value per factor that together cover all pairs of values; deterministic.

    `excluded` gets pairs {factor: value, other factor: value}; if it is true they occur in no row.
    Greedy: a row begins with the first missing pair, and takes from each other factor the value
    that adds most new pairs, and among equals the one with most missing pairs.

    Raises:
        ValueError: every value of a factor is excluded by those of a row.
    """
    names = list(factors)

    def allowed(a: Choice, b: Choice) -> bool:
        return not excluded({names[f]: factors[names[f]][value] for f, value in (a, b)})

    missing = [pair for pair in _pairs(factors) if allowed(*pair)]
    rows = []
    while missing:
        new, left = set(missing), Counter(itertools.chain.from_iterable(missing))
        row = dict(missing[0])
        for factor, name in enumerate(names):
            if factor in row:
                continue
            fits = [
                (factor, value)
                for value in range(len(factors[name]))
                if all(allowed((factor, value), other) for other in row.items())
            ]
            if not fits:
                taken = {names[f]: factors[names[f]][value] for f, value in row.items()}
                raise ValueError(f"{name}: every value is excluded by {taken}")
            gains = [
                (sum(_ordered(one, other) in new for other in row.items()), left[one])
                for one in fits
            ]
            row[factor] = fits[gains.index(max(gains))][1]
        covered = set(itertools.combinations(sorted(row.items()), 2))
        missing = [pair for pair in missing if pair not in covered]
        rows.append({name: factors[name][row[factor]] for factor, name in enumerate(names)})
    return rows


def _pairs(factors: Mapping[str, Sequence[Any]]) -> list[tuple[Choice, Choice]]:
    """All pairs of values of two factors, the earlier factor first."""
    choices = [
        [(factor, value) for value in range(len(values))]
        for factor, values in enumerate(factors.values())
    ]
    return [
        pair for some, others in itertools.combinations(choices, 2)
        for pair in itertools.product(some, others)
    ]  # fmt: skip


def _ordered(a: Choice, b: Choice) -> tuple[Choice, Choice]:
    return (a, b) if a < b else (b, a)
