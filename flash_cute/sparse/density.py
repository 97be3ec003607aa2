"""How much of the score matrix a :class:`flash_cute.Sparse` holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_cute.sparse import bits
from flash_cute.sparse.lists import HALF, QUADRANTS, TILE, codes_of, tiles_of

if TYPE_CHECKING:
    from flash_cute.sparse.value import Sparse

_MASKS_AT_ONCE = 256


def band(
    query: Tensor, seqlens: tuple[int, int], causal: bool, window_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """[first, last) of the keys that int64 ``query`` sees; behind the last query: none."""
    seqlen_q, seqlen_k = seqlens
    left, right = window_size[0], 0 if causal else window_size[1]
    diagonal = query + (seqlen_k - seqlen_q)
    first = torch.zeros_like(query) if left < 0 else diagonal - min(left, sum(seqlens))
    last = torch.full_like(query, seqlen_k)
    if right >= 0:
        last = (diagonal + min(right, sum(seqlens)) + 1).clamp(0, seqlen_k)
    first = first.clamp(0, seqlen_k)
    return first, torch.where(query < seqlen_q, torch.maximum(first, last), first)


def pairs_of_band(seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int, int]) -> int:
    """Pairs that a causal mask and a window leave."""
    query = torch.arange(seqlen_q, device="cpu")
    first, last = band(query, (seqlen_q, seqlen_k), causal, window_size)
    return int((last - first).sum())


def _pairs_of_quadrants(
    sparse: Sparse, causal: bool, window_size: tuple[int, int], device: torch.device
) -> Tensor:
    """Pairs of the band in each quadrant of each tile: int64 (rows, 2, columns, 2)."""
    seqlens = (sparse.seqlen_q, sparse.seqlen_k)
    rows, columns = (tiles_of(x) for x in seqlens)
    pairs = torch.empty((2 * rows, 2 * columns), dtype=torch.int64, device=device)
    start = torch.arange(2 * columns, device=device) * HALF
    for part in bits.parts(rows, TILE * 2 * columns):
        query = torch.arange(part.start * TILE, part.stop * TILE, device=device)
        first, last = (x[:, None] for x in band(query, seqlens, causal, window_size))
        shared = torch.minimum(last, start + HALF) - torch.maximum(first, start)
        by_half = shared.clamp_min(0).unflatten(0, (-1, HALF)).sum(1)
        pairs[2 * part.start : 2 * part.stop] = by_half
    return pairs.view(rows, 2, columns, 2)


def visible_pairs(sparse: Sparse, causal: bool, window_size: tuple[int, int]) -> float:
    """See :meth:`flash_cute.Sparse.visible_pairs`."""
    codes = codes_of(sparse.tile_lists, sparse.key_tiles)
    count = codes.shape[:2].numel()
    if codes.numel() == 0:
        return 0.0
    of_quadrants = _pairs_of_quadrants(sparse, causal, window_size, codes.device)
    plain = torch.where(codes < QUADRANTS, codes, 0)
    kept = 0
    for number, pairs in enumerate(of_quadrants.permute(1, 3, 0, 2).flatten(0, 1)):
        kept += int((pairs * (plain.bitwise_right_shift(number) & 1)).sum())
    return (kept + _pairs_of_masks(sparse, codes, causal, window_size)) / count


def _pairs_of_masks(
    sparse: Sparse, codes: Tensor, causal: bool, window_size: tuple[int, int]
) -> int:
    """Visible pairs of tiles with masks, over all batch entries and heads."""
    if sparse.tile_bits is None:
        return 0
    tiles, kept = (codes >= QUADRANTS).nonzero(), 0
    numbers = codes[tuple(tiles.unbind(-1))] // QUADRANTS - 1
    side = torch.arange(TILE, device=codes.device)
    for start in range(0, len(tiles), _MASKS_AT_ONCE):
        part = slice(start, start + _MASKS_AT_ONCE)
        row, column = tiles[part, 2, None] * TILE, tiles[part, 3, None] * TILE
        first, last = band(row + side, (sparse.seqlen_q, sparse.seqlen_k), causal, window_size)
        key = (column + side)[:, None]
        seen = (key >= first[..., None]) & (key < last[..., None])
        kept += int((seen & bits.unpacked(sparse.tile_bits[numbers[part].long()])).sum())
    return kept


def explain(sparse: Sparse) -> str:
    """See :meth:`flash_cute.Sparse.explain`."""
    codes = codes_of(sparse.tile_lists, sparse.key_tiles)
    batch, heads = codes.shape[:2]
    visited, masked = (int((codes >= least).sum()) for least in (1, QUADRANTS))
    cut = int(((codes > 0) & (codes < QUADRANTS - 1)).sum())
    longest = int(sparse.tile_lists[..., 0, 0].max()) if codes.numel() else 0
    masks = 0 if sparse.tile_bits is None else sparse.tile_bits.nbytes
    lines = [
        f"Sparse.{sparse.format}: {sparse.seqlen_q} queries, {sparse.seqlen_k} keys, lists for "
        f"{_counted(batch, 'batch entry', 'batch entries')} and {_counted(heads, 'head', 'heads')}",
        f"density: {sparse.density:.4f} of all pairs are visible"
        + (", before the causal mask, which calls must have" if sparse.needs_causal else ""),
        f"tiles of {TILE} x {TILE}: {visited} of {codes.numel()} are computed"
        f", {cut} of them by quadrants of {HALF} x {HALF}, {masked} with a mask of their pairs",
        f"the longest list has {_counted(longest, 'tile', 'tiles')}",
        f"memory: {sparse.tile_lists.nbytes} bytes of lists, {masks} of masks",
    ]
    return "\n".join(lines)


def _counted(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"
