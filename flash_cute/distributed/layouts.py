"""Layouts: which tokens of a packed batch lie on which rank, and in which order.

A batch is documents end to end; a dense batch is one document, whose batch entries are all laid out
alike. Everything here is plain integers, the same on every rank.

=================== ==========================================================================
``contiguous``      rank r has the r-th part of all tokens
``zigzag``          all tokens in 2 P parts; rank r has parts r and 2 P - 1 - r, which under a
                    causal mask are as much work for each (arXiv 2407.21783, section 3.3.2)
``per_document``    zigzag of each document by itself, for packed documents
``balanced``        blocks, the largest work first, each to the rank that has least work so far
=================== ==========================================================================
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any, TypeVar

LAYOUTS = ("contiguous", "zigzag", "per_document", "balanced")

Window = tuple[int, int]  # keys that a query sees before and after its own; -1 is unbounded
Interval = tuple[int, int]  # first token of all and the one after the last


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one document, and where they lie in a rank's part.

    Attributes:
        document: which.
        start: position of the first token in its document.
        length: tokens.
        row: where the first token lies.
    """

    document: int
    start: int
    length: int
    row: int

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.length


T = TypeVar("T")


class Fixed(tuple[T, ...]):
    """A tuple whose hash is computed once: long ones are keys of caches in every call."""

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("hash")
        if known is None:
            known = self.__dict__["hash"] = super().__hash__()
        return known


Runs = tuple[Run, ...]

Function = TypeVar("Function", bound=Callable[..., Any])


def kept(function: Function) -> Function:
    """Has results kept by the first argument, to die with it."""
    name = f"{function.__qualname__} of"

    @wraps(function)
    def call(first: Any, *rest: Any) -> Any:
        known = first.__dict__.setdefault(name, {})
        if rest not in known:
            known[rest] = function(first, *rest)
        return known[rest]

    return call  # type: ignore[return-value]


def offsets(lengths: tuple[int, ...]) -> list[int]:
    """Where documents begin, and the number of all tokens."""
    return list(accumulate(lengths, initial=0))


def whole(lengths: tuple[int, ...]) -> Runs:
    """All tokens in their order."""
    starts = offsets(lengths)
    return Fixed(Run(d, 0, n, starts[d]) for d, n in enumerate(lengths) if n)


def layout(
    name: str, lengths: tuple[int, ...], ranks: int, window: Window, block: int
) -> tuple[Runs, ...]:
    """The runs of each rank. ``window`` and ``block`` (tokens) decide the balanced one alone."""
    if name == "contiguous":
        total = sum(lengths)
        size = -(-total // ranks)  # as torch.chunk and DTensor have it
        ends = [min(size * r, total) for r in range(ranks + 1)]
        return contiguous(lengths, tuple(b - a for a, b in pairwise(ends)))
    elif name == "zigzag":
        mine = _zigzag(0, sum(lengths), ranks)
    elif name == "per_document":
        mine = [[] for _ in range(ranks)]
        for start, length in zip(offsets(lengths), lengths, strict=False):
            for of_rank, parts in zip(mine, _zigzag(start, length, ranks), strict=True):
                of_rank += parts
    else:
        mine = _balanced(lengths, ranks, window, block)
    return Fixed(_runs(intervals, lengths) for intervals in mine)


def contiguous(lengths: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Runs, ...]:
    """The runs of ranks that have so many tokens each, in order."""
    cuts = offsets(sizes)
    return Fixed(_runs([part], lengths) for part in pairwise(cuts))


def _parts(start: int, length: int, count: int) -> list[Interval]:
    """``count`` intervals whose lengths differ by one at most."""
    cuts = [start + length * i // count for i in range(count + 1)]
    return list(pairwise(cuts))


def _zigzag(start: int, length: int, ranks: int) -> list[list[Interval]]:
    parts = _parts(start, length, 2 * ranks)
    return [[parts[r], parts[2 * ranks - 1 - r]] for r in range(ranks)]


def _balanced(
    lengths: tuple[int, ...], ranks: int, window: Window, block: int
) -> list[list[Interval]]:
    """Ranks get as many tokens each, so that their other layers are balanced, too."""
    blocks = []
    for document_start, length in zip(offsets(lengths), lengths, strict=False):
        for start in range(0, length, block):
            stop = min(start + block, length)
            work = visible_pairs(start, stop, length, window)
            blocks.append((work, document_start + start, document_start + stop))
    capacity = -(-sum(lengths) // ranks)
    taken: list[list[Interval]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]
    for work, start, stop in sorted(blocks, key=lambda x: (-x[0], x[1])):
        while start < stop:
            load, tokens, rank = heapq.heappop(loads)
            count = min(stop - start, capacity - tokens)
            taken[rank].append((start, start + count))
            work_of_count = work * count // (stop - start)
            work, start = work - work_of_count, start + count
            if tokens + count < capacity:
                heapq.heappush(loads, (load + work_of_count, tokens + count, rank))
    return taken


def visible_pairs(start: int, stop: int, length: int, window: Window) -> int:
    """Pairs of a query [start, stop) of a document and a key that it sees."""
    left, right = window
    end = (
        length * (stop - start) if right < 0 else _sum_of_least(start, stop, right + 1, length)
    )  # sum over i of min(i + right + 1, length)
    if left < 0:
        return end
    first = stop * (stop - 1) // 2 - start * (start - 1) // 2
    return end - (
        first - _sum_of_least(start, stop, 0, left)
    )  # max(i - left, 0) = i - min(i, left)


def _sum_of_least(start: int, stop: int, shift: int, bound: int) -> int:
    """Sum of min(i + shift, bound) over i in [start, stop)."""
    turn = min(max(bound - shift, start), stop)
    rising = (turn - start) * (start + turn - 1 + 2 * shift) // 2
    return rising + (stop - turn) * bound


def _runs(intervals: list[Interval], lengths: tuple[int, ...]) -> Runs:
    """Runs of a rank that has these tokens, in ascending order, joined where they touch."""
    joined: list[Interval] = []
    for start, stop in sorted(x for x in intervals if x[0] < x[1]):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    starts, runs, row, document = offsets(lengths), [], 0, 0
    for start, stop in joined:
        while start < stop:
            while starts[document + 1] <= start:
                document += 1
            length = min(stop, starts[document + 1]) - start
            runs.append(Run(document, start - starts[document], length, row))
            start, row = start + length, row + length
    return Fixed(runs)


def union(parts: tuple[Runs, ...], lengths: tuple[int, ...]) -> Runs:
    """The runs of a rank that has the tokens of several."""
    starts = offsets(lengths)
    mine = [(starts[x.document] + x.start, starts[x.document] + x.stop) for p in parts for x in p]
    return _runs(mine, lengths)


@kept
def rows(runs: Runs) -> int:
    """Tokens in them."""
    return sum(run.length for run in runs)


def most_rows(parts: Iterable[Runs]) -> int:
    """Tokens of the rank that has most."""
    return max(map(rows, parts))


def work(runs: Runs, lengths: tuple[int, ...], window: Window) -> int:
    """Pairs of a query of these runs and a key that it sees."""
    return sum(visible_pairs(run.start, run.stop, lengths[run.document], window) for run in runs)
