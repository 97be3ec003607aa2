"""Strategy ``all_gather``: every rank gathers all keys and values, some heads at a time.

The next heads' keys and values travel while this ones' are attended to; in backward so do the sums
of their gradients, in fp32. Tokens are put into the order of their documents, so that one call sees
all keys up to a part's end: nothing is merged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute.distributed import comm, layouts
from flash_cute.distributed.comm import Group
from flash_cute.distributed.costs import Links, Sizes
from flash_cute.distributed.layouts import Runs
from flash_cute.distributed.local import (
    Output,
    Saved,
    call_of_heads,
    differentiate,
    merges,
    takes_sink,
)
from flash_cute.distributed.plan import Plan
from flash_cute.distributed.strategy import Strategy
from flash_cute.distributed.tiles import Launches
from flash_cute.ops.typed import FwdCall

GATHERED_BYTES = 16 * 2**30  # keys and values of one layer may take so much memory


class AllGather(Strategy):
    """See the module."""

    name = "all_gather"

    def expected_time(self, sizes: Sizes, ranks: int, links: Links) -> float | None:
        """All but the first of the groups of heads travel under products."""
        if sizes.total * sizes.width_k * sizes.dtype.itemsize > GATHERED_BYTES:
            return None
        travels = sizes.keys_to_all(ranks, links)
        return max(sizes.products(ranks, links), travels / 2) + travels / 2

    def keys(self, plan: Plan) -> tuple[Runs, ...]:
        return (plan.whole,)

    def forward(self, plan: Plan, rank: int, group: Group, call: FwdCall) -> tuple[Tensor, Tensor]:
        q, k, v = call.q, call.k, call.v
        launches = _launches(plan, rank, call)
        output = Output(q, v, merges(launches))
        late_sink = None if takes_sink(launches, q.shape[1]) else call.sink
        if late_sink is not None:
            call = call._replace(sink=None)
        for heads_k, k_all, v_all in _gathered(plan, group, k, v):
            heads = query_heads(heads_k, q, k)
            output.of_heads(heads).attend(call_of_heads(call, heads, k_all, v_all), launches)
        return output.result(q, late_sink)

    def backward(
        self, plan: Plan, rank: int, group: Group, call: FwdCall, saved: Saved
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = call.q, call.k, call.v
        launches = _launches(plan, rank, call)
        dtype = saved.lse.dtype
        dq = torch.zeros_like(q, dtype=dtype)
        reductions = []
        for heads_k, k_all, v_all in _gathered(plan, group, k, v):
            heads = query_heads(heads_k, q, k)
            dkv = k.new_zeros(
                (plan.total, len(k), k_all.shape[2], k.shape[-1] + v.shape[-1]), dtype=dtype
            )
            dk, dv = dkv.transpose(0, 1).split((k.shape[-1], v.shape[-1]), -1)
            gradients = (dq[:, :, heads], dk, dv)
            call_of_part = call_of_heads(call, heads, k_all, v_all)
            differentiate(saved.of_heads(heads), call_of_part, launches, gradients)
            place = plan.slots(plan.outer_parts, k.device)
            if place is not None:
                padded = dkv.new_zeros(
                    (layouts.most_rows(plan.outer_parts) * plan.outer, *dkv.shape[1:])
                )
                dkv = padded.index_copy_(0, place, dkv)
            reductions.append((dkv, *comm.reduce_scatter(dkv, group)))
        parts = []
        for _, part, work in reductions:
            work.wait()
            parts.append(part[: k.shape[1]].transpose(0, 1))
        dk, dv = torch.cat(parts, 2).split((k.shape[-1], v.shape[-1]), -1)
        return dq, dk, dv


def to_rows(x: Tensor, rows: int) -> Tensor:
    """(batch, seqlen, ..) as contiguous (rows, batch, ..), padded with zeros."""
    x = x.transpose(0, 1)
    padding = rows - len(x)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)) if padding else x.contiguous()


def query_heads(heads_k: slice, q: Tensor, k: Tensor) -> slice:
    """The query heads that read these kv heads."""
    group = q.shape[2] // k.shape[2]
    return slice(heads_k.start * group, heads_k.stop * group)


def _launches(plan: Plan, rank: int, call: FwdCall) -> Launches:
    alibi = call.alibi_slopes is not None
    return plan.launches(plan.outer_parts[rank], plan.whole, window_of(call), alibi)


def window_of(call: FwdCall) -> layouts.Window:
    return call.window_size_left, call.window_size_right


def _gathered(
    plan: Plan, group: Group, k: Tensor, v: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some heads at a time: which, and all keys and values of theirs (batch, total, heads, dim), in
    order."""
    heads = k.shape[2]
    count = plan.head_groups if heads % plan.head_groups == 0 else 1
    size = heads // count
    place = plan.slots(plan.outer_parts, k.device)

    def start(first: int) -> tuple[Tensor, Tensor, comm.Work]:
        of_group = slice(first, first + size)
        kv = torch.cat((k[:, :, of_group], v[:, :, of_group]), -1)
        kv = to_rows(kv, layouts.most_rows(plan.outer_parts))
        return kv, *comm.all_gather(kv, group)

    under_way = start(0)
    for first in range(0, heads, size):
        _, kv, work = under_way
        work.wait()
        if first + size < heads:
            under_way = start(first + size)
        kv = (kv if place is None else kv.index_select(0, place)).transpose(0, 1)
        yield slice(first, first + size), *kv.split((k.shape[-1], v.shape[-1]), -1)
