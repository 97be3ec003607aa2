"""The process groups of a :class:`ContextParallel`: found, or made for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flash_cute import _torch_internals as internals
from flash_cute.distributed import registry
from flash_cute.distributed.plan import Plan


@dataclass(frozen=True)
class Groups:
    """Where this rank is. Groups of one rank are None.

    Attributes:
        size, rank: of all that share tokens.
        whole: their group.
        outer, outer_rank: ranks with as many tokens each, which all_gather and ring go over.
        inner, inner_rank: ranks that exchange tokens for heads.
    """

    size: int
    rank: int
    whole: Any
    outer: Any
    outer_rank: int
    inner: Any
    inner_rank: int


@dataclass(frozen=True)
class ContextGroups:
    """The process groups of a :class:`ContextParallel`.

    Attributes:
        group: all ranks that share tokens.
        hosts: the same ranks, for tensors on the CPU; None if there is one rank.
        mesh: the mesh that was given, or None.
        by_inner: the groups, by the number of ranks that share heads.
    """

    group: Any
    hosts: Any
    mesh: DeviceMesh | None
    by_inner: dict[int, Groups]


def groups_in(group: Any, mesh: DeviceMesh | None, timeout: timedelta | None) -> ContextGroups:
    """The groups for the ranks of ``group``, which are those of ``mesh`` if it is given."""
    size = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    whole = None if size == 1 else group
    by_inner = {}
    if mesh is not None and mesh.ndim == 2:
        outer, inner = (None if mesh.size(i) == 1 else mesh.get_group(i) for i in (0, 1))
        by_inner[mesh.size(1)] = Groups(
            size, rank, whole, outer, mesh.get_local_rank(0), inner, mesh.get_local_rank(1)
        )
    by_inner[size] = Groups(size, rank, whole, None, 0, whole, rank)
    by_inner[1] = Groups(size, rank, whole, whole, rank, None, 0)
    hosts = None if whole is None else group_of_hosts(whole, timeout)
    return ContextGroups(group, hosts, mesh, by_inner)


def groups_of(plan: Plan) -> Groups:
    """The groups in which a plan's strategy communicates."""
    known: ContextGroups = registry.held_by(plan.context)
    return known.by_inner[plan.inner]


def group_of_all(mesh: DeviceMesh, timeout: timedelta | None) -> Any:
    """One group of all ranks of a mesh, in the order of its dimensions; made once."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"the mesh's ranks are {ranks}; expected them in ascending order")
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return _made(mesh.get_group(0), ranks, timeout)


def group_of_hosts(group: Any, timeout: timedelta | None) -> Any:
    """A group of the same ranks for tensors on the CPU, so that agreement does not wait for GPUs.

    It is used for nothing else: gloo aborts a process that receives a message of another size.
    """
    return _made(group, dist.get_process_group_ranks(group), timeout, "gloo")


def part_of(group: Any, size: int) -> Any:
    """The group of ``size`` consecutive ranks of a group that this one is in; made once."""
    ranks = dist.get_process_group_ranks(group)
    if size == len(ranks):
        return group
    first = dist.get_rank(group) // size * size
    return _made(group, ranks[first : first + size])


def _made(
    group: Any, ranks: list[int], timeout: timedelta | None = None, backend: str | None = None
) -> Any:
    """A group of these ranks, with ``group``'s timeout and backend if none is given. It is made
    once and lives as long as ``group``: ranks may garbage-collect its users at different times."""
    of_group = registry.made_for(group)
    key = (tuple(ranks), timeout, backend)
    if key not in of_group:
        of_group[key] = dist.new_group(
            ranks,
            timeout=internals.timeout_of(group) if timeout is None else timeout,
            backend=backend or str(dist.get_backend_config(group)),
            use_local_synchronization=True,
        )
    return of_group[key]


def device_of(group: Any) -> torch.device:
    """The device of tensors of a group's default backend."""
    if group is None or "nccl" not in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
