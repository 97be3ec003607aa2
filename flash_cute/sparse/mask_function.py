"""Codes of a function of indices: (batch, head, query, key) -> whether the query sees the key."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_cute.sparse import bits
from flash_cute.sparse.lists import TILE, tiles_of

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ask(function: MaskFunction, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The function of index tensors that broadcast, as bool of their common shape."""
    seen = function(batch, head, query, key)
    shape = torch.broadcast_shapes(batch.shape, head.shape, query.shape, key.shape)
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
        kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
        raise TypeError(
            f"the mask function returned {kind}; expected a bool tensor, of index tensors (batch, "
            "head, query, key) that broadcast"
        )
    try:
        return seen.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"the mask function returned the shape {tuple(seen.shape)} of indices of the shape "
            f"{tuple(shape)}; expected a value for each pair, without Python's own branches"
        ) from None


def pairs_of_tiles(
    function: MaskFunction, seqlens: tuple[int, int]
) -> Callable[[bits.Coordinates], Tensor]:
    """The pairs of m tiles, bool (m, 128, 128). The function is asked for positions inside of the
    sequences alone: pairs behind their ends get the values of the last ones."""
    seqlen_q, seqlen_k = seqlens

    def visible(tiles: bits.Coordinates) -> Tensor:
        batch, head, row, column = (x[:, None, None] for x in tiles)
        query = bits.positions(row, seqlen_q).transpose(-1, -2)
        return ask(function, batch, head, query, bits.positions(column, seqlen_k))

    return visible


def codes_of_function(
    function: MaskFunction,
    batch: int,
    heads: int,
    seqlens: tuple[int, int],
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Codes and masks. Every pair is asked for once, those of partial tiles twice, some rows at a
    time; the whole matrix is never stored."""
    rows, columns = (tiles_of(x) for x in seqlens)
    some, every = bits.empty_halves((batch, heads), (rows, columns), device)
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    key = bits.positions_of_part(slice(0, columns), seqlens[1], device)
    for part in bits.parts(rows if columns else 0, batch * heads * TILE * len(key)):
        query = bits.positions_of_part(part, seqlens[0], device)[:, None]
        halves = slice(2 * part.start, 2 * part.stop)
        pairs = ask(function, b, h, query, key)
        some[:, :, halves], every[:, :, halves] = bits.any_and_all(pairs)
    return bits.codes_of_quadrants(some, every, pairs_of_tiles(function, seqlens))
