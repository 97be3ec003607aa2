"""``ContextParallel``: ranks that share the tokens of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_cute import validate
from flash_cute.distributed import agreement, choose, comm, groups, layouts
from flash_cute.distributed.all_gather import to_rows
from flash_cute.distributed.choose import Links
from flash_cute.distributed.plan import LAYOUTS, STRATEGIES, Plan, slots
from flash_cute.ops.typed import FwdCall
from flash_cute.validate import options as validate_options


class ContextParallel:
    """The ranks that share a sequence, and how they do it (context parallelism).

    Args:
        ranks: a DeviceMesh of one dimension, or of two for strategy "two_dimensional": a ring over
            the first, heads over the second, which should be the faster links; or a ProcessGroup.
            None is all ranks of torch.distributed, or this process alone if it is not initialised.
        strategy: "all_gather", "ring", "ulysses", "two_dimensional"; "auto" is the fastest that
            is expected of ``links``, or two_dimensional of a mesh of two dimensions.
        layout: "contiguous", "zigzag", "per_document" or "balanced"; "auto" is contiguous for
            ulysses and without a causal mask, zigzag for one document and balanced for several.
        head_groups: into how many groups of kv heads all_gather cuts its work, if they divide them.
        check: whether each call asks all ranks if they make the same one, and raises the same error
            on all of them if not: one message of 16 bytes between hosts. Without it they may hang
            until the groups' timeout, or compute nonsense.
        timeout: of groups that are made here; None is torch's default.
        links: speeds that "auto" reckons with, as :func:`measure_links` finds them; None is those
            of Hopper GPUs on NVLink.

    Raises:
        ValueError: the mesh has more than two dimensions, or one for two_dimensional.

    Example::

        cp = ContextParallel()                        # under torchrun, once
        plan = cp.plan(8192, causal=True, heads=32, heads_k=8)
        q, k, v = (cp.shard(x, plan) for x in (q, k, v))     # (batch, seqlen, heads, dim)
        out = cp_attention(q, k, v, plan)
    """

    def __init__(
        self,
        ranks: DeviceMesh | dist.ProcessGroup | None = None,
        *,
        strategy: str = "auto",
        layout: str = "auto",
        head_groups: int = 2,
        check: bool = True,
        timeout: timedelta | None = None,
        links: Links | None = None,
    ) -> None:
        mesh = ranks if isinstance(ranks, DeviceMesh) else None
        if mesh is not None and mesh.ndim > 2:
            raise ValueError(
                f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; expected those that "
                "share tokens, one or two: mesh['cp']"
            )
        _one_of("strategy", strategy, ("auto", *STRATEGIES))
        _one_of("layout", layout, ("auto", *LAYOUTS))
        self._is_2d = mesh is not None and mesh.ndim == 2
        if (strategy == "two_dimensional") > self._is_2d:
            raise ValueError(
                "strategy is two_dimensional, which needs a DeviceMesh of two dimensions: "
                "init_device_mesh('cuda', (ring, ulysses))"
            )
        if mesh is not None:
            group: Any = groups.group_of_all(mesh, timeout)
        elif ranks is not None:
            group = ranks
        else:
            is_there = dist.is_available() and dist.is_initialized()
            group = dist.group.WORLD if is_there else None
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.strategy, self.layout, self.head_groups = strategy, layout, head_groups
        self.check, self.links = check, links or Links()
        self.name = groups.register(group, mesh, timeout)
        _CONTEXTS[self.name] = self

    @property
    def group(self) -> Any:
        """The process group of all ranks; None for a process alone."""
        return groups.held(self.name).group

    @property
    def mesh(self) -> DeviceMesh | None:
        """The DeviceMesh that this was made of, if it was."""
        return groups.held(self.name).mesh

    @property
    def _hosts(self) -> Any:
        return groups.held(self.name).hosts

    def plan(
        self,
        seqlen: int | None = None,
        *,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        heads: int | None = None,
        heads_k: int | None = None,
        head_dim: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        block: int = 128,
        sizes: Sequence[int] | None = None,
    ) -> Plan:
        """How a batch is laid out and attended to. Equal arguments give equal plans, on every rank.

        Args:
            seqlen: tokens of each entry of a dense batch, (batch, seqlen, heads, dim). Any number.
            cu_seqlens: offsets of packed documents, batch + 1 integers from 0 to the number of all
                tokens, in place of seqlen: tensors are (total, heads, dim). One on a GPU is waited
                for.
            causal, window_size: the mask that calls have by default, and that the balanced layout
                and "auto" reckon with; as in :func:`flash_cute.flash_attn_func`.
            heads, heads_k, head_dim, dtype: of the tensors, for strategy "auto" alone; heads None
                is all_gather.
            block: tokens that the balanced layout keeps together.
            sizes: tokens of each rank, in order, of a batch that is already shared out: the layout
                is contiguous then. None is as the layout has it.

        Raises:
            TypeError, ValueError: an argument that does not fit, or ranks whose plans differ: the
                same message on all of them.
        """
        problem, plan = None, None
        try:
            plan = self.plan_alone(
                seqlen, cu_seqlens, causal, window_size, heads, heads_k, head_dim, dtype, block,
                sizes,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            problem = error
        self.agree("none" if plan is None else f"plan {plan.digest}, {plan!r}", problem)
        assert plan is not None
        return plan

    def plan_alone(
        self,
        seqlen: int | None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        heads: int | None = None,
        heads_k: int | None = None,
        head_dim: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        block: int = 128,
        sizes: Sequence[int] | None = None,
    ) -> Plan:
        """:meth:`plan` without asking the other ranks."""
        lengths = _lengths(seqlen, cu_seqlens)
        validate.flag("causal", causal)
        _check_window(window_size)
        if block < 1:
            raise ValueError(f"block is {block}; expected at least 1 token")
        plan = Plan(
            lengths, cu_seqlens is not None, self.size, 1, "all_gather", "contiguous",
            bool(causal), (int(window_size[0]), int(window_size[1])), block,
            self._sizes(sizes, lengths), self.head_groups, self.name,
        )  # fmt: skip
        return self._chosen(plan, heads, heads_k or heads, head_dim, dtype)

    def _chosen(
        self, plan: Plan, heads: int | None, heads_k: int | None, dim: int, dtype: torch.dtype
    ) -> Plan:
        name = self.strategy
        if name == "auto" and self._is_2d:
            name = "two_dimensional"
        elif name == "auto" and heads and heads_k:
            pairs = sum(layouts.visible_pairs(0, n, n, plan.window) for n in plan.lengths)
            sizes = choose.Sizes(plan.total, pairs, heads, heads_k, dim, dtype)
            name = choose.strategy(sizes, self.size, self.links)
        elif name == "auto":
            name = "all_gather"
        inner = {"ulysses": self.size, "two_dimensional": 1}.get(name, 1)
        if name == "two_dimensional":
            assert self.mesh is not None
            inner = self.mesh.size(1)
        layout = self.layout
        if plan.sizes:
            layout = "contiguous"
        elif layout == "auto":
            layout = "contiguous"
            if name != "ulysses" and plan.window[1] >= 0:
                layout = "zigzag" if len(plan.lengths) == 1 else "balanced"
        return replace(plan, strategy=name, inner=inner, layout=layout)

    def _sizes(self, sizes: Sequence[int] | None, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if sizes is None:
            return ()
        sizes = tuple(int(n) for n in sizes)
        if len(sizes) != self.size or min(sizes) < 0 or sum(sizes) != sum(lengths):
            raise ValueError(
                f"sizes is {sizes}; expected the tokens of {self.size} ranks, {sum(lengths)} in all"
            )
        if self.layout not in ("auto", "contiguous"):
            raise ValueError(f"sizes is given, and layout {self.layout!r}: sizes are contiguous")
        return sizes

    @torch.compiler.disable
    def plan_of_parts(self, rows: int, problem: Exception | None = None, **options: Any) -> Plan:
        """The plan of a dense batch that is already shared out in order: asks all ranks how many
        tokens they have.

        Args:
            rows: tokens of this rank.
            problem: what is wrong with this rank's call, for all ranks to raise.
            options: of :meth:`plan`, but seqlen, cu_seqlens and sizes.
        """
        sizes = agreement.counts(self._hosts, rows, problem)
        return self.plan(sum(sizes), sizes=sizes, **options)

    def shard(self, x: Tensor, plan: Plan, dim: int = 1) -> Tensor:
        """This rank's tokens of the whole batch's ``x``, in the plan's order; differentiable.

        Args:
            x: with all tokens in ``dim``: ids, labels, embeddings, ...; the same on every rank.
            plan: of this ContextParallel.
            dim: the dimension of tokens; 0 of packed batches.

        Raises:
            ValueError: x has not as many tokens as the plan.
        """
        if x.shape[dim] != plan.total:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, {x.shape[dim]} tokens in dim {dim}; the plan is of "
                f"{plan.total}"
            )
        starts = layouts.offsets(plan.lengths)
        parts = [
            x.narrow(dim, starts[run.document] + run.start, run.length)
            for run in plan.parts[self.rank]
        ]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def unshard(self, x: Tensor, plan: Plan, dim: int = 1) -> Tensor:
        """The whole batch's tensor of the ranks' parts, on every rank; without gradients.

        Args:
            x: this rank's part, as :meth:`shard` gives it.
            plan: of this ContextParallel.
            dim: the dimension of tokens; 0 of packed batches.

        Raises:
            ValueError: x has not as many tokens as this rank has by the plan.
        """
        problem = None
        if x.shape[dim] != plan.rows(self.rank):
            problem = ValueError(
                f"x has shape {tuple(x.shape)}, {x.shape[dim]} tokens in dim {dim}; the rank has "
                f"{plan.rows(self.rank)} by the plan"
            )
        dim = dim % x.dim()
        rest = [n for i, n in enumerate(x.shape) if i != dim]
        self.agree(f"unshard of {rest}, {x.dtype}, plan {plan.digest}", problem)
        longest = max(map(layouts.rows, plan.parts))
        rows = to_rows(x.detach().movedim(dim, 0).unsqueeze(0), longest)
        gathered, work = comm.all_gather(rows, self.group if self.size > 1 else None)
        work.wait()
        place = slots(plan.parts, plan.lengths, x.device)
        whole = gathered if place is None else gathered.index_select(0, place)
        return whole.squeeze(1).movedim(0, dim)

    def position_ids(self, plan: Plan, device: torch.device | str | None = None) -> Tensor:
        """int64 (rows,): positions of this rank's tokens in their documents."""
        return plan.position_ids(self.rank, device)

    def agree(self, what: str, problem: Exception | None = None) -> None:
        """Raises the same error on all ranks if one has a problem, or does something else."""
        if self.check or self._hosts is None:
            agreement.agree(self._hosts, what, problem)
        elif problem is not None:
            raise problem

    @contextmanager
    def agreeing(self, what: str, problem: Exception | None = None) -> Iterator[None]:
        """The same, before the first message of what is done inside; with a problem at once."""
        if problem is not None or self._hosts is None or not self.check:
            self.agree(what, problem)
            yield
        else:
            with agreement.agreeing(self._hosts, what):
                yield

    def __repr__(self) -> str:
        return (
            f"ContextParallel(rank {self.rank} of {self.size}, strategy={self.strategy!r}, "
            f"layout={self.layout!r})"
        )


