"""What is visible inside of tiles: quadrants, and masks of pairs in tiles of which more is to say.

A mask is int32 (128, 4): bit c of word w of row r says whether query r of the tile sees its key
32 w + c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from flash_cute.sparse.lists import HALF, QUADRANTS, TILE

_MASKS_AT_ONCE = 256  # 16384 pairs of several bytes each
_PAIRS_AT_ONCE = 2**24

Coordinates = tuple[Tensor, Tensor, Tensor, Tensor]  # of m tiles: batch, head, row, column; int64


def packed(pairs: Tensor) -> Tensor:
    """bool (.., 128, 128) as masks, int32 (.., 128, 4)."""
    word = torch.arange(32, dtype=torch.int32, device=pairs.device)
    weights = torch.ones_like(word).bitwise_left_shift(word)
    return (pairs.unflatten(-1, (4, 32)) * weights).sum(-1, dtype=torch.int32)


def unpacked(masks: Tensor) -> Tensor:
    """Masks int32 (.., 128, 4) as bool (.., 128, 128)."""
    word = torch.arange(32, dtype=torch.int32, device=masks.device)
    return (masks[..., None].bitwise_right_shift(word) & 1).bool().flatten(-2)


def pairs(codes: Tensor, masks: Tensor | None) -> Tensor:
    """The visible pairs of tiles by their codes (m,): bool (m, 128, 128)."""
    numbers = torch.arange(4, dtype=torch.int32, device=codes.device).view(2, 2)
    seen = (codes[:, None, None].bitwise_right_shift(numbers) & 1).bool()
    seen = seen.repeat_interleave(HALF, 1).repeat_interleave(HALF, 2)
    has_mask = codes >= QUADRANTS
    if masks is not None and has_mask.any():
        of_tiles = masks[(codes[has_mask] // QUADRANTS - 1).long()]
        seen[has_mask] &= unpacked(of_tiles)
    return seen


def quadrants(halves: Tensor) -> Tensor:
    """Codes (.., rows, columns) of bool (.., 2 * rows, 2 * columns), a value a quadrant."""
    by_tile = halves.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))  # (.., row, 2, column, 2)
    number = torch.arange(4, dtype=torch.int32, device=halves.device).view(2, 1, 2)
    weighted = by_tile.int().bitwise_left_shift(number)
    return weighted.sum((-1, -3), dtype=torch.int32)


def any_and_all(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Of bool (.., 64 m, 64 n): whether any, and whether all pairs of each quadrant are True."""
    by_quadrant = pairs.unflatten(-1, (-1, HALF)).unflatten(-3, (-1, HALF))
    return by_quadrant.any(-1).any(-2), by_quadrant.all(-1).all(-2)


def parts(rows: int, pairs_of_a_row: int) -> Iterator[slice]:
    """[0, rows) in slices that have a bounded number of pairs."""
    step = max(1, _PAIRS_AT_ONCE // max(pairs_of_a_row, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def positions(tiles: Tensor, seqlen: int) -> Tensor:
    """int64 positions (.., 128) of tiles (.., 1); those behind the end are the last one."""
    side = torch.arange(TILE, device=tiles.device)
    return (tiles * TILE + side).clamp_max(max(seqlen - 1, 0))


def positions_of_part(part: slice, seqlen: int, device: torch.device) -> Tensor:
    """The same of the tiles of a slice, one behind the other."""
    return positions(torch.arange(part.start, part.stop, device=device)[:, None], seqlen).flatten()


def empty_halves(
    outer: Sequence[int], tiles: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Room for what :func:`codes_of_quadrants` takes."""
    shape = (*outer, 2 * tiles[0], 2 * tiles[1])
    return (
        torch.empty(shape, dtype=torch.bool, device=device),
        torch.empty(shape, dtype=torch.bool, device=device),
    )


def codes_of_quadrants(
    some: Tensor, every: Tensor, visible: Callable[[Coordinates], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Codes and masks, if ``some`` or ``every`` pair of each quadrant is visible, bool (batch,
    heads, 2 * rows, 2 * columns); tiles with quadrants of which neither is said get masks."""
    return with_masks(quadrants(some), quadrants(some & ~every) != 0, visible)


def with_masks(
    codes: Tensor,
    partial: Tensor,
    visible: Callable[[Coordinates], Tensor],
    others: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``codes`` with masks in the tiles where ``partial``, bool of the same shape; and the masks,
    behind those that ``codes`` already has, ``others``. They are None if there are none.

    ``visible`` gives the pairs of m tiles, bool (m, 128, 128). The device is waited for once, to
    learn the number of masks. A tile in which all or no pair is visible gets the code of that.
    """
    tiles = partial.nonzero()
    if len(tiles) == 0:
        return codes, others
    masks = codes.new_empty((len(tiles), TILE, 4))
    before = 0 if others is None else len(others)
    found = codes.new_empty(len(tiles))
    for start in range(0, len(tiles), _MASKS_AT_ONCE):
        part = slice(start, start + _MASKS_AT_ONCE)
        batch, head, row, column = tiles[part].unbind(-1)
        seen = visible((batch, head, row, column))
        masks[part] = packed(seen)
        some, every = any_and_all(seen)
        of_quadrants = quadrants(some)[:, 0, 0]
        is_plain = (some == every).all(-1).all(-1)
        number = before + start + 1 + torch.arange(len(seen), device=codes.device)
        with_number = of_quadrants + QUADRANTS * number.int()
        found[part] = torch.where(is_plain, of_quadrants, with_number)
    codes = codes.index_put(tuple(tiles.unbind(-1)), found)
    return codes, masks if others is None else torch.cat((others, masks))
