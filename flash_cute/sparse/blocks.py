"""Codes of lists of blocks: for each block of queries, the blocks of keys that it sees."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute.sparse import bits, mask_function
from flash_cute.sparse.lists import HALF, QUADRANTS, TILE, tiles_of
from flash_cute.sparse.mask_function import MaskFunction

Codes = tuple[Tensor, Tensor | None]  # codes and masks


def block_map(index: Tensor, counts: Tensor, blocks_k: int) -> Tensor:
    """Which of ``blocks_k`` blocks the first ``counts`` entries of ``index`` (.., capacity) name:
    bool (.., blocks_k). Entries that name none are ignored."""
    entries = torch.arange(index.shape[-1], device=index.device)
    named = (entries < counts[..., None]) & (index >= 0) & (index < blocks_k)
    seen = index.new_zeros((*index.shape[:-1], blocks_k + 1), dtype=torch.bool)
    places = index.masked_fill(~named, blocks_k).long()
    return seen.scatter_(-1, places, True)[..., :blocks_k]


def halves_of(blocks: Tensor, block: tuple[int, int], seqlens: tuple[int, int]) -> Tensor:
    """A value a block, bool (.., blocks_q, blocks_k), as one a quadrant of all tiles."""
    return _repeated(blocks, HALF, block, seqlens)


def _repeated(
    blocks: Tensor, side: int, block: tuple[int, int], seqlens: tuple[int, int]
) -> Tensor:
    """The same as one a square of ``side`` tokens, which divides a tile and the blocks."""
    for dim, size, seqlen in zip((-2, -1), block, seqlens, strict=True):
        if size > side:
            blocks = blocks.repeat_interleave(size // side, dim)
        room = TILE // side * tiles_of(seqlen) - blocks.shape[dim]
        if room:
            blocks = F.pad(blocks, (0, room) if dim == -1 else (0, 0, 0, room))
    return blocks


def codes_of_blocks(
    partial: Tensor,
    full: Tensor | None,
    mask_mod: MaskFunction | None,
    block: tuple[int, int],
    seqlens: tuple[int, int],
) -> Codes:
    """Codes and masks of maps of blocks, bool (.., blocks_q, blocks_k). ``mask_mod`` says what of
    the ``partial`` blocks is visible, None: all."""
    if mask_mod is None:
        seen = partial if full is None else partial | full
        if min(block) >= TILE:
            return _repeated(seen, TILE, block, seqlens).int() * (QUADRANTS - 1), None
        return bits.quadrants(halves_of(seen, block, seqlens)), None
    in_part = halves_of(partial, block, seqlens)
    in_full = torch.zeros_like(in_part) if full is None else halves_of(full, block, seqlens)
    codes = bits.quadrants(in_part | in_full)
    in_part = in_part & ~in_full
    asked = mask_function.pairs_of_tiles(mask_mod, seqlens)

    def visible(tiles: bits.Coordinates) -> Tensor:
        return (asked(tiles) & _pairs(in_part, tiles)) | _pairs(in_full, tiles)

    return bits.with_masks(codes, bits.quadrants(in_part) != 0, visible)


def codes_of_small_blocks(blocks: Tensor, size: int, seqlen: int) -> Codes:
    """Codes and masks of a map of square blocks of less than 64 tokens, bool (batch, heads, blocks,
    blocks). Each tile has a mask, which takes 2 KB, so that the device is not waited for."""
    pairs = blocks.repeat_interleave(size, -1).repeat_interleave(size, -2)
    room = tiles_of(seqlen) * TILE - pairs.shape[-1]
    pairs = F.pad(pairs, (0, room, 0, room))
    by_tile = pairs.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE)).transpose(-2, -3)
    some, every = bits.any_and_all(by_tile)
    codes = bits.quadrants(some)[..., 0, 0]
    number = torch.arange(1, codes.numel() + 1, dtype=torch.int32, device=codes.device)
    has_mask = (some != every).any(-1).any(-1)
    codes = torch.where(has_mask, codes + QUADRANTS * number.view_as(codes), codes)
    return codes, bits.packed(by_tile).flatten(0, 3)


def _pairs(halves: Tensor, tiles: bits.Coordinates) -> Tensor:
    """The values of the quadrants of m tiles as pairs: bool (m, 128, 128)."""
    by_tile = halves.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).transpose(-2, -3)
    return by_tile[tiles].repeat_interleave(HALF, -1).repeat_interleave(HALF, -2)
