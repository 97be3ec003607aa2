"""Which blocks patterns keep: how many, which ones, and always the same."""

from __future__ import annotations

import random

import pytest
import torch
from sparse.masks import mask_of
from torch import Tensor

from flash_cute.sparse.budget import solve
from flash_cute.sparse.choose import (
    BlockChoice,
    budget_of,
    choose_blocks,
    choose_by_mass,
    choose_without_content,
)
from flash_cute.sparse.gate import LearnedGate
from flash_cute.sparse.grid import BlockGrid, grid_of
from flash_cute.sparse.patterns import SparsePattern, stride_of

CPU = torch.device("cpu")
STATIC = [x for x in SparsePattern if x.value not in ("dynamic_threshold", "learned")]


def choose(pattern: SparsePattern, seqlen: int, ratio: float, causal: bool, **more) -> BlockChoice:
    q = torch.randn(1, seqlen, 2, 16)
    k = torch.randn(1, seqlen, 1, 16)
    gate = LearnedGate(2, 1, 16) if pattern is SparsePattern.LEARNED else None
    return choose_blocks(q, k, pattern, ratio, causal=causal, gate=gate, **more)


def pairs_of(choice: BlockChoice, length: int | None = None, entry: int = 0) -> Tensor:
    """bool (heads, tokens, tokens): pair by pair what is kept and visible."""
    block, tokens = choice.grid.block, choice.grid.seqlen
    kept = choice.kept[entry].repeat_interleave(block, -2).repeat_interleave(block, -1)
    length = tokens if length is None else length
    kept = kept[:, :length, :length]
    return kept.tril() if choice.grid.is_causal else kept


def left_out(pairs: Tensor, causal: bool) -> float:
    tokens = pairs.shape[-1]
    visible = tokens * (tokens + 1) / 2 if causal else tokens**2
    return 1 - pairs.sum().item() / (visible * len(pairs))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("pattern", SparsePattern)
def test_leaves_out_what_was_asked(pattern, ratio, causal):
    for seqlen in (2048, random.randint(2049, 3000)):
        choice = choose(pattern, seqlen, ratio, causal)
        pairs = pairs_of(choice)
        assert abs(left_out(pairs, causal) - ratio) <= 0.06, seqlen
        assert choice.sparsity().item() == pytest.approx(left_out(pairs, causal), abs=1e-9)
        assert pairs.any(-1).all()
    choice = choose(pattern, random.randint(4096, 20_000), ratio, causal)
    assert choice.grid.block == 128 and abs(choice.sparsity().item() - ratio) <= 0.06
    assert choice.kept.any(-1).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", SparsePattern)
