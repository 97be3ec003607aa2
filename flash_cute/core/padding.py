"""Moves the tokens that a mask keeps to the front of their sequences.

The varlen functions then skip all others: no score matrix is masked, and there is no host
synchronisation, since no size depends on the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a batch move to; those that take part keep their order.

    Attributes:
        mask: bool (batch, seqlen), True takes part.
        place: int64 (batch * seqlen,), the row of each token once they are packed.
        lengths: int32 (batch,), how many tokens of each sequence take part.
        offsets: int32 (batch + 1,), where sequences begin, which packing does not change.
    """

    mask: Tensor
    place: Tensor
    lengths: Tensor
    offsets: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """(batch, seqlen, width) to (batch * seqlen, width), masked tokens as 0."""
        rows = x.masked_fill(~self.mask.unsqueeze(-1), 0).flatten(0, 1)
        return torch.zeros_like(rows).index_copy(0, self.place, rows)

    def unpack(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`pack`, to (batch, seqlen, width)."""
        return rows.index_select(0, self.place).unflatten(0, self.mask.shape)


def packing(mask: Tensor, tokens: Tensor) -> Packing:
    """The packing of tokens (batch, seqlen, width) by the caller's ``attention_mask``.

    Raises:
        TypeError, ValueError: :func:`check_mask` refuses the mask.
    """
    check_mask(mask, tokens)
    mask = mask != 0
    batch, seqlen = mask.shape
    lengths = mask.sum(1)
    before = torch.where(mask, mask.cumsum(1), lengths.unsqueeze(1) + (~mask).cumsum(1)) - 1
    firsts = torch.arange(batch, device=mask.device).unsqueeze(1) * seqlen
    return Packing(
        mask, (firsts + before).flatten(), lengths.int(), offsets(batch, seqlen, mask.device)
    )


def offsets(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """cu_seqlens int32 (batch + 1,) of sequences of one length."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen


def check_mask(mask: Any, tokens: Tensor) -> None:
    """Refuses a mask that has not one entry, 0 or 1, for each of the tokens (batch, seqlen, ..)."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask is {type(mask).__name__}; expected a torch.Tensor")
    in_floats = mask.dtype.is_floating_point
    if mask.dtype not in MASK_DTYPES and (not in_floats or torch.compiler.is_compiling()):
        raise TypeError(
            f"attention_mask has dtype {mask.dtype}; expected bool or an integer dtype, in which 1 "
            "takes part (floats of 0 and 1 will do outside of torch.compile)"
        )
    if mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected (batch, seqlen) = "
            f"{tuple(tokens.shape[:2])}, one entry a token"
        )
    if mask.device != tokens.device:
        raise ValueError(f"attention_mask is on {mask.device}, the tokens on {tokens.device}")
    # A mask that is added to scores has 0 where this one has 1, and no 1 at all.
    if in_floats and not mask.is_meta and not _takes_part(mask):
        raise ValueError(
            f"attention_mask has dtype {mask.dtype} and is not made of 0 and 1 with a 1 in each "
            "sequence; expected 1 where a token takes part, and 0 elsewhere (a mask that is added "
            "to scores is not supported)"
        )


def _takes_part(mask: Tensor) -> bool:
    """Whether floats (batch, seqlen) are 0 and 1, with a 1 in each sequence."""
    if mask.numel() == 0:
        return True
    ones = mask == 1
    return bool((ones | (mask == 0)).all() and ones.any(1).all())
