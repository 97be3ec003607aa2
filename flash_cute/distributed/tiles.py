"""Calls of the attention ops that compute what a rank's queries see of some keys.

The ops align masks to the bottom right: of m queries and n keys, query i sees keys j with
``-right <= i + (n - m) - j <= left``. Here queries begin at position a of their document, keys at
position b, and the wanted distance is ``i + a - b - j``. If both differ, the bounds move by the
difference. A bound below 0, which ops do not support, means that the last keys are not seen, or
that the last queries see nothing: they are left out, and the bound becomes 0.

ALiBi's ``-slope |distance|`` is linear on either side of its zero. A tile that holds pairs on both
sides of the wanted zero, or of the op's, is split there. Inside of a part both differ by a sign,
which goes to the slopes, and a constant, which goes to the LSE.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from flash_cute.distributed.layouts import Fixed, Run, Runs, Window

FULL: Window = (-1, -1)


@dataclass(frozen=True)
class Tile:
    """Queries and keys of one document that one call of an op computes.

    Attributes:
        document: its index.
        q_start, q_len: rows of queries.
        k_start, k_len: rows of keys.
        window: the op's.
        slopes_sign: factor of ALiBi's slopes.
        distance: the LSE of the tile is the op's minus slope times this.
    """

    document: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    window: Window = FULL
    slopes_sign: int = 1
    distance: int = 0

    @property
    def q_stop(self) -> int:
        return self.q_start + self.q_len

    @property
    def k_stop(self) -> int:
        return self.k_start + self.k_len


Launch = Fixed[Tile]  # tiles of one call of an op, which differ only in rows, in ascending order
Launches = Fixed[Launch]


def launches(queries: Runs, keys: Runs, window: Window, alibi: bool, packed: bool) -> Launches:
    """The calls that together compute what ``queries`` see of ``keys``, each pair once. Of a batch
    that is not packed each tile is a call."""
    tiles: list[Tile] = []
    if queries == keys and window == (-1, 0) and not alibi:
        tiles = _in_order(queries)
    else:
        by_document: dict[int, list[Run]] = {}
        for run in keys:
            by_document.setdefault(run.document, []).append(run)
        for q in queries:
            for k in by_document.get(q.document, ()):
                tiles += _of_pair(q, k, window, alibi)
        tiles = _joined(tiles)
    return _batched(tiles) if packed else Fixed(Fixed((tile,)) for tile in tiles)


def _in_order(runs: Runs) -> list[Tile]:
    """Queries and keys are the same rows, in the order of their positions: causal as they lie."""
    tiles: list[Tile] = []
    for run in runs:
        if tiles and tiles[-1].document == run.document:
            length = tiles[-1].q_len + run.length
            tiles[-1] = replace(tiles[-1], q_len=length, k_len=length)
        else:
            row, length = run.row, run.length
            tiles.append(Tile(run.document, row, length, row, length, (-1, 0)))
    return tiles


def _of_pair(q: Run, k: Run, window: Window, alibi: bool) -> list[Tile]:
    """t = i - j lies in [1 - n, m - 1]; the distance that is meant is t + ahead."""
    ahead = q.start - k.start
    least, most = 1 - k.length, q.length - 1
    low = least if window[1] < 0 else -window[1] - ahead
    high = most if window[0] < 0 else window[0] - ahead
    if max(low, least) > min(high, most):
        return []
    shift = k.length - q.length
    is_aligned = ahead == shift or (window[1] == 0 and ahead < shift)  # once keys are left out
    if is_aligned or not alibi:
        if not alibi and low <= least and high >= most:
            return [_cut(q, k, least, most, FULL)]
        return [_cut(q, k, low, high, window)]
    low, high = max(low, least), min(high, most)
    parts = [(low, high)]
    for zero in (-ahead, -shift):  # the part from this t on, and the one before it
        parts = [
            part
            for start, stop in parts
            for part in ((start, min(stop, zero - 1)), (max(start, zero), stop))
            if part[0] <= part[1]
        ]
    tiles = []
    for start, stop in parts:
        bounds = (-1 if stop == most else 0, -1 if start == least else 0)
        tile = _cut(q, k, start, stop, bounds, to_zero=True)
        meant = 1 if start >= -ahead else -1
        of_op = 1 if start >= -shift else -1
        aligned = -start if of_op > 0 else -stop  # the op's shift, once rows were left out
        tiles.append(replace(tile, slopes_sign=meant * of_op, distance=meant * (ahead - aligned)))
    return tiles


def _cut(q: Run, k: Run, low: int, high: int, bounds: Window, to_zero: bool = False) -> Tile:
    """The tile of pairs with low <= t <= high; a side of ``bounds`` below 0 needs no bound.

    ``to_zero``: the op's zero is to lie at the end of [low, high], which is on one side of it.
    """
    m, n = q.length, k.length
    shift = n - m
    left, right = high + shift, -(low + shift)
    unbounded = [bound < 0 for bound in bounds]
    if low + shift > 0 or (to_zero and low + shift == 0):  # the last keys are not seen
        n, left, right = n - (low + shift), high - low, 0
        unbounded[1] = False
    elif high + shift < 0:  # the last queries see nothing
        m, left, right = m + high + shift, 0, high - low
        unbounded[0] = False
    window = (-1 if unbounded[0] else left, -1 if unbounded[1] else right)
    first_q, first_k = max(low, 0), max(-high, 0)  # what comes before sees nothing, is not seen
    return Tile(q.document, q.row + first_q, m - first_q, k.row + first_k, n - first_k, window)


def _joined(tiles: list[Tile]) -> list[Tile]:
    """Merges adjacent whole tiles: those with the same queries, and those with the same keys."""
    by_keys: list[Tile] = []
    for tile in tiles:
        last = by_keys[-1] if by_keys else None
        if (
            last is not None
            and last.window == tile.window == FULL
            and (last.document, last.q_start, last.q_len) == (
                tile.document, tile.q_start, tile.q_len
            )
            and last.k_stop == tile.k_start
        ):  # fmt: skip
            by_keys[-1] = replace(last, k_len=last.k_len + tile.k_len)
        else:
            by_keys.append(tile)
    joined: list[Tile] = []
    ends: dict[tuple[int, ...], int] = {}  # where a tile is to which one more may be joined
    for tile in by_keys:
        place = len(joined)
        if tile.window == FULL:
            place = ends.pop((*_keys(tile), tile.q_start), place)
        if place < len(joined):
            joined[place] = replace(joined[place], q_len=joined[place].q_len + tile.q_len)
        else:
            joined.append(tile)
        if tile.window == FULL:
            end = (*_keys(tile), joined[place].q_stop)
            ends[end] = place
    return joined


def _keys(tile: Tile) -> tuple[int, int, int]:
    return tile.document, tile.k_start, tile.k_len


def _batched(tiles: list[Tile]) -> Launches:
    """Tiles that one call can take: they are alike, and their rows ascend without overlap."""
    batches: list[list[Tile]] = []
    by_kind: dict[tuple[object, ...], list[list[Tile]]] = defaultdict(list)
    for tile in sorted(tiles, key=lambda x: (x.q_start, x.k_start)):
        alike = by_kind[tile.window, tile.slopes_sign, tile.distance]
        for batch in alike:
            if batch[-1].q_stop <= tile.q_start and batch[-1].k_stop <= tile.k_start:
                batch.append(tile)
                break
        else:
            alike.append([tile])
            batches.append(alike[-1])
    return Fixed(map(Fixed, batches))
