"""Codes of the blocks of keys that each query chose by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute.sparse import bits
from flash_cute.sparse.lists import HALF, TILE, tiles_of


def codes_of_topk(indices: Tensor, granularity: int, seqlen_k: int) -> tuple[Tensor, Tensor | None]:
    """Codes and masks of blocks of ``granularity`` keys, int (batch, heads, seqlen_q, k). Indices
    of no block are ignored."""
    of_tile = TILE // granularity

    def visible(tiles: bits.Coordinates) -> Tensor:
        batch, head, row, column = (x[:, None] for x in tiles)
        chosen = indices[batch, head, bits.positions(row, indices.shape[2])].long()  # (m, 128, k)
        seen = _members(chosen - column[..., None] * of_tile, of_tile)
        return seen.repeat_interleave(granularity, -1)

    return bits.codes_of_quadrants(*_halves(indices, granularity, seqlen_k), visible)


def _members(chosen: Tensor, blocks: int) -> Tensor:
    """Which of [0, blocks) are among int64 ``chosen`` (.., k): bool (.., blocks)."""
    named = (chosen >= 0) & (chosen < blocks)
    seen = chosen.new_zeros((*chosen.shape[:-1], blocks + 1), dtype=torch.bool)
    return seen.scatter_(-1, chosen.masked_fill(~named, blocks), True)[..., :-1]


def _halves(indices: Tensor, granularity: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Whether any, and whether all pairs of each quadrant are chosen: bool (batch, heads, halves of
    the queries, halves of the keys)."""
    (*outer, seqlen_q, k), blocks = indices.shape, -(-seqlen_k // granularity)
    rows, columns = tiles_of(seqlen_q), tiles_of(seqlen_k)
    some, every = bits.empty_halves(outer, (rows, columns), indices.device)
    room = columns * (TILE // granularity) - blocks  # blocks behind the last one, as that one is
    for part in bits.parts(rows, outer[0] * outer[1] * TILE * max(blocks, k)):
        at = bits.positions_of_part(part, seqlen_q, indices.device)
        seen = _members(indices[:, :, at].long(), blocks)
        seen = torch.cat((seen, seen[..., -1:].expand(*seen.shape[:-1], room)), -1)
        if granularity > HALF:
            by_half = seen.repeat_interleave(granularity // HALF, -1)[..., None]
        else:
            by_half = seen.unflatten(-1, (-1, HALF // granularity))
        halves = slice(2 * part.start, 2 * part.stop)
        some[:, :, halves] = by_half.any(-1).unflatten(2, (-1, HALF)).any(3)
        every[:, :, halves] = by_half.all(-1).unflatten(2, (-1, HALF)).all(3)
    return some, every
