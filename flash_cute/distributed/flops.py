"""What FlopCounterMode counts for the ops of :mod:`flash_cute.distributed.cp_ops`: this rank's
matrix products, of whole tiles, as :mod:`flash_cute.ops.flops` counts them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_cute.distributed import cp_ops, layouts
from flash_cute.distributed.groups import groups_of
from flash_cute.distributed.plan import Plan, plan_of
from flash_cute.distributed.strategies import over_tokens
from flash_cute.ops.when_imported import when_imported


def _forward(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, *rest: Any, **_: Any) -> int:
    left, right, _, plan = rest[3:7]
    pairs = _pairs(plan_of(plan), (left, right), slopes is not None)
    return 2 * len(q) * q.shape[2] * pairs * (q.shape[-1] + v.shape[-1])


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    slopes: Tensor | None, *rest: Any, **_: Any,
) -> int:  # fmt: skip
    left, right, _, plan = rest[3:7]
    pairs = _pairs(plan_of(plan), (left, right), slopes is not None)
    return 2 * len(q) * q.shape[2] * pairs * (3 * q.shape[-1] + 2 * v.shape[-1])


def _pairs(plan: Plan, window: layouts.Window, alibi: bool) -> int:
    """Pairs of a query and a key in the tiles of this rank, of one head."""
    mine = plan.outer_parts[groups_of(plan).outer_rank]
    return sum(
        tile.q_len * tile.k_len
        for runs in over_tokens(plan).keys(plan)
        for launch in plan.launches(mine, runs, window, alibi)
        for tile in launch
    )


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(cp_ops.OPS.cp_attention, get_raw=True)(_forward)
    register_flop_formula(cp_ops.OPS.cp_attention_backward, get_raw=True)(_backward)


when_imported("torch.utils.flop_counter", _register)
