"""Masks of :mod:`flash_cute.reference`: which keys each query sees.

:mod:`flash_cute.sparse.lists` defines lists of tiles, which are read here entry by entry.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor


def visible(
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which keys each query sees: bool (seqlen_q, seqlen_k), aligned to the bottom right."""
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    keys = torch.arange(seqlen_k, device=device)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    right = 0 if is_causal else window_size_right
    all_keys = seqlen_q + seqlen_k  # a window that hides nothing, and cannot overflow int64
    if window_size_left >= 0:
        seen &= keys >= diagonal - min(window_size_left, all_keys)
    if right >= 0:
        seen &= keys <= diagonal + min(right, all_keys)
    return seen


def listed(tile_lists: Tensor, tile_bits: Tensor | None, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Which keys each query sees by lists with query tiles as rows: bool (batch or 1, heads or 1,
    seqlen_q, seqlen_k). Entries of tiles beyond the sequences are ignored."""
    batch, heads, rows = tile_lists.shape[:3]
    seen = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=tile_lists.device)
    for b, h, i in product(range(batch), range(heads), range(rows)):
        (count, _), *entries = tile_lists[b, h, i].tolist()
        for column, code in entries[:count]:
            tile = seen[b, h, 128 * i : 128 * (i + 1), 128 * column : 128 * (column + 1)]
            if column >= 0 and tile.numel() > 0:
                pairs = _pairs(code, tile_bits, seen.device)
                tile |= pairs[: tile.shape[0], : tile.shape[1]]
    return seen


def _pairs(code: int, tile_bits: Tensor | None, device: torch.device) -> Tensor:
    """The visible pairs of a tile with a code, bool (128, 128)."""
    quadrants = torch.tensor([code & 1, code & 2, code & 4, code & 8], device=device) != 0
    pairs = quadrants.view(2, 2).repeat_interleave(64, 0).repeat_interleave(64, 1)
    if code < 16 or tile_bits is None:
        return pairs
    words = tile_bits[code // 16 - 1]
    return pairs & torch.stack([words >> c & 1 for c in range(32)], -1).flatten(1).bool()
