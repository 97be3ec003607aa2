"""The blocks of keys that each query chose by itself, and lists of the tiles that hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.sparse import bits, token_tiles
from flash_cute.sparse.lists import HALF, TILE, tile_lists, tiles_of

Lists = tuple[Tensor, Tensor | None]  # and masks


class Choice:
    """Blocks of ``granularity`` keys, int (batch, heads_k, seqlen_q, k). Lists of tiles of 128
    queries are made at the first call that needs them.

    Attributes:
        blocks: int32, -1 for what names no block.
    """

    def __init__(self, indices: Tensor, granularity: int, seqlen_k: int) -> None:
        named = (indices >= 0) & (indices < -(-seqlen_k // granularity))
        self.blocks = torch.where(named, indices, -1).int()  # a copy; int64 may name none
        self.granularity, self.seqlen_k = granularity, seqlen_k
        self._made: list[Lists] = []
        is_plain = not torch.compiler.is_compiling() and not internals.transformed()
        if indices.shape[2] <= TILE and is_plain:  # few, as of a step of decoding
            self.lists()

    def lists(self) -> Lists:
        """Made once, but in a transform, whose tensors end with it."""
        if self._made:
            return self._made[0]
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "sparse is a choice of each query, whose lists of tiles are not made yet, and a "
                "graph cannot make them; ask for sparse.tile_lists once before"
            )
        seqlen_q, k = self.blocks.shape[2:]
        with torch.inference_mode(False):  # a later call may have gradients
            codes, masks = codes_of_topk(self.blocks, self.granularity, self.seqlen_k)
            made = tile_lists(codes, k * min(TILE, seqlen_q)), masks
        if not internals.transformed():
            self._made.append(made)
        return made

    def token_lists(self, group: int, causal: bool, shift: int | Tensor) -> Lists | None:
        """Those of :mod:`.token_tiles`, if there are any."""
        blocks, given = self.blocks, (self.granularity, self.seqlen_k, group, causal)
        if isinstance(shift, Tensor):  # one choice for sequences of several lengths
            blocks = blocks.expand(shift.shape[0], -1, -1, -1)
        if not token_tiles.exist(blocks.shape, *given):
            return None
        return token_tiles.lists_of_tokens(blocks, *given, shift)


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