_CONTEXTS: dict[str, ContextParallel] = {}


def context_named(name: str) -> ContextParallel:
    """The ContextParallel of a name."""
    return _CONTEXTS[name]


def context_of(plan: Any) -> ContextParallel:
    """The ContextParallel that made a plan."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan is {type(plan).__name__}; expected what ContextParallel.plan returns"
        )
    if plan.context not in _CONTEXTS:
        raise ValueError("plan was made by no ContextParallel of this process: call its plan()")
    return _CONTEXTS[plan.context]


def _one_of(name: str, given: Any, supported: tuple[str, ...]) -> None:
    if given not in supported:
        raise ValueError(f"{name} is {given!r}; supported: {', '.join(supported)}")


def _lengths(seqlen: int | None, cu_seqlens: Sequence[int] | Tensor | None) -> tuple[int, ...]:
    if (seqlen is None) == (cu_seqlens is None):
        raise ValueError("give seqlen, of a dense batch, or cu_seqlens, of packed documents")
    if seqlen is not None:
        validate.length("seqlen", seqlen)
        lengths: tuple[int, ...] = (int(seqlen),)
    else:
        given = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens or ())
        if len(given) < 2 or given[0] != 0 or sorted(given) != given:
            raise ValueError(
                f"cu_seqlens is {given[:8]}; expected ascending offsets from 0 to the number of "
                "all tokens"
            )
        lengths = tuple(b - a for a, b in itertools.pairwise(given))
    if sum(lengths) == 0:
        raise ValueError("the batch has no tokens")
    return lengths


def _check_window(window_size: Any) -> None:
    q = torch.empty(1, 1, 1, 1, device="meta")
    left, right = validate_options.sides(window_size)
    validate_options.check(FwdCall(q, q, q, None, False, left, right), 1)
