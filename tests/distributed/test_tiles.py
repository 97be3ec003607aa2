"""Tiles together hold each visible pair once, at its distance; layouts hold each token once."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

from flash_cute import reference
from flash_cute.distributed import layouts, tiles
from flash_cute.distributed.layouts import Run

WINDOWS = [(-1, -1), (-1, 0), (5, 0), (0, 0), (3, 4), (-1, 2), (2, -1), (0, 40), (40, 0)]


def pairs_of(tile: tiles.Tile) -> dict[tuple[int, int], int]:
    """(row of q, row of k) that the ops let through, and the op's distance of each."""
    seen = reference.visible(
        tile.q_len, tile.k_len, window_size_left=tile.window[0], window_size_right=tile.window[1]
    )
    shift = tile.k_len - tile.q_len
    return {
        (tile.q_start + i, tile.k_start + j): abs(i + shift - j)
        for i, j in torch.nonzero(seen).tolist()
    }


def check(queries: layouts.Runs, keys: layouts.Runs, window: tuple[int, int], alibi: bool) -> None:
    expected = {}
    for q in queries:
        for k in keys:
            for i in range(q.length if q.document == k.document else 0):
                for j in range(k.length):
                    distance = q.start + i - k.start - j
                    if (window[0] < 0 or distance <= window[0]) and (
                        window[1] < 0 or -distance <= window[1]
                    ):
                        expected[q.row + i, k.row + j] = abs(distance)
    found: Counter[tuple[int, int]] = Counter()
    for launch in tiles.launches(queries, keys, window, alibi, True):
        kinds = {(tile.window, tile.slopes_sign, tile.distance) for tile in launch}
        assert len(kinds) == 1
        for before, after in itertools.pairwise(launch):
            assert before.q_stop <= after.q_start and before.k_stop <= after.k_start
        for tile in launch:
            assert tile.q_len > 0 and tile.k_len > 0
            pairs = pairs_of(tile)
            found.update(pairs.keys())
            if alibi:
                for pair, of_op in pairs.items():
                    assert tile.slopes_sign * of_op + tile.distance == expected[pair]
    assert set(found) == set(expected) and set(found.values()) <= {1}


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pairs_of_two_runs(window, alibi):
    generator = random.Random(0)
    for _ in range(150):
        m, n = generator.randint(1, 9), generator.randint(1, 9)
        q, k = (Run(0, generator.randint(0, 12), x, generator.randint(0, 3)) for x in (m, n))
        check((q,), (k,), window, alibi)


@pytest.mark.parametrize("lengths", [(24,), (23,), (7, 0, 12, 1, 9), (1, 1, 1), (2,)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_layouts(name, ranks, lengths):
    """Every token once, whole documents as keys and each rank's part as keys."""
    for window, alibi in (((-1, 0), False), ((-1, 0), True), ((3, 0), False), ((-1, -1), True)):
        parts = layouts.layout(name, lengths, ranks, window, 3)
        starts = layouts.offsets(lengths)
        tokens = [
            starts[run.document] + run.start + i for runs in parts for run in runs
            for i in range(run.length)
        ]  # fmt: skip
        assert sorted(tokens) == list(range(sum(lengths)))
        for runs in parts:
            assert [run.row for run in runs] == layouts.offsets(tuple(r.length for r in runs))[:-1]
            check(runs, layouts.whole(lengths), window, alibi)
            for others in parts:
                check(runs, others, window, alibi)


def test_launches_are_few():
    """Of a zigzag ring: one call a step; of all keys: one for each part, documents together."""
    parts = layouts.layout("zigzag", (4096,), 4, (-1, 0), 128)
    for rank, other in ((0, 0), (0, 3), (3, 0)):
        assert len(tiles.launches(parts[rank], parts[other], (-1, 0), False, False)) == 1
    lengths = (512, 1024, 256)
    parts = layouts.layout("per_document", lengths, 4, (-1, 0), 128)
    for alibi in (False, True):
        for window, tiles_of_calls in (((-1, 0), [3, 3]), ((2000, 0), [3, 3]), ((63, 0), [6])):
            calls = tiles.launches(parts[1], layouts.whole(lengths), window, alibi, True)
            assert [len(call) for call in calls] == tiles_of_calls
            assert {tile.window for call in calls for tile in call} == {window}


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_visible_pairs(window):
    for length in (1, 7, 30):
        seen = reference.visible(
            length, length, window_size_left=window[0], window_size_right=window[1]
        )
        for start in range(length):
            for stop in range(start, length + 1):
                counted = layouts.visible_pairs(start, stop, length, window)
                assert counted == int(seen[start:stop].sum())


@pytest.mark.parametrize("name", ["zigzag", "balanced"])
def test_balance(name):
    """The most work of a rank is within 2 % of the mean; of a contiguous layout it is not."""
    length, ranks, window = (32768,), 4, (-1, 0)
    for layout_name, most in ((name, 1.02), ("contiguous", 2.0)):
        parts = layouts.layout(layout_name, length, ranks, window, 128)
        loads = [layouts.work(runs, length, window) for runs in parts]
        assert max(loads) / (sum(loads) / ranks) < most
        assert layout_name == name or max(loads) / (sum(loads) / ranks) > 1.7
    lengths, window = (20000, 300, 7000, 5468), (4095, 0)
    parts = layouts.layout("balanced", lengths, ranks, window, 128)
    loads = [layouts.work(runs, lengths, window) for runs in parts]
    assert max(loads) / (sum(loads) / ranks) < 1.05
    assert {layouts.rows(runs) for runs in parts} == {sum(lengths) // ranks}
