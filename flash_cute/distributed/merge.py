"""Merges results of attention over parts of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute.distributed.trace import named


@named("merge")
def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds the result over more keys to ``out`` and ``lse``, in place.

    Args:
        out: (batch, seqlen, heads, dim_v), fp32 or fp64.
        lse: (batch, heads, seqlen), natural log, in out's dtype. Rows that saw no key yet have out
            0 and lse -inf.
        part: as out, any dtype. Rows that see none of its keys have part 0 and part_lse -inf.
        part_lse: as lse.
    """
    weight = torch.sigmoid(part_lse - lse).masked_fill(part_lse == -torch.inf, 0)
    out.lerp_(part.to(out.dtype), rows(weight))
    torch.logaddexp(lse, part_lse, out=lse)  # -inf of two -inf


def merge_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse with one more logit a head, ``sink`` (heads,), which has no value."""
    logit = sink.to(lse.dtype)[:, None]
    total = torch.logaddexp(lse, logit)
    weight = torch.sigmoid(lse - logit).masked_fill(lse == -torch.inf, 0)
    return out * rows(weight).to(out.dtype), total


def sink_gradient(lse: Tensor, softmax_d: Tensor, sink: Tensor) -> Tensor:
    """fp32 (heads,) from ``lse`` with the sink and ``softmax_d`` = rowsum(dout * out) - dlse, both
    (batch, heads, seqlen)."""
    weight = torch.exp(sink.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return (weight * softmax_d).sum((0, 2)).neg().float()


def rows(statistic: Tensor) -> Tensor:
    """(batch, heads, seqlen) as a factor of (batch, seqlen, heads, dim)."""
    return statistic.transpose(1, 2).unsqueeze(-1)
