"""Lists of the tiles of a score matrix that attention visits, 128 queries by 128 keys each.

``codes`` int32 (batch or 1, heads or 1, rows of tiles, columns of tiles) say what of a tile is
visible: 0 nothing; else bits 0 to 3 are its quadrants of 64 queries by 64 keys (bit 1: the first
queries and the last keys), and the bits above are 1 + the number of the tile's mask of pairs, 0
without one (:mod:`flash_cute.sparse.bits`). Causal masks, windows and the ends of sequences are no
part of codes: a call hides those besides.

Lists int32 (.., rows of tiles, 1 + capacity, 2) hold of each row first its number of entries, and
15 if there are some and all of the row's tiles are wholly visible, or 0; then its tiles that are
not empty as pairs (column, code), columns ascending. What lies behind them is never read. Forward
has queries as rows, backward keys; codes keep their sense.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128  # queries, and keys, of a tile
HALF = 64  # a side of a quadrant
QUADRANTS = 16
"""Codes of what the quadrants alone say; a code is these plus 16 * (1 + the mask's number)."""


def tiles_of(seqlen: int) -> int:
    """Tiles that ``seqlen`` queries or keys take."""
    return -(-seqlen // TILE)


def tile_lists(codes: Tensor, capacity: int | None = None) -> Tensor:
    """Lists of the tiles of ``codes`` that are not empty; the device is not waited for.

    ``capacity``, by default the number of columns, is the most entries that a row of ``codes`` has,
    if less is known; entries beyond it would be left out.
    """
    columns = codes.shape[-1]
    lists: Tensor = torch.ops.flash_cute.tile_lists(
        codes.contiguous(), columns if capacity is None else min(capacity, columns)
    )
    return lists


def transposed(lists: Tensor, tiles: int) -> Tensor:
    """Lists whose rows are the ``tiles`` columns of ``lists``; the device is not waited for, and
    the result is bitwise repeatable."""
    of_columns: Tensor = torch.ops.flash_cute.transposed_tile_lists(lists, tiles)[0]
    return of_columns


def codes_of(lists: Tensor, tiles: int) -> Tensor:
    """The codes (.., rows, ``tiles``) of which ``lists`` were made; entries of other columns are
    ignored."""
    column, code = lists[..., 1:, 0], lists[..., 1:, 1]
    entries = torch.arange(column.shape[-1], dtype=torch.int32, device=lists.device)
    listed = (entries < lists[..., :1, 0]) & (column >= 0) & (column < tiles)
    codes = lists.new_zeros((*column.shape[:-1], tiles + 1))
    codes.scatter_(-1, column.masked_fill(~listed, tiles).long(), code)
    return codes[..., :tiles].contiguous()
