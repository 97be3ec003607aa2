"""The listed tiles of a score matrix, gathered: rows of tiles with equally many listed tiles are
computed at once, as sequences of 128 queries that have only these keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute.call.philox import dropout_keep
from flash_cute.cpu.tiles import KEY_BLOCK, Options, Tiles, fold
from flash_cute.sparse.bits import pairs
from flash_cute.sparse.lists import QUADRANTS, TILE, tiles_of

# Elements of gathered keys, and as many of values: on a CPU as many as its caches hold.
_NUMBERS_AT_ONCE = {"cpu": 2**19, "cuda": 2**26}
_ROWS_AT_ONCE = {"cpu": 32 * TILE, "cuda": 4096 * TILE}


class Rows(NamedTuple):
    """m rows of tiles with n tiles each."""

    batch: Tensor  # int64 (m,)
    head: Tensor  # int64 (m,), of the lists
    row: Tensor  # int64 (m,)
    columns: Tensor  # int64 (m, n)
    codes: Tensor  # int32 (m, n)


class ListedCall:
    """A dense call with lists: its tensors by tiles, and the rows of tiles that see any key.

    q (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_k, dim), v; ``codes`` (batch
    or 1, heads_k, heads or 1, tiles of queries, tiles of keys). Tensors are folded by the heads of
    the codes: those of the keys, or if each query head has its own, those of the queries.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: Options,
        codes: Tensor,
        masks: Tensor | None,
        first: int = 0,
    ) -> None:
        self.options, self.masks, self.first = options, masks, first
        self.batch, self.seqlen_q, self.heads, _ = q.shape
        self.seqlen_k, self.heads_k = k.shape[1:3]
        shared = codes.shape[1] in (1, self.heads_k)
        self.list_heads = self.heads_k if shared else self.heads
        self.group = self.heads // max(self.list_heads, 1)
        self.low, self.high = options.band(self.seqlen_q, self.seqlen_k)
        self.q = self.of_queries(q)
        self.k, self.v = (by_tiles(fold(x, self.heads_k)).squeeze(1) for x in (k, v))
        codes = codes.expand(self.batch, self.list_heads, -1, -1)
        self.codes = codes.masked_fill(~self._reached(), 0)

    def of_queries(self, x: Tensor) -> Tensor:
        """q, or a tensor with its layout, as (n * tiles, group, 128, dim), padded with zeros."""
        return by_tiles(fold(x, self.list_heads))

    def statistic(self, x: Tensor, padding: float) -> Tensor:
        """Row statistics (batch, heads, seqlen_q) likewise, padded with ``padding``."""
        x = x.reshape(self.batch * self.list_heads, self.group, self.seqlen_q, 1)
        return by_tiles(x, padding)

    def _reached(self) -> Tensor:
        """Tiles of which the band shows any pair: bool (tiles of queries, tiles of keys)."""
        top = torch.arange(tiles_of(self.seqlen_q), device=self.q.device)[:, None] * TILE
        left = torch.arange(tiles_of(self.seqlen_k), device=self.q.device) * TILE
        bottom = (top + TILE).clamp_max(self.seqlen_q) - 1
        right = (left + TILE).clamp_max(self.seqlen_k) - 1
        return (left <= bottom + self.high) & (right >= top + self.low)

    def parts(self) -> Iterator[Rows]:
        """All rows of tiles that see a key, some of equally many tiles at a time."""
        counts = (self.codes != 0).sum(-1)
        size, kind = max(self.k.shape[-1], self.v.shape[-1], 1), self.q.device.type
        for count in counts.unique().tolist():
            if count == 0:
                continue
            at_once = min(
                _NUMBERS_AT_ONCE[kind] // (count * TILE * size),
                _ROWS_AT_ONCE[kind] // (self.group * TILE),
            )
            for part in (counts == count).nonzero().split(max(at_once, 1)):
                batch, head, row = part.unbind(-1)
                codes = self.codes[batch, head, row]
                columns = codes.nonzero()[:, 1].view(-1, count)
                yield Rows(batch, head, row, columns, codes.gather(-1, columns))


