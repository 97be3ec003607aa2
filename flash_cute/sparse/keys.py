"""Codes of tiles without the keys that nobody is to see, such as padding."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute.sparse import bits
from flash_cute.sparse.lists import HALF, QUADRANTS

_LEFT, _RIGHT = 0b0101, 0b1010  # quadrants of the first keys of a tile, and of the last


def codes_of_keys(
    codes: Tensor, masks: Tensor | None, kept: Tensor, seqlen_k: int
) -> tuple[Tensor, Tensor | None]:
    """``codes`` and ``masks`` of what they hold of the keys that are ``kept``, bool (batch or 1,
    seqlen_k)."""
    columns = codes.shape[-1]
    codes = codes.expand(max(len(codes), len(kept)), -1, -1, -1)
    kept = kept.expand(len(codes), -1)
    at = bits.positions_of_part(slice(0, columns), seqlen_k, kept.device)
    halves = kept[:, at].unflatten(-1, (columns, 2, HALF))
    some, every = (x[:, None, None] for x in (halves.any(-1), halves.all(-1)))
    is_whole = every.all(-1)
    seen = codes & (some * some.new_tensor([_LEFT, _RIGHT], dtype=torch.int32)).sum(-1).int()
    changed = torch.where((codes < QUADRANTS) | (seen == 0), seen, codes)
    has_part = (some & ~every).any(-1) | ((codes >= QUADRANTS) & ~is_whole)

    def visible(tiles: bits.Coordinates) -> Tensor:
        batch, head, row, column = tiles
        of_keys = kept[batch[:, None], bits.positions(column[:, None], seqlen_k)]
        return bits.pairs(codes[batch, head, row, column], masks) & of_keys[:, None]

    return bits.with_masks(changed, has_part & (seen != 0), visible, masks)
