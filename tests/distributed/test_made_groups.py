"""Groups that are made for others: once, with their backend and timeout; and what errors forget."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from flash_cute import _torch_internals as internals
from flash_cute.distributed import ContextParallel, cp_attention, groups
from flash_cute.testing import distributed as cases
from flash_cute.testing.ranks import Ranks


def parts() -> tuple[str, str, timedelta | None, bool]:
    """Backends of a group, and of its half; the half's timeout, and whether it is made once."""
    group = dist.new_group(backend="cpu:gloo", timeout=timedelta(seconds=17))
    half = groups.part_of(group, 2)
    configs = [str(dist.get_backend_config(x)) for x in (group, half)]
    return *configs, internals.timeout_of(half), groups.part_of(group, 2) is half


def meshes() -> list[Any]:
    """Of four of five ranks, in two dimensions: groups, and how many there are, of three contexts
    of one mesh, of one timeout and of another; and the first one's timeout."""
    if dist.get_rank() == 4:
        for _ in range(2):  # as many groups as a mesh makes, which names are counted by
            DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        return []
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    counts, made = [], []
    for timeout in (None, None, timedelta(seconds=19)):
        made.append(ContextParallel(mesh, timeout=timeout))
        counts.append(len(dist.distributed_c10d._world.pg_names))
    plan = made[1].plan(8)
    q = torch.ones(1, plan.rows(made[1].rank), 4, 8)
    error = (cp_attention(q, q, q, plan) - 1).abs().max().item()
    return [
        made[0].group is made[1].group, counts[1] - counts[0], counts[2] > counts[1], error,
        internals.timeout_of(made[2].group),
    ]  # fmt: skip


def test_parts_have_the_backend_and_timeout_of_their_group(four):
    for group, half, timeout, is_once in four.run(parts):
        assert group == half == "cpu:gloo" and timeout == timedelta(seconds=17) and is_once


def test_a_mesh_has_one_group_of_all_its_ranks():
    with Ranks(5, seconds=20.0, method="forkserver") as ranks:
        *of_mesh, other = ranks.run(meshes)
    assert other == []
    for is_same, more, others, error, timeout in of_mesh:
        assert is_same and more == 0 and others and error < 1e-6
        assert timeout == timedelta(seconds=19)


class Later:
    """An event that has not come yet."""

    def query(self) -> bool:
        return False


@mock.patch("torch.cuda.is_current_stream_capturing", lambda: False)  # which CPU builds lack
def what_is_kept(strategy: str) -> tuple[int, int, int]:
    """Comparisons under way: those there were, after a checkpoint that stops its recomputation
    early, and after a call in which ranks differ."""
    cp = cases.context(strategy, "contiguous", 1, "cpu")
    plan = cp.plan(16)
    under_way = cp._values._under_way
    under_way.append((["sink"], torch.zeros(2), Later()))  # type: ignore[arg-type]
    counts = [len(under_way)]
    q = torch.randn(1, 8, 4, 8, requires_grad=True)
    out = checkpoint(lambda x: cp_attention(x, x, x, plan), q, use_reentrant=False)
    out.sum().backward()
    counts.append(len(under_way))
    with pytest.raises(ValueError, match="ranks differ"):
        cp_attention(q, q, q, plan, softcap=float(cp.rank))
    return *counts, len(under_way)


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_only_errors_of_all_ranks_drop_comparisons(two, strategy):
    assert two.run(what_is_kept, strategy) == [(1, 1, 0)] * 2
