"""``Plan``: how one batch is laid out over ranks, and attended to."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from flash_cute.call import validate
from flash_cute.distributed import layouts, tiles
from flash_cute.distributed.layouts import LAYOUTS, Runs, Window, kept

if TYPE_CHECKING:
    from flash_cute.distributed.context import ContextParallel


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
        owner: this ContextParallel, which lives as long as its plans; no field, nor is what follows
            from fields and is kept with them, to die with the plan.
        key: all fields in a string, which :func:`plan_of` reads.
        digest: a hash of all fields but the context: equal on ranks that have the same plan.
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

    def __post_init__(self) -> None:
        values = {x.name: getattr(self, x.name) for x in fields(self)}
        key = json.dumps(values, separators=(",", ":"))
        same = json.dumps(values | {"context": ""})
        digest = hashlib.sha256(same.encode()).hexdigest()[:16]
        # Not by cached_property, whose lock no graph of Python 3.10 and 3.11 takes.
        self.__dict__.update(key=key, digest=digest, owner=None)

    if TYPE_CHECKING:
        key: ClassVar[str]
        digest: ClassVar[str]
        owner: ClassVar[ContextParallel | None]

    def __reduce__(self) -> Any:
        return Plan, tuple(getattr(self, x.name) for x in fields(self))

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

    @cached_property
    def whole(self) -> Runs:
        """All tokens in their order."""
        return layouts.whole(self.lengths)

    @property
    def total(self) -> int:
        """Tokens of the batch, or of each entry of a dense one."""
        return sum(self.lengths)

    def rows(self, rank: int) -> int:
        """Tokens that a rank has."""
        return layouts.rows(self._part(rank))

    def _part(self, rank: int) -> Runs:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.ranks:
            raise ValueError(f"rank is {rank}; expected one of {self.ranks}, counted from 0")
        return self.parts[rank]

    def check_tokens(self, name: str, x: Any, dim: Any, rank: int | None = None) -> None:
        """Refuses a tensor that has not all tokens, or those of a rank, in ``dim``."""
        validate.tensor(name, x)
        if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
            raise ValueError(f"dim is {dim}; {name} has shape {tuple(x.shape)}")
        expected = self.total if rank is None else self.rows(rank)
        if x.shape[dim] != expected:
            by = f"the plan is of {expected}" if rank is None else (
                f"the rank has {expected} by the plan"
            )  # fmt: skip
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, {x.shape[dim]} tokens in dim {dim}; {by}"
            )

    def position_ids(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """int64 (rows,): positions of the rank's tokens in their documents."""
        runs = self._part(rank)
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

            import torch
            from flash_cute.distributed import ContextParallel

            cp = ContextParallel()  # once, under torchrun; without it, of one rank
            plan = cp.plan(800, causal=True)
            ids = torch.randint(50_000, (2, 800))
            labels = cp.shard(plan.shift_labels(ids, dim=1), plan)
        """
        self.check_tokens("tokens", tokens, dim)
        labels = tokens.roll(-1, dim)
        ends = accumulate(self.lengths)
        last = [end - 1 for end, n in zip(ends, self.lengths, strict=True) if n]
        return labels.index_fill(dim, torch.tensor(last, device=tokens.device), fill)

    @kept
    def slots(self, parts: tuple[Runs, ...], device: torch.device) -> Tensor | None:
        """Where each token of these parts, in ascending order, lies if every part is padded to the
        longest and they follow one another; None if nothing moves."""
        longest = layouts.most_rows(parts)
        starts = layouts.offsets(self.lengths)
        runs = sorted(
            (starts[run.document] + run.start, run.length, rank * longest + run.row)
            for rank, part in enumerate(parts)
            for run in part
        )
        lengths, places = (torch.tensor([run[i] for run in runs], device="cpu") for i in (1, 2))
        firsts = places - lengths.cumsum(0) + lengths  # less the tokens before the run
        index = firsts.repeat_interleave(lengths)
        index += torch.arange(len(index), device="cpu")
        if len(index) == len(parts) * longest and bool((index.diff() == 1).all()):
            return None
        return index.to(device, non_blocking=True)

    # --- work ------------------------------------------------------------------------------------

    def work(self, window: Window | None = None) -> list[float]:
        """Pairs of a query and a key that it sees, of each rank: of its queries, and where ranks
        share heads of all their queries, times its share of the heads."""
        window = self.window if window is None else window
        pairs = (layouts.work(runs, self.lengths, window) for runs in self.outer_parts)
        return [x / self.inner for x in pairs for _ in range(self.inner)]

    @kept
    def launches(self, queries: Runs, keys: Runs, window: Window, alibi: bool) -> tiles.Launches:
        """The calls that make up what these queries see of these keys."""
        return tiles.launches(queries, keys, window, alibi, self.packed)

    @kept
    def hops(self, window: Window) -> int:
        """The steps of a ring after which no rank sees further keys."""
        parts = self.outer_parts
        for hop in range(self.outer - 1, 0, -1):
            if any(self.launches(runs, parts[r - hop], window, False)
                   for r, runs in enumerate(parts)):  # fmt: skip
                return hop + 1
        return 1

    # --- as text ---------------------------------------------------------------------------------

    def __str__(self) -> str:
        documents = f"{len(self.lengths)} documents, " if self.packed else ""
        rows = [self.rows(rank) for rank in range(self.ranks)]
        work = self.work()
        mean = sum(work) / self.ranks
        shape = f" ({self.outer} x {self.inner})" if 1 < self.inner < self.ranks else ""
        return (
            f"{self.strategy}{shape}, {self.layout}: {documents}{self.total} tokens on "
            f"{self.ranks} ranks, {min(rows)} to {max(rows)} each; the busiest "
            f"rank has {max(work) / mean if mean else 1:.3f} of the mean work"
        )


_PLANS: WeakValueDictionary[str, Plan] = WeakValueDictionary()  # by key
_OF_GRAPHS: deque[Plan] = deque(maxlen=8)  # a graph may outlive its plan, and has the key alone


def plan_of(key: str) -> Plan:
    """The plan whose ``key`` this is."""
    plan = _PLANS.get(key)
    if plan is None:
        values: dict[str, Any] = json.loads(key)
        tuples = {name: tuple(values[name]) for name in ("lengths", "window_size", "sizes")}
        plan = shared(Plan(**values | tuples))
        _OF_GRAPHS.append(plan)
    return plan


def shared(plan: Plan) -> Plan:
    """This plan, or an equal one of the same context that there is."""
    return _PLANS.setdefault(plan.key, plan)


__all__ = ["LAYOUTS", "Plan", "plan_of", "shared"]
