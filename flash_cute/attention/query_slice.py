"""Attention of a slice of a sequence's queries to the sequence's keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_cute.core.padding import packing
from flash_cute.functional import flash_attn_func, flash_attn_varlen_func


def attend_slice(q: Tensor, k: Tensor, v: Tensor, start: int, options: dict[str, Any]) -> Tensor:
    """out (batch, rows, heads, dim) of q (batch, rows, heads, dim), rows [start, start + rows) of a
    sequence with k and v (batch, seqlen, heads_k, dim).

    ``options`` are :func:`flash_cute.flash_attn_func`'s, whose masks are aligned to the last key:
    keys after the last visible one are left out, and the window is shifted.
    """
    left, right = options["window_size"]
    right = 0 if options["causal"] else right
    stop, seqlen = start + q.shape[1], k.shape[1]
    end = seqlen if right < 0 else min(seqlen, stop + right)
    ahead = end - stop
    window = (-1 if left < 0 else left + ahead, -1 if right < 0 else right - ahead)
    options = options | {"causal": False, "window_size": window}
    return flash_attn_func(q, k[:, :end], v[:, :end], **options)


def attend_masked_slice(
    q: Tensor, k: Tensor, v: Tensor, start: int, mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """:func:`attend_slice` with a ``mask`` (batch, seqlen): tokens with 0 take no part, and their
    out is 0. Causal masks and windows count only tokens that take part.

    Raises:
        NotImplementedError: a window that looks ahead, or is bounded only to the left.
    """
    left, right = options["window_size"]
    right = 0 if options["causal"] else right
    if right > 0 or (right < 0 and left >= 0):
        raise NotImplementedError(
            f"attention_mask is given, and window_size {options['window_size']}; with a mask the "
            "window must end at the query itself (causal), or be unbounded"
        )
    stop = start + q.shape[1]
    keys = packing(mask, k.flatten(2))
    rows = packing(mask[:, start:stop], q.flatten(2))
    heads, heads_k = q.shape[2], k.shape[2]
    used = keys.lengths if right < 0 else (mask[:, :stop] != 0).sum(1).int()
    packed_q = rows.pack(q.flatten(2)).unflatten(-1, (heads, -1))
    packed_k, packed_v = (keys.pack(x.flatten(2)).unflatten(-1, (heads_k, -1)) for x in (k, v))
    out = flash_attn_varlen_func(
        packed_q, packed_k, packed_v, rows.offsets, keys.offsets, q.shape[1], k.shape[1],
        seqused_q=rows.lengths, seqused_k=used, **options,
    )  # fmt: skip
    return rows.unpack(out.flatten(1)).unflatten(-1, (heads, -1))
