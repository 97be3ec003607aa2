"""Limits of the CPU's ways: what ATen's kernel takes last, borders of blocks, numbers far out."""

from __future__ import annotations

import itertools
import math

import cpu_calls
import pytest
import torch
from cpu_oracle import assert_bounded, qkv, randn

from flash_cute import reference
from flash_cute.cpu import odd, plain, streaming, tiles, varlen
from flash_cute.cpu.kvcache import CachedSequence, Rotary
from flash_cute.cpu.odd import NonFinite, is_in_range
from flash_cute.ops.typed import FwdCall


def causal_of(q, k, v, **options) -> bool | None:
    """What ATen's kernel is told of the mask; None if it does not get the call."""
    left, right = options.pop("window", (-1, -1))
    call = FwdCall(q, k, v, window_size_left=left, window_size_right=right, **options)
    return plain.causal_of(q, k, v, tiles.Options.of(call))


@pytest.mark.parametrize(
    ("scale", "taken"),
    [(2.0**-40, True), (2.0**16, True), (math.nextafter(2.0**-40, 0), False),
     (math.nextafter(2.0**16, 1e9), False), (0.0, False), (-1.0, False)],
)  # fmt: skip
def test_scales(scale: float, taken: bool):
    q, k, v = qkv(1, 4, 5)
    assert causal_of(q, k, v, softmax_scale=scale) is (False if taken else None)
    out = cpu_calls.fwd(q, k, v, softmax_scale=scale)[0]
    exact, weighted = (reference.attention(q, k, x, softmax_scale=scale).out for x in (v, v.abs()))
    if abs(scale) <= 1:
        assert_bounded(out, exact, weighted)
    else:  # the largest score alone counts
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_head_dims_and_lengths():
    for dim, taken in ((1, True), (1024, True), (1025, False)):
        x = torch.ones(1, 2, 1, dim)
        assert causal_of(x, x, x) is (False if taken else None)
    x = torch.ones(1, 2, 1, 8)
    for q, k, v in ((x[:, :0], x, x), (x, x[:, :0], x[:, :0]), (x, x, x[..., :7]), (x[:0],) * 3):
        assert causal_of(q, k, v) is None
    assert causal_of(x[:, :1], x, x) is False and causal_of(x, x[:, :1], x[:, :1]) is False


@pytest.mark.parametrize("lengths", [(5, 5), (4, 7), (7, 4), (1, 6), (6, 1), (1, 1)], ids=str)
def test_masks_are_the_kernel_s_only_if_they_hide_the_same(lengths: tuple[int, int]):
    """All windows: without a mask if nothing is hidden, causal if the window is."""
    q, k, v = qkv(1, *lengths)
    everything = reference.visible(*lengths, False, -1, -1)
    causal = reference.visible(*lengths, True, -1, -1)
    sides = (-1, 0, 1, 2, 3, 4, 5, 6, 7, 100)
    for left, right in itertools.product(sides, sides):
        seen = reference.visible(*lengths, False, left, right)
        told = causal_of(q, k, v, window=(left, right))
        if told is not None:
            assert torch.equal(seen, causal if told else everything), (left, right)
            assert not told or lengths[0] == lengths[1]
    assert causal_of(q, k, v) is False
    assert causal_of(q, k, v, window=(lengths[1] - 1, lengths[0] - 1)) is False
    if lengths[0] == lengths[1] > 1:
        assert causal_of(q, k, v, window=(-1, 0)) is causal_of(q, k, v, window=(100, 0)) is True


@pytest.mark.parametrize(
    "rule", [{"softcap": 1e-3}, {"dropout_p": 1e-6, "rng": torch.tensor([1, 2])},
             {"alibi_slopes": torch.zeros(2)}, {"sink": torch.full((2,), -torch.inf)}], ids=str,
)  # fmt: skip
def test_any_rule_takes_tiles(rule):
    q, k, v = qkv(1, 4, 5)
    assert causal_of(q, k, v) is False and causal_of(q, k, v, **rule) is None


