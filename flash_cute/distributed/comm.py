"""The collectives that strategies use, by torch.distributed. Tensors are contiguous, and are split
along their first dimension. ``group`` None is a group of one. Each returns the result, and a
:class:`Work` to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flash_cute.distributed.trace import named


class Work(Protocol):
    """A running collective: after wait() kernels of this stream may read its result."""

    def wait(self) -> Any: ...


class Done:
    """The work of a collective that has nothing to do."""

    def wait(self) -> None: ...


Group = Any  # dist.ProcessGroup | None


class _PendingChecks(threading.local):
    def __init__(self) -> None:
        self.checks: list[Callable[[], object]] = []


_pending = _PendingChecks()


def defer_check(check: Callable[[], object]) -> None:
    """Calls ``check`` before this thread communicates, or in :func:`finish_pending_checks`."""
    _pending.checks.append(check)


def finish_pending_checks() -> None:
    """Runs the deferred checks, which wait for other ranks and raise if they do not agree."""
    while _pending.checks:
        _pending.checks.pop()()


# The names since torch 2.13, and those before.
start_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@named("all_gather")
def all_gather(x: Tensor, group: Group) -> tuple[Tensor, Work]:
    """x of every rank, one after the other: (ranks * rows, ..)."""
    if group is None:
        return x, Done()
    finish_pending_checks()
    out = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    return out, start_all_gather(out, x, group=group, async_op=True)


@named("reduce_scatter")
def reduce_scatter(x: Tensor, group: Group) -> tuple[Tensor, Work]:
    """This rank's part of the sum of x (ranks * rows, ..) over ranks: (rows, ..)."""
    if group is None:
        return x, Done()
    finish_pending_checks()
    out = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    return out, _reduce_scatter(out, x, group=group, async_op=True)


@named("all_to_all")
def all_to_all(x: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Part i of x (ranks * rows, ..) goes to rank i; the result has one part of each rank."""
    if group is None:
        return x, Done()
    finish_pending_checks()
    out = torch.empty_like(x)
    return out, dist.all_to_all_single(out, x, group=group, async_op=True)


@named("rotate")
def rotate(x: Tensor, steps: int, group: Group) -> tuple[Tensor, Work]:
    """x of the rank ``steps`` before this one; each sends to one rank and hears from one."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if steps % ranks == 0:
        return x, Done()
    finish_pending_checks()
    rank = dist.get_rank(group)
    flat, out = x.view(-1), torch.empty_like(x)
    to, of = ([0] * ranks for _ in range(2))
    to[(rank + steps) % ranks] = of[(rank - steps) % ranks] = flat.numel()
    work = dist.all_to_all_single(
        out.view(-1), flat, output_split_sizes=of, input_split_sizes=to, group=group, async_op=True
    )
    return out, work
