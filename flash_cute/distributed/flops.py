"""The FLOPs that FlopCounterMode counts for the ops of :mod:`flash_cute.distributed.cp_ops`: this
rank's matrix products, of whole tiles, as :mod:`flash_cute.ops.flops` counts them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_cute.distributed import cp_ops
from flash_cute.distributed.all_gather import window_of
from flash_cute.distributed.groups import groups_of
from flash_cute.distributed.plan import Plan, plan_of
from flash_cute.distributed.strategies import over_tokens
from flash_cute.ops.typed import FwdCall
from flash_cute.ops.when_imported import when_imported


def _forward(plan: str, asked: str, *args: Any, **_: Any) -> int:
    q, _, v = args[:3]
    return 2 * _pairs(plan_of(plan), FwdCall(*args)) * (q.shape[-1] + v.shape[-1])


def _backward(
    plan: str, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any, **_: Any
) -> int:
    q, _, v = args[:3]
    return 2 * _pairs(plan_of(plan), FwdCall(*args)) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _pairs(plan: Plan, call: FwdCall) -> int:
    """Pairs of a query and a key in the tiles of this rank, of all heads and batch entries."""
    mine = plan.outer_parts[groups_of(plan).outer_rank]
    pairs = sum(
        tile.q_len * tile.k_len
        for runs in over_tokens(plan).keys(plan)
        for launch in plan.launches(mine, runs, window_of(call), call.alibi_slopes is not None)
        for tile in launch
    )
    return len(call.q) * call.q.shape[2] * pairs


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(cp_ops.OPS.cp_attention, get_raw=True)(_forward)
    register_flop_formula(cp_ops.OPS.cp_attention_backward, get_raw=True)(_backward)


when_imported("torch.utils.flop_counter", _register)