@pytest.mark.parametrize("value", [2.0**50, -(2.0**50), 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_numbers_up_to_2_to_the_50_are_in_range(value: float, dtype: torch.dtype):
    x = torch.zeros(2, 3, 1, 4, dtype=dtype)
    x[1, 2, 0, 3] = value
    assert is_in_range(x) and NonFinite.of(False, (x,), x, x) is None
    x[1, 2, 0, 3] = value * (1 + 2.0**-7) if abs(value) > 1 else math.nan
    assert not is_in_range(x)
    found = NonFinite.of(False, (x,), torch.zeros_like(x), torch.zeros_like(x))
    assert found is not None and found.row.nonzero().tolist() == [[1, 2, 0]]


GRAIN = odd._GRAIN


@pytest.mark.parametrize(
    "size", [1, GRAIN - 1, GRAIN, GRAIN + 1, 2 * GRAIN, 8 * GRAIN, 8 * GRAIN + 1]
)
def test_every_element_is_looked_at(size: int):
    """For any number of keys: the first and the last one, and those next to each boundary."""
    x = torch.zeros(size)
    assert is_in_range(x)
    step = GRAIN - 1
    places = {0, size - 1, size // 2, *(i for n in range(1, 9) for i in (n * step - 1, n * step))}
    for place in sorted(i for i in places if i < size):
        for bad in (math.nan, -math.inf, 2.0**51):
            x[place] = bad
            assert not is_in_range(x) and not is_in_range(x.view(1, -1).T)
        x[place] = 0


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (2, 1), (-1, 0), (1, -1), (3, 0)], ids=str)
def test_blocks_of_keys_hold_each_visible_pair_once(monkeypatch, block: int, window):
    """And no key that no row of theirs sees; without a mask where all are seen."""
    monkeypatch.setattr(tiles, "QUERY_BLOCK", block)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 3)
    for lengths in ((5, 9), (9, 5), (7, 7), (1, 4), (4, 0)):
        q, k, _ = qkv(1, *lengths, heads=2, heads_k=1)
        made = tiles.Tiles(q, k, tiles.Options.of(FwdCall(q, k, k, None, False, *window)))
        times = torch.zeros(2, *lengths, dtype=torch.int)
        seen = reference.visible(*lengths, False, *window)
        for rows in made.query_blocks():
            assert 0 < rows.stop - rows.start <= block
            for keys, hidden in made.key_blocks(rows):
                assert 0 < keys.stop - keys.start <= 3
                shape = (2, rows.stop - rows.start, keys.stop - keys.start)
                shown = torch.ones(shape) if hidden is None else ~hidden.view(shape)
                times[:, rows, keys] += shown.int()
                assert seen[rows, keys].any(), "a block of hidden pairs alone"
        assert torch.equal(times, seen.int().expand(2, -1, -1))


@pytest.mark.parametrize(
    ("length", "tile", "block"), [(10, 3, 7), (10, 8, 7), (12, 4, 12), (0, 3, 9)]
)
def test_steps_are_of_whole_tiles(length: int, tile: int, block: int):
    steps = list(streaming._steps(length, tile, block))
    assert [i for step in steps for i in range(step.start, step.stop)] == list(range(length))
    for step in steps[:-1]:
        size = step.stop - step.start
        assert size % tile == 0 and (size == tile or size <= block < size + tile)


def test_sequences_lie_where_offsets_say():
    """Clamped to what there is, and to the longest and the used lengths."""
    offsets = torch.tensor([2, 5, 5, 99], dtype=torch.int32)

    def spans(used=None, longest=100, total=9):
        used = None if used is None else torch.tensor(used, dtype=torch.int32)
        found = varlen.spans(offsets, used, longest, total)
        return [(x.start, x.stop) for x in found]

    assert spans() == [(2, 5), (5, 5), (5, 9)]
    assert spans(longest=2) == [(2, 4), (5, 5), (5, 7)]
    assert spans(used=[1, 7, 3]) == [(2, 3), (5, 5), (5, 8)]
    assert spans(used=[-4, 0, 100]) == [(2, 2), (5, 5), (5, 9)]
    assert spans(total=4) == [(2, 4), (4, 4), (4, 4)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("step", [0, 1])
def test_rotary_embedding_turns_pairs_by_the_angle_of_their_position(interleaved: bool, step: int):
    """As complex numbers: of positions beyond the tables by the last, below by the first."""
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    rotary = Rotary(angles.cos().double(), angles.sin().double(), interleaved)
    x = randn(4, 2, 8, dtype=torch.float64)
    for position in (0, 2, 4, -3, 90):
        turned = rotary.rotate(x, position + step * torch.arange(4))
        places = [min(max(position + i * step, 0), 5) for i in range(4)]
        pairs = x[..., :6].unflatten(-1, (3, 2) if interleaved else (2, 3))
        pairs = pairs if interleaved else pairs.transpose(-1, -2)
        complex_ = torch.view_as_complex(pairs.contiguous())
        expected = torch.view_as_real(
            complex_ * torch.polar(torch.ones(4, 1, 3).double(), angles[places][:, None].double())
        )
        expected = (expected if interleaved else expected.transpose(-1, -2)).flatten(-2)
        torch.testing.assert_close(turned[..., :6], expected, rtol=0, atol=1e-6)
        assert torch.equal(turned[..., 6:], x[..., 6:])


def test_rows_of_a_sequence_in_pages():
    """Page 7 does not exist; what it would hold reads as zeros, and is not written."""
    cache = torch.arange(1.0, 13).view(4, 3, 1, 1)
    place = CachedSequence(torch.tensor([2, 7, 0]), used=5, leftpad=1, capacity=9)
    assert place.read(cache, 9).flatten().tolist() == [8, 9, 0, 0, 0, 1, 2, 3]
    ids, rows, there = place.rows(cache, 2, 7)
    assert ids.tolist() == [2, 7, 7, 7, 0] and rows.tolist() == [2, 0, 1, 2, 0]
    assert there.tolist() == [True, False, False, False, True]
    place.write(cache, torch.tensor([50.0, 60, 70, 80]).view(4, 1, 1), 8)
    assert cache.flatten().tolist() == [60, 70, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    alone = CachedSequence(torch.tensor([3]), used=2, leftpad=1, capacity=3)
    view = alone.read(cache, 3)
    assert view.flatten().tolist() == [11, 12] and view.data_ptr() == cache[3, 1].data_ptr()
    for page in (-1, 4):
        assert not CachedSequence(torch.tensor([page]), 2, 0, 3).read(cache, 2).any()
