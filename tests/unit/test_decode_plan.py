"""How decoding shares keys out among CTAs: everything once, evenly, with room for every part."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import NamedTuple

import pytest
import torch

BLOCK_M, BLOCK_N, CTAS, ONE_PART, PART, IDLE = 16, 128, 132, 2, 3, 16
LARGE, TAKEN_OFF, SMALL, LONG, TURNS = 128, 16, 8, 8, 8


class Part(NamedTuple):
    cta: int
    b: int
    head_k: int
    row: int
    first: int
    last: int
    count: int
    index: int
    slot: int

    @property
    def unit(self) -> tuple[int, int, int]:
        return self.b, self.head_k, self.row


def parts(
    lengths: list[int],
    seqlen_q: int,
    heads: int,
    heads_k: int,
    num_splits: int,
    split_size: int,
    *,
    unused: int = 77,
    of_sm: int = 1,
) -> tuple[int, list[Part]]:
    """How many slots there are, and all parts, with `of_sm` CTAs an SM at a time. Sequences that
    fill caches without `unused` rows are known to be alike."""
    text = ",".join(map(str, lengths))
    capacity = max(lengths, default=0) + unused
    sizes = (seqlen_q, heads, heads_k, num_splits, split_size, capacity, 132, of_sm)
    slots, *lines = torch.ops.flash_cute.decode_parts(text, *sizes).split("\n")
    return int(slots), [Part(*map(int, line.split())) for line in lines]


def check(lengths: list[int], *sizes: int, unused: int = 77, of_sm: int = 1) -> list[Part]:
    slots, taken = parts(lengths, *sizes, unused=unused, of_sm=of_sm)
    seqlen_q, heads, heads_k = sizes[:3]
    by_unit = defaultdict(list)
    for part in taken:
        by_unit[part.unit].append(part)
    rows = range(0, seqlen_q * heads // heads_k, BLOCK_M)
    units = {(b, h, row) for b in range(len(lengths)) for h in range(heads_k) for row in rows}
    assert set(by_unit) == units
    for (b, _, _), of_unit in by_unit.items():
        of_unit.sort(key=lambda part: part.index)
        assert [part.index for part in of_unit] == list(range(of_unit[0].count))
        assert {part.count for part in of_unit} == {len(of_unit)}
        edges = [part.first for part in of_unit] + [of_unit[-1].last]
        assert edges[0] == 0 and edges[-1] == -(-lengths[b] // BLOCK_N)
        assert edges[1:] == [part.last for part in of_unit]
        assert all(part.first < part.last for part in of_unit) or len(of_unit) == 1
    places = Counter(part.slot for part in taken if part.count > 1)
    assert all(0 <= slot < slots for slot in places)
    assert all(count == 1 for count in places.values())
    ctas = CTAS * of_sm
    if unused == 0 and not any(sizes[3:]):
        blocks = -(-lengths[0] // BLOCK_N)
        if of_sm > 1 and blocks >= LONG and len(units) >= TURNS * ctas:
            ctas = len(units) + (-(-ctas // heads_k) * heads_k if blocks % 2 == 0 else 0)
        elif -(-blocks * len(units) // (ctas // heads_k * heads_k)) >= LARGE:
            ctas += ctas * SMALL // TAKEN_OFF + heads_k
    assert max((part.cta for part in taken), default=0) < ctas
    return taken


def draw_lengths(draw: random.Random) -> list[int]:
    longest = draw.choice([1, 100, 5000, 100_000])
    return [draw.choice([0, draw.randint(0, longest)]) for _ in range(draw.randint(0, 70))]


def test_even_shares():
    draw = random.Random(1)
    for _ in range(100):
        heads_k = draw.choice([1, 2, 8])
        heads, seqlen_q = heads_k * draw.choice([1, 4, 20]), draw.choice([1, 1, 3, 50])
        lengths = draw_lengths(draw)
        taken = check(lengths, seqlen_q, heads, heads_k, 0, 0)
        work = [0] * CTAS
        for part in taken:
            work[part.cta] += max(1, part.last - part.first)
        share = max(ONE_PART, -(-sum(work) // (CTAS // heads_k * heads_k)))
        for head in range(heads_k):
            of_head = [blocks for blocks in work[head::heads_k] if blocks > 0]
            largest = max(of_head, default=0)
            assert largest <= share + PART
            assert sum(blocks < largest for blocks in of_head) <= 1
            assert of_head == [blocks for blocks in work[0::heads_k] if blocks > 0]


@pytest.mark.parametrize(
    ("batch", "length", "heads_k", "parts_a_unit"),
    [(16, 8192, 8, 1), (1, 131072, 8, 16), (128, 2048, 8, 1), (4, 8192, 8, 4)],
)
def test_shares_end_with_units_of_equal_sequences(batch, length, heads_k, parts_a_unit):
    taken = check([length] * batch, 1, 4 * heads_k, heads_k, 0, 0)
    assert {part.count for part in taken} == {parts_a_unit}


def test_sequences_that_are_alike():
    draw = random.Random(4)
    for _ in range(20):
        heads_k = draw.choice([1, 2, 8])
        heads, seqlen_q = heads_k * draw.choice([1, 4, 20]), draw.choice([1, 1, 3, 50])
        lengths = [draw.choice([1, 300, 5000, 70_000])] * draw.randint(1, 200)
        given = draw.choice([(0, 0), (0, 0), (3, 0), (0, 500)])
        taken = check(lengths, seqlen_q, heads, heads_k, *given, unused=0)
        work: Counter[int] = Counter()
        for part in taken:
            work[part.cta] += part.last - part.first
        share = max(ONE_PART, -(-sum(work.values()) // (CTAS // heads_k * heads_k)))
        assert any(given) or max(work.values()) <= share + PART + share // IDLE


@pytest.mark.parametrize(
    ("batch", "length", "heads_k"), [(128, 8192, 8), (16, 8192, 32), (1, 2**20, 4), (77, 5000, 8)]
)
def test_ctas_that_come_late_have_small_shares(batch, length, heads_k):
    taken = check([length] * batch, 1, 4 * heads_k, heads_k, 0, 0, unused=0)
    work: Counter[int] = Counter()
    for part in taken:
        work[part.cta] += part.last - part.first
    first_ctas = CTAS // heads_k * heads_k
    share = -(-sum(work.values()) // first_ctas)
    assert {work[cta] for cta in range(first_ctas)} == {share - share // TAKEN_OFF}
    late = [work[cta] for cta in range(first_ctas, max(work) + 1)]
    assert first_ctas * SMALL // TAKEN_OFF <= len(late) + heads_k
    assert min(late) > 0 and max(late) <= share // SMALL
    of_heads = defaultdict(set)
    for part in taken:
        of_heads[part.cta // heads_k, part.head_k].add((part.b, part.row, part.first, part.last))
    for cta, _ in of_heads:
        assert all(of_heads[cta, head] == of_heads[cta, 0] for head in range(heads_k))


@pytest.mark.parametrize("of_sm", [1, 2])
def test_shares_are_large_from_some_length_on(of_sm):
    first_ctas = CTAS * of_sm // 8  # of each of 8 heads
    for share, late in ((LARGE - 1, 0), (LARGE, -(-first_ctas * SMALL // TAKEN_OFF))):
        taken = check([share * BLOCK_N] * first_ctas, 1, 32, 8, 0, 0, unused=0, of_sm=of_sm)
        assert {part.cta for part in taken} == set(range((first_ctas + late) * 8))


def test_small_shares_of_parts_of_units_have_room():
    taken = check([128 * BLOCK_N] * 17, 1, 32, 8, 0, 0, unused=0)
    assert max(part.count for part in taken) > 1


@pytest.mark.parametrize("unused", [0, 77])
def test_heads_of_sequences_are_taken_side_by_side(unused):
    taken = check([2048] * 64, 1, 32, 8, 0, 0, unused=unused)
    by_cta = defaultdict(list)
    for part in taken:
        by_cta[part.cta].append(part.unit)
    for at_once in zip(*by_cta.values(), strict=True):
        sequences = Counter(b for b, _, _ in at_once)
        assert len(sequences) == 16 and set(sequences.values()) == {8}


@pytest.mark.parametrize("heads_k", [16, 32])
def test_many_long_units_of_sequences_that_are_alike_have_a_cta_each(heads_k):
    """Those of the last turn have two, for half of the keys each."""
    taken = check([LONG * BLOCK_N] * CTAS, 1, 32, heads_k, 0, 0, unused=0, of_sm=2)
    last = -(-2 * CTAS // heads_k)  # units of each head
    assert sorted(part.cta for part in taken) == list(range((CTAS + last) * heads_k))
    assert all(part.count == (2 if part.b >= CTAS - last else 1) for part in taken)
    assert all(part.last - part.first == LONG // part.count for part in taken)
    taken = check([(LONG + 1) * BLOCK_N] * CTAS, 1, 32, heads_k, 0, 0, unused=0, of_sm=2)
    assert sorted(part.cta for part in taken) == list(range(CTAS * heads_k))
    few = TURNS * 2 * CTAS // heads_k - 1
    for length, batch, of_sm in (
        (LONG * BLOCK_N, CTAS, 1), ((LONG - 1) * BLOCK_N, CTAS, 2), (LONG * BLOCK_N, few, 2)
    ):  # fmt: skip
        taken = check([length] * batch, 1, 32, heads_k, 0, 0, unused=0, of_sm=of_sm)
        assert max(Counter(part.cta for part in taken).values()) > 1


@pytest.mark.parametrize("splits", [1, 2, 7, 133])
def test_numbers_of_parts(splits):
    draw = random.Random(splits)
    for _ in range(50):
        for part in check(draw_lengths(draw), draw.choice([1, 3, 50]), 8, 2, splits, 0):
            assert part.count <= splits


@pytest.mark.parametrize("size", [1, 64, 200, 10**6])
def test_sizes_of_parts_depend_on_their_sequence_alone(size):
    draw = random.Random(size)
    for _ in range(8):
        lengths = draw_lengths(draw)
        alone: dict[int, list[tuple[int, ...]]] = {}
        for part in check(lengths, 2, 8, 2, 0, size):
            length = lengths[part.b]
            if length not in alone:
                alone[length] = [p[2:8] for p in parts([length], 2, 8, 2, 0, size)[1]]
            assert part[2:8] in alone[length]


def test_short_keys_are_one_part():
    assert {part.count for part in check([ONE_PART * BLOCK_N], 1, 8, 2, 0, 0)} == {1}
    assert {part.count for part in check([(ONE_PART + 1) * BLOCK_N], 1, 8, 2, 0, 0)} == {3}


def test_sequences_of_one_block_have_a_cta_each():
    """If that is known of all: where one has two blocks, they are no parts."""
    for unused, blocks in ((0, 1), (77, ONE_PART)):
        work = Counter(part.cta for part in check([BLOCK_N] * 16, 1, 32, 8, 0, 0, unused=unused))
        assert set(work.values()) == {blocks}


def test_caches_of_one_block_need_no_room_for_parts():
    slots = torch.ops.flash_cute.decode_parts("60,3,0", 1, 8, 2, 0, 0, BLOCK_N).split("\n")[0]
    assert slots == "0"


def test_more_parts_than_can_be_counted_are_refused():
    with pytest.raises(RuntimeError, match=r"2\^30 splits or more"):
        parts([1], 1, 1024, 1024, 0, 1, unused=2**29 - 2)
    with pytest.raises(RuntimeError, match=r"2\^30 tiles of queries"):
        parts([1], 2**28, 64, 64, 0, 0)
