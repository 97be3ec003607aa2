"""``ContextParallel``: ranks that share the tokens of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_cute.call import validate
from flash_cute.distributed import agreement, arguments, comm, groups, layouts, registry, strategies
from flash_cute.distributed.all_gather import to_rows
from flash_cute.distributed.costs import Links, Sizes
from flash_cute.distributed.plan import LAYOUTS, Plan, shared
from flash_cute.distributed.strategies import STRATEGIES
from flash_cute.distributed.values import ValuesOnGPU


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
            on all of them if not: one message of 24 bytes between hosts. Without it they may hang
            until the groups' timeout, or return wrong results.
        timeout: of groups that are made here; None is that of the ranks' own group.
        links: speeds that "auto" reckons with, as :func:`measure_links` finds them; None is those
            of Hopper GPUs on NVLink.

    Its plans keep it. Every rank makes one at the same time, as any group.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name: the mesh has more than two
            dimensions, or one for two_dimensional; this process is none of the ranks.

    Example::

        import torch
        from flash_cute.distributed import ContextParallel, cp_attention

        cp = ContextParallel()  # once, under torchrun; without it, of one rank
        plan = cp.plan(800, causal=True, heads=8, heads_k=8)
        q, k, v = torch.randn(3, 2, 800, 8, 64).unbind()  # (batch, seqlen, heads, dim)
        q, k, v = (cp.shard(x, plan) for x in (q, k, v))  # this rank's part of the tokens
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
        arguments.check_ranks(ranks)
        arguments.check_timeout(timeout)
        mesh = ranks if isinstance(ranks, DeviceMesh) else None
        self._is_2d = mesh is not None and mesh.ndim == 2
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
        self.check, self.links = check, Links() if links is None else links
        self.name = registry.register(self, groups.groups_in(group, mesh, timeout))
        try:
            self._check_options()
        except (TypeError, ValueError) as error:  # the others hear of it in what they do next
            agreement.agree(None if check is False else self._hosts, "none", error)
        self._values = ValuesOnGPU()
        self._recent: deque[Plan] = deque(maxlen=8)  # layers make a plan in each call

    def _check_options(self) -> None:
        arguments.check_one_of("strategy", self.strategy, ("auto", *STRATEGIES))
        arguments.check_one_of("layout", self.layout, ("auto", *LAYOUTS))
        validate.count("head_groups", self.head_groups, 1)
        if not isinstance(self.check, bool):
            raise TypeError(f"check is {validate.kind_of(self.check)}; expected a bool")
        if not isinstance(self.links, Links):
            raise TypeError(f"links is {validate.kind_of(self.links)}; expected Links, or None")
        if self.strategy != "auto" and STRATEGIES[self.strategy].is_2d > self._is_2d:
            raise ValueError(
                f"strategy is {self.strategy}, which needs a DeviceMesh of two dimensions: "
                "init_device_mesh('cuda', (ring, ulysses))"
            )

    @property
    def group(self) -> Any:
        """The process group of all ranks; None for a process alone."""
        return self._groups.group

    @property
    def mesh(self) -> DeviceMesh | None:
        """The DeviceMesh that this was made of, if it was."""
        return self._groups.mesh

    @property
    def _groups(self) -> groups.ContextGroups:
        known: groups.ContextGroups = registry.held_by(self.name)
        return known

    @property
    def _hosts(self) -> Any:
        return self._groups.hosts

    @property
    def asks(self) -> bool:
        """Whether calls are compared between ranks."""
        return self.check and self._hosts is not None

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
        return self._agreed(
            "", seqlen=seqlen, cu_seqlens=cu_seqlens, causal=causal, window_size=window_size,
            heads=heads, heads_k=heads_k, head_dim=head_dim, dtype=dtype, block=block, sizes=sizes,
        )  # fmt: skip

    def _agreed(self, besides: str, **options: Any) -> Plan:
        """:meth:`plan_alone`, if all ranks have it, and the same ``besides``."""
        problem, plan = None, None
        try:
            plan = self.plan_alone(**options)
        except Exception as error:  # whatever it is, the other ranks must not wait
            problem = error
        self.agree("none" if plan is None else f"plan {plan.digest}, {plan!r}{besides}", problem)
        assert plan is not None
        return plan

    def plan_alone(
        self,
        seqlen: int | None = None,
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
        lengths = arguments.lengths(seqlen, cu_seqlens)
        validate.flag("causal", causal)
        arguments.check_window(window_size)
        validate.count("block", block, 1)
        arguments.check_heads(heads, heads_k)
        validate.count("head_dim", head_dim, 1)
        arguments.check_dtype(dtype)
        plan = Plan(
            lengths, cu_seqlens is not None, self.size, 1, "all_gather", "contiguous",
            bool(causal), (int(window_size[0]), int(window_size[1])), block,
            self._sizes(sizes, lengths), self.head_groups, self.name,
        )  # fmt: skip
        plan = shared(self._chosen(plan, heads, heads_k or heads, head_dim, dtype))
        plan.__dict__["owner"] = self
        if plan not in self._recent:
            self._recent.append(plan)
        return plan

    def _chosen(
        self, plan: Plan, heads: int | None, heads_k: int | None, dim: int, dtype: torch.dtype
    ) -> Plan:
        name = self.strategy
        if name == "auto" and self._is_2d:
            name = "two_dimensional"
        elif name == "auto" and heads and heads_k:
            pairs = sum(layouts.visible_pairs(0, n, n, plan.window) for n in plan.lengths)
            sizes = Sizes(plan.total, pairs, heads, heads_k, dim, dtype)
            name = strategies.fastest(sizes, self.size, self.links)
        elif name == "auto":
            name = "all_gather"
        strategy = STRATEGIES[name]
        layout = self.layout
        if plan.sizes:
            layout = "contiguous"
        elif layout == "auto":
            layout = "contiguous"
            if strategy.balances and plan.window[1] >= 0:
                layout = "zigzag" if len(plan.lengths) == 1 else "balanced"
        inner = strategy.inner(self.size, self.mesh)
        return replace(plan, strategy=name, inner=inner, layout=layout)

    def _sizes(self, sizes: Sequence[int] | None, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if sizes is None:
            return ()
        sizes = tuple(arguments.whole_list("sizes", sizes))
        for n in sizes:
            validate.count("sizes' entries", n, 0)
        if len(sizes) != self.size or min(sizes) < 0 or sum(sizes) != sum(lengths):
            raise ValueError(
                f"sizes is {sizes}; expected the tokens of {self.size} ranks, {sum(lengths)} in all"
            )
        if self.layout not in ("auto", "contiguous"):
            raise ValueError(f"sizes is given, and layout {self.layout!r}: sizes are contiguous")
        return sizes

    @torch.compiler.disable
    def plan_of_parts(
        self, rows: int, problem: Exception | None = None, besides: str = "", **options: Any
    ) -> Plan:
        """The plan of a dense batch whose tokens are already on the ranks, in order. It gathers the
        number of tokens of each rank.

        Args:
            rows: tokens of this rank.
            problem: an error of this rank's call, which all ranks raise.
            besides: a text that must be equal on all ranks.
            options: of :meth:`plan`, but seqlen, cu_seqlens and sizes.
        """
        sizes = agreement.counts(self._hosts, rows, problem)
        return self._agreed(besides, seqlen=sum(sizes), sizes=sizes, **options)

    def shard(self, x: Tensor, plan: Plan, dim: int = 1) -> Tensor:
        """This rank's tokens of the whole batch's ``x``, in the plan's order; differentiable.

        Args:
            x: with all tokens in ``dim``: ids, labels, embeddings, ...; the same on every rank.
            plan: of this ContextParallel.
            dim: the dimension of tokens; 0 of packed batches.

        Raises:
            ValueError: x has not as many tokens as the plan.
        """
        self._check_plan(plan)
        plan.check_tokens("x", x, dim)
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
        problem, what = None, ""
        try:
            self._check_plan(plan)
            plan.check_tokens("x", x, dim, self.rank)
            dim = dim % x.dim()
            rest = [n for i, n in enumerate(x.shape) if i != dim]
            what = f"unshard of {rest}, {x.dtype} {x.device.type}, plan {plan.digest}"
        except Exception as error:
            problem = error
        self.agree(what, problem)
        longest = layouts.most_rows(plan.parts)
        rows = to_rows(x.detach().movedim(dim, 0).unsqueeze(0), longest)
        gathered, work = comm.all_gather(rows, self.group if self.size > 1 else None)
        work.wait()
        place = plan.slots(plan.parts, x.device)
        whole = gathered if place is None else gathered.index_select(0, place)
        return whole.squeeze(1).movedim(0, dim)

    def position_ids(self, plan: Plan, device: torch.device | str | None = None) -> Tensor:
        """int64 (rows,): positions of this rank's tokens in their documents."""
        return plan.position_ids(self.rank, device)

    def _check_plan(self, plan: Any) -> None:
        if check_plan(plan).ranks != self.size:
            raise ValueError(f"plan is of {plan.ranks} ranks; this ContextParallel has {self.size}")

    def agree(self, what: str, problem: Exception | None = None) -> None:
        """Raises the same error on all ranks if one has a problem, or if ``what`` differs."""
        if self.check or self._hosts is None:
            try:
                agreement.agree(self._hosts, what, problem or self._values.problem())
            except Exception:
                self._values.forget()
                raise
        elif problem is not None:
            raise problem

    @contextmanager
    def agreeing(self, what: str, problem: Exception | None = None) -> Iterator[None]:
        """:meth:`agree` around a block: a problem is raised at once, else the block's first message
        waits for the other ranks."""
        if self.check:
            problem = problem or self._values.problem()
        if problem is not None or self._hosts is None or not self.check:
            self.agree(what, problem)
            yield
        else:
            with agreement.agreeing(self._hosts, what, self._values.forget):
                yield

    def compare(self, tensors: dict[str, Tensor | None]) -> None:
        """Starts to compare values of tensors on GPUs between ranks; a later call raises the error.
        :meth:`agree` compares those on the CPU."""
        if self.check and self.size > 1:
            self._values.compare(tensors, self.group)

    def __repr__(self) -> str:
        return (
            f"ContextParallel(rank {self.rank} of {self.size}, strategy={self.strategy!r}, "
            f"layout={self.layout!r})"
        )


def context_named(name: str) -> ContextParallel:
    """The ContextParallel of a name.

    Raises:
        ValueError: it does not exist any more.
    """
    cp: ContextParallel | None = registry.find(name)
    if cp is None:
        raise ValueError(
            "plan was made by no ContextParallel that this process has: call its plan()"
        )
    return cp


def context_of(plan: Plan) -> ContextParallel:
    """The ContextParallel that made a plan."""
    return context_named(plan.context) if plan.owner is None else plan.owner


def check_plan(plan: Any) -> Plan:
    """Refuses all but plans."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan is {validate.kind_of(plan)}; expected what ContextParallel.plan returns"
        )
    return plan