@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_short_sequences_have_small_blocks(pattern, causal, ratio):
    """So that they meet the ratio, too, from 16 blocks of a token on."""
    for seqlen in (1, 2, 15, 16, 33, 64, 65, 300, 777, 1000):
        choice = choose(pattern, seqlen, ratio, causal)
        pairs = pairs_of(choice)
        assert pairs.any(-1).all()
        assert choice.sparsity().item() == pytest.approx(left_out(pairs, causal), abs=1e-9)
        assert seqlen < 16 or abs(choice.sparsity().item() - ratio) <= 0.06
        mask = mask_of(choice.value())[0]
        assert torch.equal(mask.tril() if causal else mask, pairs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", SparsePattern)
def test_sequences_of_several_lengths(pattern, causal):
    lengths = torch.tensor([4096, 2500, 100, 0])
    q = torch.randn(4, 4096, 2, 16)
    gate = LearnedGate(2, 2, 16)
    choice = choose_blocks(q, q.flip(1), pattern, 0.8, causal=causal, gate=gate, lengths=lengths)
    kept = visible = 0.0
    for entry, length in enumerate(lengths.tolist()):
        pairs = pairs_of(choice, length, entry)
        assert pairs.any(-1).all()
        assert length < 2048 or abs(left_out(pairs, causal) - 0.8) <= 0.06
        kept += pairs.sum().item()
        visible += len(pairs) * (length * (length + 1) / 2 if causal else length**2)
        blocks = -(-length // choice.grid.block)
        assert not choice.kept[entry, :, blocks:].any()
        assert not choice.kept[entry, :, :, blocks:].any()
    assert choice.sparsity().item() == pytest.approx(1 - kept / visible, abs=1e-9)


def test_random_is_drawn_by_seed_and_head_alone():
    def drawn(seed: int, heads: int = 3) -> Tensor:
        return choose_without_content(
            SparsePattern.RANDOM, grid_of(4096, False), 0.8, heads=heads, seed=seed, device=CPU
        ).kept

    torch.manual_seed(0)
    first = drawn(7)
    torch.manual_seed(1)
    assert torch.equal(drawn(7), first) and torch.equal(drawn(7, 2), first[:, :2])
    assert first.diagonal(dim1=-2, dim2=-1).all()
    for other in (drawn(8)[0, 0], first[0, 1], first[0, 2]):
        shared = (other & first[0, 0]).float().mean()
        assert 0.02 < shared < 0.1  # 0.2 * 0.2, and the diagonal
    assert (first.float().mean((0, 1, 2)) > 0.05).all()  # no column is left out


def test_random_is_the_same_on_every_device(cuda):
    made = [
        choose_without_content(
            SparsePattern.RANDOM, grid_of(9000, True), 0.9, heads=2, device=torch.device(device)
        ).kept.cpu()
        for device in ("cpu", cuda)
    ]
    assert torch.equal(*made)


@pytest.mark.parametrize("causal", [False, True])
def test_what_static_patterns_keep(causal):
    n = 64
    near, strided, local = (
        choose(SparsePattern(x), 128 * n, 0.8, causal).kept[0, 0]
        for x in ("block_sparse", "strided", "local_global")
    )
    i, j = torch.arange(n)[:, None], torch.arange(n)
    visible = (j <= i) if causal else torch.ones(n, n, dtype=torch.bool)
    for row in range(n):  # what is nearer is kept, too
        kept = (i - j).abs()[row][near[row]]
        others = (i - j).abs()[row][visible[row] & ~near[row]]
        assert not len(others) or kept.max() <= others.min()
    width = near.sum(-1)
    assert width[20:].max() - width[20:].min() <= 1
    assert strided[((i - j) % stride_of(0.8) == 0) & visible].all()
    assert local[:, 0].all() and (causal or local[0].all())
    for kept in (strided, local):
        assert kept.diagonal().all() and kept.diagonal(-1)[20:].all()
        assert causal or kept.diagonal(1).float().mean() > 0.9


def test_static_patterns_do_not_follow_the_content():
    for pattern in STATIC:
        assert torch.equal(*(choose(pattern, 3000, 0.8, True).kept for _ in range(2)))


@pytest.mark.parametrize("causal", [False, True])
def test_a_threshold_keeps_the_fewest_blocks_that_hold_it(causal):
    grid = BlockGrid(3000, 128, causal)
    visible = grid.visible(CPU)
    mass = (5 * torch.randn(2, 3, grid.blocks, grid.blocks)).exp().masked_fill(~visible, 0)
    mass = mass / mass.sum(-1, keepdim=True)
    kept = choose_by_mass(mass, grid, 0.9, threshold=0.7).kept
    assert not (kept & ~visible).any()
    rows = torch.arange(grid.blocks)
    forced = torch.zeros(grid.blocks, grid.blocks, dtype=torch.bool)
    forced[rows, rows] = forced[:, 0] = forced[rows[1:], rows[:-1]] = True
    assert kept[..., forced & visible[0, 0]].all()
    best = mass.sort(-1, descending=True).values
    fewest = (best.cumsum(-1) < 0.7).sum(-1) + 1
    assert ((mass * kept).sum(-1) >= 0.7 - 1e-6).all()
    assert (kept.sum(-1) <= fewest + 3).all()
    everything = choose_by_mass(mass, grid, 0.9, threshold=1.0).kept
    assert ((mass * everything).sum(-1) > 1 - 1e-5).all()


@pytest.mark.parametrize("pattern", ["dynamic_threshold", "learned", "random"])
def test_both_halves_of_a_tile_of_queries_keep_the_same(pattern):
    """Else the tile would visit the keys of both. The last half may stand alone."""
    kept = choose(SparsePattern(pattern), 64 * 37 - 5, 0.9, False).kept
    assert torch.equal(kept[..., 0:36:2, :], kept[..., 1:37:2, :])
    mass = torch.rand(1, 1, 37, 37)
    kept = choose_by_mass(mass, BlockGrid(64 * 37, 64), 0.9, threshold=0.6).kept
    both = (mass * kept)[..., :36, :].unflatten(-2, (18, 2)).mean(-2).sum(-1)
    whole = mass[..., :36, :].unflatten(-2, (18, 2)).mean(-2).sum(-1)
    assert (both >= 0.6).all() and (whole > 1).all()


def test_lists_have_room_for_what_is_kept():
    for pattern in SparsePattern:
        for seqlen, causal in ((3000, False), (3000, True), (6000, False), (6000, True)):
            choice = choose(pattern, seqlen, 0.8, causal)
            lists = choice.value().tile_lists
            tiles = choice.kept.repeat_interleave(choice.grid.block // 64, -1)
            tiles = tiles.repeat_interleave(choice.grid.block // 64, -2)
            size = -tiles.shape[-1] % 2
            tiles = torch.nn.functional.pad(tiles, (0, size, 0, size))
            tiles = tiles.unflatten(-1, (-1, 2)).any(-1).unflatten(-2, (-1, 2)).any(-2)
            assert torch.equal(lists[..., 0, 0].long(), tiles.sum(-1)), (pattern, seqlen)
            if pattern is not SparsePattern.LOCAL_GLOBAL and seqlen > 4096:
                assert lists.shape[3] <= 0.5 * seqlen / 128


def test_forced_blocks_are_within_the_count():
    """Attention that is elsewhere: sink, diagonal and the block before are kept, nothing more."""
    grid = BlockGrid(64 * 64, 64, is_causal=True)
    mass = torch.ones(1, 1, 64, 64).tril()
    rows = torch.arange(64)
    mass[..., rows, rows] = mass[..., rows[1:], rows[:-1]] = mass[..., 0] = 0
    kept = choose_by_mass(mass, grid, 0.7).kept[0, 0]
    counts = budget_of(SparsePattern.DYNAMIC_THRESHOLD, grid, 0.7).counts(rows + 1)
    assert torch.equal(kept.sum(-1), counts)
    assert kept.diagonal().all()
    assert kept[:, 0][counts >= 8].all()
    assert kept.diagonal(-1)[counts[1:] >= 12].all()
    assert (counts >= 12).any() and not kept[counts < 4][:, 0][1:].all()


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_host_counts_as_the_device_does(causal, is_constant):
    for seqlen in (random.randint(2048, 20_000), 100_000):
        grid = grid_of(seqlen, causal)
        budget = solve(grid, 0.85, is_constant, 1)
        visible = torch.tensor([grid.visible_in_row(i) for i in range(grid.blocks)])
        counts = budget.counts(visible)
        assert (counts >= 1).all() and (counts <= visible).all() and counts[0] == visible[0]
        halves = grid.blocks / 2 * causal
        realised = 1 - (counts.sum().item() - halves) / (visible.sum().item() - halves)
        assert budget.sparsity == pytest.approx(realised) == pytest.approx(0.85, abs=0.002)


@pytest.mark.parametrize("pattern", SparsePattern)
def test_nothing_waits_for_the_device(pattern):
    """Tensors of the meta device have no values to wait for."""
    q = torch.empty(2, 3000, 4, 16, device="meta")
    gate = LearnedGate(4, 4, 16, device="meta")
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    for given in (None, lengths):
        choice = choose_blocks(q, q, pattern, 0.8, causal=True, gate=gate, lengths=given)
        assert choice.kept.shape[-2:] == (47, 47) and choice.sparsity().device.type == "meta"


def test_bad_patterns():
    q = torch.randn(1, 100, 2, 16)
    with pytest.raises(ValueError, match="pattern is LEARNED and gate None"):
        choose_blocks(q, q, "learned", 0.5)
    with pytest.raises(ValueError, match="spiral"):
        choose_blocks(q, q, "spiral", 0.5)


Q = torch.randn(1, 40, 2, 8)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"k": Q[:, :, :, :4]}, ValueError, "q has shape"),
        ({"k": torch.randn(1, 41, 2, 8)}, ValueError, "one batch, seqlen"),
        ({"q": Q[:, :0], "k": Q[:, :0]}, ValueError, "0 tokens"),
        ({"q": Q[0]}, ValueError, "q has shape"),
        ({"q": Q.long()}, TypeError, "q is"),
        ({"sparsity_ratio": 1.0}, ValueError, "sparsity_ratio is 1.0"),
        ({"sparsity_ratio": "most"}, TypeError, "sparsity_ratio is 'most'"),
        ({"threshold": 0.9}, ValueError, "threshold is 0.9, and pattern STRIDED"),
        ({"threshold": 2, "pattern": "learned"}, ValueError, "threshold is 2"),
        ({"stride": 3}, ValueError, "stride is 3"),
        ({"causal": 1}, TypeError, "causal is 1"),
        ({"threshold": 0, "pattern": "learned"}, ValueError, "threshold is 0"),
        ({"softmax_scale": True}, TypeError, "softmax_scale is True"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
        ({"seed": 1.5, "pattern": "random"}, TypeError, "seed is 1.5"),
        ({"gate": torch.nn.Linear(2, 2), "pattern": "learned"}, TypeError, "gate is Linear"),
        ({"gate": LearnedGate(2, 2, 16), "pattern": "learned"}, ValueError, "a head dim of 16"),
        (
            {"gate": LearnedGate(2, 1, 8), "pattern": "learned"},
            ValueError,
            "gate is for 2 heads of q",
        ),
        ({"lengths": [40]}, TypeError, "lengths is a list"),
        ({"lengths": torch.ones(len(Q))}, TypeError, "lengths has dtype torch.float32"),
        ({"lengths": torch.ones(len(Q) + 1).int()}, ValueError, "lengths has . sequences, and q ."),
        ({"pattern": "learned"}, ValueError, "gate"),
        ({"pattern": "spiral"}, ValueError, "pattern is 'spiral'; supported: 'random'"),
    ],
)
def test_choices_that_cannot_be_made(wrong, error, words):
    arguments = {"q": Q, "k": Q, "pattern": "strided", "sparsity_ratio": 0.5} | wrong
    with pytest.raises(error, match=words):
        choose_blocks(**arguments)


def test_shares_are_summed_whatever_torch_s_determinism(monkeypatch):
    mass = torch.rand(1, 2, 16, 16).softmax(-1)
    grid = BlockGrid(16 * 64, 64)
    expected = choose_by_mass(mass, grid, 0.5, threshold=0.7).kept
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(choose_by_mass(mass, grid, 0.5, threshold=0.7).kept, expected)
    finally:
        torch.use_deterministic_algorithms(False)
    kept = (mass * expected).sum(-1)
    assert (kept.unflatten(-1, (-1, 2)).mean(-1) >= 0.7 - 1e-6).all()  # two rows keep the same
