"""``Plan``: how one batch is laid out over ranks, and attended to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flash_cute.distributed import layouts
from flash_cute.distributed.layouts import LAYOUTS, Runs, Window
from flash_cute.distributed.tiles import launches

STRATEGIES = ("all_gather", "ring", "ulysses", "two_dimensional")


@dataclass(frozen=True)
class Plan:
    """A batch's layout and strategy: plain numbers, hashable, the same on every rank.

    Made by :meth:`flash_cute.distributed.ContextParallel.plan`, which checks it.

    Attributes:
        lengths: tokens of each document; of a dense batch the one seqlen of all its entries.
        packed: whether documents are end to end, (total, heads, dim), or the batch is dense,
            (batch, seqlen, heads, dim).
        ranks: how many share the tokens.
        inner: of these so many share heads in place of tokens inside of attention: 1 of all_gather
            and ring, all of ulysses, the second dimension of the mesh of two_dimensional.
        strategy: "all_gather", "ring", "ulysses" or "two_dimensional", which is a ring of ulysses.
        layout: "contiguous", "zigzag", "per_document" or "balanced".
        causal, window_size: the mask that calls have if they give none, and that the balanced
            layout is made for.
        block: tokens that the balanced layout keeps together.
        sizes: tokens of each rank in a contiguous layout; () is as torch.chunk has it.
        head_groups: into how many groups of kv heads all_gather cuts its work: the next group's
            keys and values travel while this one's are attended to.
        context: name of the ContextParallel it belongs to; no part of comparisons.
    """

    lengths: tuple[int, ...]
    packed: bool
    ranks: int
    inner: int
    strategy: str
    layout: str
    causal: bool = False
    window_size: Window = (-1, -1)
    block: int = 128
    sizes: tuple[int, ...] = ()
    head_groups: int = 1
    context: str = field(default="", compare=False, repr=False)

    # --- where tokens are ------------------------------------------------------------------------

    @property
    def window(self) -> Window:
        """``window_size`` with what ``causal`` makes of it."""
        return (self.window_size[0], 0 if self.causal else self.window_size[1])

    @cached_property
    def parts(self) -> tuple[Runs, ...]:
        """The runs of each rank."""
        if self.sizes:
            return layouts.contiguous(self.lengths, self.sizes)
        return layouts.layout(self.layout, self.lengths, self.ranks, self.window, self.block)

    @property
    def outer(self) -> int:
        """Ranks that share tokens inside of attention: groups of ``inner`` ranks."""
        return self.ranks // self.inner

    @cached_property
    def outer_parts(self) -> tuple[Runs, ...]:
        """The runs of each of these groups."""
        members = [self.parts[i : i + self.inner] for i in range(0, self.ranks, self.inner)]
        return layouts.Fixed(layouts.union(parts, self.lengths) for parts in members)

    @property
    def total(self) -> int:
        """Tokens of the batch, or of each entry of a dense one."""
        return sum(self.lengths)

    def rows(self, rank: int) -> int:
        """Tokens that a rank has."""
        return layouts.rows(self.parts[rank])

    def position_ids(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """int64 (rows,): positions of the rank's tokens in their documents."""
        runs = self.parts[rank]
        ids = [i for run in runs for i in range(run.start, run.stop)]
        return torch.tensor(ids, dtype=torch.int64, device=device)

    def shift_labels(self, tokens: Tensor, dim: int = -1, fill: int = -100) -> Tensor:
        """What follows each token of the whole batch in its document, to be sharded like it.

        Args:
            tokens: the whole batch's, ``total`` long in ``dim``.
            dim: the dimension of tokens.
            fill: what follows the last token of a document; F.cross_entropy ignores -100.

        Raises:
            ValueError: ``tokens`` are not as many as the plan has.

        Example::

            labels = cp.shard(plan.shift_labels(ids), plan, dim=1)
        """
        if tokens.shape[dim] != self.total:
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}, {tokens.shape[dim]} in dim {dim}; the "
                f"plan is of {self.total}"
            )
        labels = tokens.roll(-1, dim)
        ends = accumulate(self.lengths)
        last = [end - 1 for end, n in zip(ends, self.lengths, strict=True) if n]
        return labels.index_fill(dim, torch.tensor(last, device=tokens.device), fill)

    # --- work ------------------------------------------------------------------------------------

    def work(self, window: Window | None = None) -> list[int]:
        """Pairs of a query and a key that it sees, of each rank's queries."""
        window = self.window if window is None else window
        return [layouts.work(runs, self.lengths, window) for runs in self.parts]

    def hops(self, window: Window) -> int:
        """Steps of a ring until nobody sees any more keys."""
        return _hops(self.outer_parts, window)

    # --- as text ---------------------------------------------------------------------------------

    @cached_property
    def key(self) -> str:
        """All of it in a string, which :func:`plan_of` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """A hash of all but the context: equal on ranks that have the same plan."""
        same = json.dumps(asdict(replace(self, context="")))
        return hashlib.sha256(same.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        documents = f"{len(self.lengths)} documents, " if self.packed else ""
        rows = [self.rows(rank) for rank in range(self.ranks)]
        work = self.work()
        mean = sum(work) / self.ranks
        shape = f" ({self.outer} x {self.inner})" if self.strategy == "two_dimensional" else ""
        return (
            f"{self.strategy}{shape}, {self.layout}: {documents}{self.total} tokens on "
            f"{self.ranks} ranks, {min(rows)} to {max(rows)} each; most work of a rank "
            f"{max(work) / mean if mean else 1:.3f} of the mean"
        )


@lru_cache(maxsize=1024)
def plan_of(key: str) -> Plan:
    """The plan whose ``key`` this is."""
    fields: dict[str, Any] = json.loads(key)
    tuples = {name: tuple(fields[name]) for name in ("lengths", "window_size", "sizes")}
    return Plan(**fields | tuples)


@lru_cache(maxsize=1024)
def _hops(parts: tuple[Runs, ...], window: Window) -> int:
    ranks = len(parts)
    for hop in range(ranks - 1, 0, -1):
        if any(launches(parts[r], parts[r - hop], window, False, True) for r in range(ranks)):
            return hop + 1
    return 1


@lru_cache(maxsize=256)
def slots(parts: tuple[Runs, ...], lengths: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Where each token of all parts, in ascending order, lies if every part is padded to the
    longest and they follow one another; None if nothing moves."""
    longest = max(map(layouts.rows, parts))
    places = sorted(
        (token, rank * longest + row)
        for rank, runs in enumerate(parts)
        for row, token in enumerate(layouts.tokens(runs, lengths))
    )
    index = [slot for _, slot in places]
    if index == list(range(len(parts) * longest)):
        return None
    return torch.tensor(index, dtype=torch.int64).to(device, non_blocking=True)


__all__ = ["LAYOUTS", "STRATEGIES", "Plan", "plan_of", "slots"]
