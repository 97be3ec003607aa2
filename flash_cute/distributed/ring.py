"""Strategy ``ring``: keys and values go round the ranks (Ring Attention, arXiv 2310.01889).

A rank holds the keys and values of two ranks at a time: its memory does not grow with the number of
ranks. The next ones travel while these are attended to. In backward their gradients go round behind
them, in fp32, and at the end home. Results of steps are merged in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute.distributed import comm, layouts
from flash_cute.distributed.all_gather import to_rows, window_of
from flash_cute.distributed.comm import Group
from flash_cute.distributed.costs import Links, Sizes
from flash_cute.distributed.layouts import Runs
from flash_cute.distributed.local import Output, Saved, differentiate, takes_sink
from flash_cute.distributed.plan import Plan
from flash_cute.distributed.strategy import Strategy
from flash_cute.distributed.tiles import Launches
from flash_cute.ops.typed import FwdCall

MERGE_BYTES = 24  # of memory that one merged element of the output moves


class Ring(Strategy):
    """See the module."""

    name = "ring"

    def expected_time(self, sizes: Sizes, ranks: int, links: Links) -> float | None:
        """All travels are under products; results are merged in memory."""
        merged = (ranks - 1) / ranks * sizes.total * sizes.width / 2 * MERGE_BYTES
        hidden = max(sizes.products(ranks, links), sizes.keys_to_all(ranks, links))
        return hidden + merged / (links.memory_gb_s * 1e9)

    def keys(self, plan: Plan) -> tuple[Runs, ...]:
        return plan.outer_parts

    def forward(self, plan: Plan, rank: int, group: Group, call: FwdCall) -> tuple[Tensor, Tensor]:
        q, k, v, sink = call.q, call.k, call.v, call.sink
        hops = plan.hops(window_of(call))
        output = Output(q, v, merges=True)
        kv = _travelling(plan, k, v)
        works: comm.Work = comm.Done()
        for hop in range(hops):
            works.wait()
            here = kv
            if hop + 1 < hops:
                kv, works = comm.rotate(here, 1, group)
            keys, values = _split(here, k, v)
            launches = _launches(plan, rank, hop, call)
            joins = takes_sink(launches, q.shape[1])
            output.attend(call._replace(k=keys, v=values, sink=sink if joins else None), launches)
            sink = None if joins else sink
        return output.result(q, sink)

    def backward(
        self, plan: Plan, rank: int, group: Group, call: FwdCall, saved: Saved
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = call.q, call.k, call.v
        hops = plan.hops(window_of(call))
        dtype = saved.lse.dtype
        dq = torch.zeros_like(q, dtype=dtype)
        kv = _travelling(plan, k, v)
        works: comm.Work = comm.Done()
        of_sums: comm.Work = comm.Done()
        sums: Tensor | None = None  # of the ranks that had these keys before
        for hop in range(hops):
            works.wait()
            here = kv
            if hop + 1 < hops:
                kv, works = comm.rotate(here, 1, group)
            dkv = torch.zeros_like(here, dtype=dtype)
            keys, values = _split(here, k, v)
            launches = _launches(plan, rank, hop, call)
            gradients = (dq, *_split(dkv, k, v))
            differentiate(saved, call._replace(k=keys, v=values), launches, gradients)
            if sums is not None:
                of_sums.wait()
                dkv += sums
            # on to the next rank, at the end to the one that the keys are of
            to = 1 if hop + 1 < hops else -hop
            sums, of_sums = comm.rotate(dkv, to, group)
        of_sums.wait()
        assert sums is not None
        dk, dv = _split(sums[: k.shape[1]], k, v)
        return dq, dk, dv


def _travelling(plan: Plan, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values concatenated, (rows, batch, heads_k, dim + dim_v)."""
    longest = layouts.most_rows(plan.outer_parts)
    return to_rows(torch.cat((k, v), -1), longest)


def _split(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = kv.transpose(0, 1).split((k.shape[-1], v.shape[-1]), -1)
    return keys, values


def _launches(plan: Plan, rank: int, hop: int, call: FwdCall) -> Launches:
    """The launches of the rank's queries over keys of the rank ``hop`` ranks before it."""
    parts = plan.outer_parts
    alibi = call.alibi_slopes is not None
    return plan.launches(parts[rank], parts[rank - hop], window_of(call), alibi)
