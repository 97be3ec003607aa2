"""Blocks of tokens that see each other in both directions, such as the tokens of an image, in a
layer that is otherwise causal, or causal within a window.

Two calls compute it: the causal one, and one over the blocks in reverse order, in which each token
sees the later tokens of its block. Their log-sum-exps are the weights of their outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_cute import functional
from flash_cute.integrations.transformers import mask_cache

NONE = -1  # the block number of tokens outside of all blocks


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch, by positions among its tokens laid end to end.

    Attributes:
        seqlen_k: how many keys of a sequence are in use.
        padding: bool (batch, seqlen_k), True takes part; None if all do.
        queries: int64 (total,), each block's tokens without its last, in reverse order.
        keys: int64 (total,), each block's tokens without its first, in reverse order: query i of a
            block sees its keys up to i, the later tokens.
        offsets: int32 (blocks + 1,), where each block begins in queries and keys.
        longest: the largest number of queries of a block.
    """

    seqlen_k: int
    padding: Tensor | None
    queries: Tensor
    keys: Tensor
    offsets: Tensor
    longest: int

    @classmethod
    def of(cls, mask: Tensor, seqlen: int) -> Blocks:
        """The blocks of a mask (:func:`mask`) whose last ``seqlen`` keys are the queries'. Waits
        for the GPU."""
        padding, numbers = mask[:, 0] != 0, mask[:, 1, -seqlen:]
        batches, places = (numbers != NONE).nonzero(as_tuple=True)
        tokens = (batches * seqlen + places).flip(0)
        labels = (batches * (numbers.amax() + 1) + numbers[batches, places]).flip(0)
        labels, order = labels.sort(stable=True)
        tokens = tokens[order]
        joined = labels[1:] == labels[:-1]
        _, lengths = labels[1:][joined].unique_consecutive(return_counts=True)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        longest = int(lengths.max()) if len(lengths) else 0
        everything = None if padding.all() else padding
        queries, keys = tokens[1:][joined], tokens[:-1][joined]
        return cls(mask.shape[-1], everything, queries, keys, offsets, longest)


def mask(padding: Tensor | None, numbers: Tensor) -> Tensor:
    """int32 (batch, 2, keys): which keys take part, and the numbers of their blocks. They are
    values because attributes are lost when a tensor moves to another device."""
    taking_part = torch.ones_like(numbers, dtype=torch.bool) if padding is None else padding
    numbers = numbers.clamp(min=NONE).masked_fill(~taking_part, NONE)
    return torch.stack([taking_part.int(), numbers.int()], 1)


def is_mask(x: Tensor) -> bool:
    return x.dim() == 3 and x.shape[1] == 2 and x.dtype == torch.int32


def found(x: Tensor, seqlen: int, layer: int | None) -> Blocks:
    """The blocks of a mask, computed once for all layers that get it."""
    key = mask_cache.CacheKey.at([x], layer)
    known, blocks = mask_cache.cached_result(key)
    if not known:
        blocks = Blocks.of(x, seqlen)
        mask_cache.store(key, blocks)
    return blocks


def joined(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    options: dict[str, Any],
) -> Tensor:
    """Merges the causal result, ``out`` (batch, seqlen, heads, dim_v) and ``lse`` (batch, seqlen,
    heads), with attention of these tokens' q to later k and v of their blocks."""
    if not len(blocks.queries):
        return out
    rows = out.flatten(0, 1)
    causal, causal_lse = rows.index_select(0, blocks.queries), lse.flatten(0, 1)[blocks.queries]
    keys, values = (x.flatten(0, 1).index_select(0, blocks.keys) for x in (k, v))
    later, later_lse = functional.flash_attn_varlen_func(
        q.flatten(0, 1).index_select(0, blocks.queries), keys, values, blocks.offsets,
        blocks.offsets, blocks.longest, blocks.longest,
        **options | {"causal": True, "window_size": (-1, -1), "sink": None, "return_lse": True},
    )  # fmt: skip
    weight = torch.sigmoid(later_lse.t() - causal_lse).unsqueeze(-1)
    both = torch.lerp(causal.to(weight.dtype), later.to(weight.dtype), weight)
    return rows.index_copy(0, blocks.queries, both.to(rows.dtype)).view_as(out)