def by_tiles(x: Tensor, value: float = 0.0) -> Tensor:
    """(n, group, seqlen, dim) as (n * tiles, group, 128, dim), padded with ``value``."""
    room = -x.shape[2] % TILE
    if room:
        x = F.pad(x, (0, 0, 0, room), value=value)
    return x.unflatten(2, (x.shape[2] // TILE, TILE)).transpose(1, 2).flatten(0, 1).contiguous()


def from_tiles(x: Tensor, seqlen: int) -> Tensor:
    """The inverse: (n * tiles, group, 128, dim) as (n, group, seqlen, dim)."""
    tiles = tiles_of(seqlen)
    by_row = x.unflatten(0, (len(x) // max(tiles, 1), tiles)).transpose(1, 2)
    return by_row.flatten(2, 3)[:, :, :seqlen]


class GatheredTiles(Tiles):
    """The tiles of ``rows`` as :class:`Tiles` of m sequences of 128 queries each."""

    def __init__(self, whole: ListedCall, rows: Rows) -> None:
        self.whole, self.options = whole, whole.options
        self.at = rows = self._partial_tiles_first(rows)
        self.batch, self.heads, self.first = whole.batch, whole.heads, whole.first
        self.group, self.shift = whole.group, whole.seqlen_k - whole.seqlen_q
        of_lists = rows.batch * whole.list_heads + rows.head
        of_keys = of_lists // (whole.list_heads // whole.heads_k)
        self.at_rows = of_lists * tiles_of(whole.seqlen_q) + rows.row
        self.at_keys = (of_keys[:, None] * tiles_of(whole.seqlen_k) + rows.columns).flatten()
        self.q = whole.q.index_select(0, self.at_rows)
        self.k = self.keys(whole.k)
        self.seqlen_q, self.seqlen_k = TILE, self.k.shape[1]
        in_group = torch.arange(self.group, device=whole.q.device)
        self.query_heads = rows.head[:, None] * self.group + in_group

    def queries(self, x: Tensor) -> Tensor:
        """Selects queries from (n * tiles, group, 128, any): (m, group * 128, any)."""
        return x.index_select(0, self.at_rows).flatten(1, 2)

    def write_queries(self, total: Tensor, x: Tensor) -> None:
        """The inverse of :meth:`queries`: writes ``x`` into (n * tiles, group, 128, any)."""
        total.index_copy_(0, self.at_rows, x.unflatten(1, (-1, TILE)))

    def keys(self, x: Tensor) -> Tensor:
        """Selects keys from (n * tiles, 128, dim): (m, keys, dim)."""
        return x.index_select(0, self.at_keys).view(len(self.at_rows), -1, x.shape[-1])

    def add_to_keys(self, total: Tensor, x: Tensor) -> None:
        """The inverse of :meth:`keys`: adds ``x`` to (n * tiles, 128, dim), bitwise repeatable."""
        by_tile = x.view(-1, TILE, x.shape[-1])
        if x.is_cuda:  # index_add_ would use atomics
            total.index_put_((self.at_keys,), by_tile, accumulate=True)
        else:
            total.index_add_(0, self.at_keys, by_tile)

    def of_heads(self, x: Tensor, rows: slice) -> Tensor:
        values = x.expand(self.batch, self.heads)[self.at.batch[:, None], self.query_heads]
        return values.repeat_interleave(TILE, 1)[..., None]

    def key_blocks(self, rows: slice) -> Iterator[tuple[slice, Tensor | None]]:
        for begin, end in ((0, self.partial_tiles), (self.partial_tiles, self.at.columns.shape[1])):
            for start in range(begin, end, KEY_BLOCK // TILE):
                tiles = slice(start, min(start + KEY_BLOCK // TILE, end))
                hidden = self._hidden_pairs(tiles) if begin < self.partial_tiles else None
                yield slice(tiles.start * TILE, tiles.stop * TILE), hidden

    def _partial_tiles_first(self, rows: Rows) -> Rows:
        """The rows in an order in which tiles with any hidden pair are among the first
        ``partial_tiles``."""
        whole, top, left = self.whole, rows.row[:, None] * TILE, rows.columns * TILE
        bottom, right = (top + TILE).clamp_max(whole.seqlen_q) - 1, left + TILE - 1
        is_whole = (left >= bottom + whole.low) & (right <= top + whole.high)
        is_whole &= (right < whole.seqlen_k) & (rows.codes == QUADRANTS - 1)
        self.partial_tiles = int((~is_whole).sum(-1).max())
        order = is_whole.byte().argsort(dim=-1, stable=True)
        columns, codes = rows.columns.gather(-1, order), rows.codes.gather(-1, order)
        return rows._replace(columns=columns, codes=codes)

    def _hidden_pairs(self, tiles: slice) -> Tensor:
        """bool (m, group * 128, keys)."""
        codes, whole = self.at.codes[:, tiles], self.whole
        key = self.places(tiles)[:, None]
        query = (self.at.row[:, None] * TILE + self._side())[..., None]
        seen = (key >= query + whole.low) & (key <= query + whole.high) & (key < whole.seqlen_k)
        by_tile = seen.unflatten(-1, (-1, TILE)).transpose(1, 2)  # (m, tiles, 128, 128)
        by_tile &= pairs(codes.flatten(), whole.masks).view(by_tile.shape)
        return seen.logical_not_().repeat(1, self.group, 1)

    def places(self, tiles: slice) -> Tensor:
        """int64 positions of the keys in their sequence: (m, keys)."""
        return (self.at.columns[:, tiles, None] * TILE + self._side()).flatten(1)

    def _side(self) -> Tensor:
        """Positions in a tile: 0 to 127."""
        return torch.arange(TILE, device=self.q.device)

    def distance(self, rows: slice, keys: slice) -> Tensor:
        query = self.at.row[:, None] * TILE + self._side() + self.shift
        key = self.places(slice(keys.start // TILE, keys.stop // TILE))
        return (query[..., None] - key[:, None]).abs_().repeat(1, self.group, 1)

    def dropped(self, rows: slice, keys: slice) -> Tensor | None:
        options = self.options
        if options.dropout_p == 0:
            return None
        key = self.places(slice(keys.start // TILE, keys.stop // TILE))
        bh = (self.at.batch + self.first)[:, None] * self.heads + self.query_heads
        side = self._side()
        kept = [
            dropout_keep(options.rng, options.dropout_p, bh[m], row * TILE + side, key[m])
            for m, row in enumerate(self.at.row.tolist())
        ]
        return torch.stack(kept).logical_not_().flatten(1, 2)
