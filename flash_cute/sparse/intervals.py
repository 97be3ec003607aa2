"""Codes of intervals: the keys that each query sees, or the queries that see each key."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute.sparse import bits
from flash_cute.sparse.lists import HALF, TILE, tiles_of

Intervals = tuple[Tensor, Tensor]  # [first, last) int (batch, heads, positions, n)


def disjoint(first: Tensor, last: Tensor, length: int) -> Intervals:
    """The same sets inside of [0, length) as intervals that ascend and do not overlap; some may be
    empty."""
    first, last = first.clamp(0, length), last.clamp(0, length)
    order = first.argsort(dim=-1, stable=True)
    first, last = first.gather(-1, order), last.gather(-1, order)
    reached = torch.cat((first[..., :1], last.cummax(-1).values[..., :-1]), -1)
    first = torch.maximum(first, reached)
    return first, torch.maximum(first, last)


def complement(first: Tensor, last: Tensor, length: int) -> Intervals:
    """What of [0, length) lies in none of disjoint, ascending intervals."""
    start, end = torch.zeros_like(first[..., :1]), torch.full_like(first[..., :1], length)
    return torch.cat((start, last), -1), torch.cat((first, end), -1)


def codes_of_rows(first: Tensor, last: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor | None]:
    """Codes and masks of the keys in any [first, last), int (batch, heads, seqlen_q, n)."""
    first, last = disjoint(first, last, seqlen_k)

    def visible(tiles: bits.Coordinates) -> Tensor:
        batch, head, row, column = tiles
        return _inside(first, last, (batch, head, row), column)

    return bits.codes_of_quadrants(*_halves(first, last, seqlen_k), visible)


def codes_of_columns(first: Tensor, last: Tensor, seqlen_q: int) -> tuple[Tensor, Tensor | None]:
    """Codes and masks of the queries in any [first, last), int (batch, heads, seqlen_k, n)."""
    first, last = disjoint(first, last, seqlen_q)

    def visible(tiles: bits.Coordinates) -> Tensor:
        batch, head, row, column = tiles
        return _inside(first, last, (batch, head, column), row).transpose(-1, -2)

    some, every = _halves(first, last, seqlen_q)
    return bits.codes_of_quadrants(some.transpose(-1, -2), every.transpose(-1, -2), visible)


def _inside(
    first: Tensor, last: Tensor, tiles: tuple[Tensor, Tensor, Tensor], others: Tensor
) -> Tensor:
    """bool (m, 128, 128): whether the positions of tiles ``others`` lie in the intervals of those
    of ``tiles`` (batch, head, tile)."""
    batch, head, tile = (x[:, None] for x in tiles)
    at = (batch, head, bits.positions(tile, first.shape[2]))
    x = (others[:, None] * TILE + torch.arange(TILE, device=tile.device))[:, None, :, None]
    return ((x >= first[at][:, :, None]) & (x < last[at][:, :, None])).any(-1)


def _halves(first: Tensor, last: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Whether any, and whether all pairs of each quadrant are in disjoint intervals: bool (batch,
    heads, halves of the positions, halves of [0, length))."""
    rows, columns = tiles_of(first.shape[2]), tiles_of(length)
    some, every = bits.empty_halves(first.shape[:2], (rows, columns), first.device)
    start = torch.arange(2 * columns, device=first.device) * HALF
    size = (length - start).clamp(0, HALF)
    for part in bits.parts(rows, first.shape[:2].numel() * TILE * 2 * columns):
        at = bits.positions_of_part(part, first.shape[2], first.device)
        inside = torch.zeros((), dtype=torch.int64, device=first.device)
        for n in range(first.shape[-1]):
            begin, end = first[:, :, at, n, None], last[:, :, at, n, None]
            shared = torch.minimum(end, start + size) - torch.maximum(begin, start)
            inside = inside + shared.clamp_min(0)
        by_half = inside.unflatten(2, (-1, HALF))
        halves = slice(2 * part.start, 2 * part.stop)
        some[:, :, halves], every[:, :, halves] = (by_half > 0).any(3), (by_half == size).all(3)
    return some, every


def of_flashmask(columns: Tensor, causal: bool, seqlen_q: int) -> Intervals:
    """The queries that see each key, of FlashMask's (.., seqlen_k, 1, 2 or 4), which say who does
    not."""
    hidden = [x[..., None] for x in columns.clamp(0, seqlen_q).unbind(-1)]
    start, end = torch.zeros_like(hidden[0]), torch.full_like(hidden[0], seqlen_q)
    if len(hidden) == 1:
        first, last = hidden[0], end
    elif causal:
        first, last = hidden
    elif len(hidden) == 2:
        first, last = torch.cat((hidden[0], start), -1), torch.cat((end, hidden[1]), -1)
    else:
        first, last = torch.cat(hidden[::2], -1), torch.cat(hidden[1::2], -1)
    return complement(*disjoint(first, last, seqlen_q), seqlen_q)
