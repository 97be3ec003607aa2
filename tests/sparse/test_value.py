"""Sparse: every constructor means the mask that its arguments say, pair by pair."""

from __future__ import annotations

import pytest
import torch
from sparse.masks import band, lists_of, mask_of
from torch.nn.attention.flex_attention import create_block_mask

from flash_cute import Sparse


def repeated(blocks: torch.Tensor, block: tuple[int, int], seqlens: tuple[int, int]):
    pairs = blocks.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return pairs[..., : seqlens[0], : seqlens[1]]


@pytest.mark.parametrize(
    "block", [(128, 128), (64, 64), (64, 128), (128, 64), (256, 128), (128, 384), (64, 256)]
)
@pytest.mark.parametrize("cut", [(0, 0), (37, 1), (63, 60)])
def test_blocks(block, cut):
    maps = torch.rand(2, 3, 5, 6) < 0.4
    seqlens = (5 * block[0] - cut[0], 6 * block[1] - cut[1])
    sparse = Sparse.blocks(*lists_of(maps), block=block, seqlens=seqlens)
    expected = repeated(maps, block, seqlens)
    assert torch.equal(mask_of(sparse), expected)
    assert (sparse.seqlen_q, sparse.seqlen_k) == seqlens
    assert sparse.density == pytest.approx(expected.float().mean().item())
    assert torch.equal(mask_of(Sparse.from_block_map(maps, block, seqlens=seqlens)), expected)


def test_blocks_without_lengths_fill_the_blocks():
    maps = torch.rand(1, 1, 3, 5) < 0.5
    sparse = Sparse.blocks(*lists_of(maps, capacity=5))
    assert (sparse.seqlen_q, sparse.seqlen_k) == (384, 640)
    assert torch.equal(mask_of(sparse), repeated(maps, (128, 128), (384, 640)))


def test_blocks_that_do_not_exist_or_repeat_are_no_matter():
    index = torch.tensor([2, -1, 2, 99, 0, 2**31 - 1, 1], dtype=torch.int32).view(1, 1, 1, 7)
    counts = torch.tensor([6], dtype=torch.int32).view(1, 1, 1)
    sparse = Sparse.blocks(index, counts, seqlens=(100, 500))
    assert sparse.tile_lists[0, 0, 0].tolist()[:3] == [[2, 15], [0, 15], [2, 15]]


def keeps(batch, head, query, key):
    """A mask function without any order."""
    return (query * 7 + key * 13 + head * 5 + batch * 3) % 11 < 4


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (256, 64)])
def test_full_blocks_have_no_masks(block):
    kinds = torch.randint(0, 3, (2, 2, 4, 5))  # 0 absent, 1 partial, 2 full
    seqlens = (4 * block[0] - 10, 5 * block[1] - 3)
    sparse = Sparse.blocks(
        *lists_of(kinds == 1), *lists_of(kinds == 2), block, keeps, seqlens=seqlens
    )
    b, h, q, k = (torch.arange(n) for n in (2, 2, *seqlens))
    asked = keeps(b[:, None, None, None], h[:, None, None], q[:, None], k)
    partial, full = (repeated(kinds == n, block, seqlens) for n in (1, 2))
    assert torch.equal(mask_of(sparse), (partial & asked) | full)
    if block == (128, 128):
        assert len(sparse.tile_bits) == (kinds == 1).sum()
    without = Sparse.blocks(*lists_of(kinds == 1), *lists_of(kinds == 2), block, seqlens=seqlens)
    assert without.tile_bits is None
    assert torch.equal(mask_of(without), partial | full)


@pytest.mark.parametrize("size", [128, (64, 128), 256])
@pytest.mark.parametrize("outer", [(None, None), (2, 3)])
def test_block_mask_of_torch(size, outer):
    documents = torch.randint(0, 6, (700,)).sort().values

    def document(batch, head, query, key):
        return (documents[query] == documents[key]) & (key <= query + 20 * head + batch)

    mask = create_block_mask(document, *outer, 700, 700, device="cpu", BLOCK_SIZE=size)
    sparse = Sparse.blocks(
        mask.kv_indices, mask.kv_num_blocks, mask.full_kv_indices, mask.full_kv_num_blocks,
        mask.BLOCK_SIZE, document, seqlens=mask.seq_lengths,
    )  # fmt: skip
    b, h, i = (torch.arange(n or 1) for n in (*outer, 700))
    expected = document(b[:, None, None, None], h[:, None, None], i[:, None], i)
    assert torch.equal(mask_of(sparse), expected)


def test_mask_functions_that_drop_or_keep_whole_blocks():
    maps = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    sparse = Sparse.blocks(*lists_of(maps), mask_mod=lambda b, h, q, k: k < 128)
    assert sparse.tile_lists[0, 0, :, :2].tolist() == [[[1, 15], [0, 15]]] * 3
    constant = Sparse.blocks(*lists_of(maps), mask_mod=lambda b, h, q, k: q.new_ones(()).bool())
    assert torch.equal(mask_of(constant), torch.ones(1, 1, 384, 384, dtype=torch.bool))


@pytest.mark.parametrize("granularity", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("layout", ["bshk", "bhsk"])
def test_topk(granularity, layout):
    seqlen_q, seqlen_k = 300, 450
    blocks = -(-seqlen_k // granularity)
    chosen = (torch.rand(2, 3, seqlen_q, blocks) < 0.2).scatter(
        -1, torch.randint(0, blocks, (2, 3, seqlen_q, 1)), True
    )
    chosen[:, 1, 7:200] = False  # rows that see nothing
    chosen[1, 2] = True
    order = torch.rand(chosen.shape).argsort(-1)
    named = torch.where(chosen.gather(-1, order), order, -1).int()
    indices = named if layout == "bhsk" else named.transpose(1, 2)
    sparse = Sparse.topk(indices, granularity, layout=layout, seqlen_k=seqlen_k)
    expected = chosen.repeat_interleave(granularity, -1)[..., :seqlen_k]
    assert torch.equal(mask_of(sparse), expected)
    assert sparse.density == pytest.approx(expected.float().mean().item())


def test_topk_of_one_choice_a_tile_has_no_masks():
    indices = torch.tensor([0, 3, 1]).repeat_interleave(128)[:300].view(1, 300, 1, 1)
    sparse = Sparse.topk(indices, seqlen_k=500)
    assert sparse.tile_bits is None
    assert sparse.tile_lists[0, 0, :, 1].tolist() == [[0, 15], [3, 15], [1, 15]]


def test_topk_ignores_indices_of_no_block():
    indices = torch.tensor([-7, 99, 2**31 - 1, 1], dtype=torch.int32).expand(1, 70, 1, 4)
    expected = torch.zeros(1, 1, 70, 200, dtype=torch.bool)
    expected[..., 32:64] = True
    assert torch.equal(mask_of(Sparse.topk(indices, 32, seqlen_k=200)), expected)


def test_topk_of_packed_sequences():
    lengths = (130, 0, 7, 257)
    indices = torch.randint(-1, 5, (sum(lengths), 2, 3), dtype=torch.int32)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    sparse = Sparse.topk(indices, 64, cu_seqlens_q=offsets, max_seqlen_q=257, seqlen_k=300)
    seen = mask_of(sparse)
    assert seen.shape == (4, 2, 257, 300)
    for b, part in enumerate(indices.split(lengths)):
        expected = torch.zeros(2, 257, 300, dtype=torch.bool)
        for block in range(5):
            named = (part == block).any(-1).T
            expected[:, : len(part), block * 64 : block * 64 + 64] |= named[..., None]
        assert torch.equal(seen[b], expected)


@pytest.mark.parametrize("count", [None, 1, 2])
@pytest.mark.parametrize("seqlens", [(300, 450), (128, 128), (500, 77)])
def test_intervals(count, seqlens):
    shape = (2, 3, seqlens[0]) if count is None else (2, 3, seqlens[0], count)
    first = torch.randint(-50, seqlens[1] + 50, shape, dtype=torch.int32)
    last = first + torch.randint(-20, seqlens[1], shape, dtype=torch.int32)
    sparse = Sparse.intervals(first, last, seqlen_k=seqlens[1])
    key = torch.arange(seqlens[1])
    begin, end = (x.view(2, 3, seqlens[0], -1)[..., None] for x in (first, last))
    expected = ((key >= begin) & (key < end)).any(3)
    assert torch.equal(mask_of(sparse), expected)
    assert sparse.density == pytest.approx(expected.float().mean().item())


def test_intervals_that_fill_tiles_have_no_masks():
    end = (torch.arange(512) // 64 + 1) * 64
    sparse = Sparse.intervals(end[None, None] - 64, end[None, None])
    assert sparse.tile_bits is None
    assert sparse.tile_lists[0, 0, :, 1, 1].tolist() == [0b1001] * 4
    first, last = (torch.tensor(x).expand(1, 1, 256, 2) for x in ([0, 100], [100, 256]))
    both = Sparse.intervals(first, last)
    assert both.tile_bits is None and both.density == 1  # two that touch are one


def hidden_by(columns: torch.Tensor, causal: bool, seqlen_q: int) -> torch.Tensor:
    """FlashMask's definition, query by query."""
    query = torch.arange(seqlen_q)[:, None]
    of_key = [x[..., None, :] for x in columns.unbind(-1)]
    if len(of_key) == 1:
        return query >= of_key[0]
    if causal:
        return (query >= of_key[0]) & (query < of_key[1])
    if len(of_key) == 2:
        return (query >= of_key[0]) | (query < of_key[1])
    lower = (query >= of_key[0]) & (query < of_key[1])
    return lower | ((query >= of_key[2]) & (query < of_key[3]))


@pytest.mark.parametrize(("causal", "count"), [(True, 1), (True, 2), (False, 2), (False, 4)])
@pytest.mark.parametrize("seqlens", [(300, 450), (256, 256), (500, 77)])
def test_flashmask(causal, count, seqlens):
    columns = torch.randint(-9, seqlens[0] + 9, (2, 2, seqlens[1], count), dtype=torch.int32)
    sparse = Sparse.from_flashmask(columns, causal, seqlen_q=seqlens[0])
    assert torch.equal(mask_of(sparse), ~hidden_by(columns, causal, seqlens[0]))
    assert sparse.needs_causal == causal


@pytest.mark.parametrize("seqlens", [(300, 450), (128, 256), (1, 1), (500, 77)])
def test_mask_function(seqlens):
    sparse = Sparse.from_mask_function(keeps, 2, 3, *seqlens)
    b, h, q, k = (torch.arange(n) for n in (2, 3, *seqlens))
    expected = keeps(b[:, None, None, None], h[:, None, None], q[:, None], k)
    assert torch.equal(mask_of(sparse), expected)


def test_mask_functions_are_asked_inside_of_the_sequences_alone():
    numbers = torch.rand(333)
    sparse = Sparse.from_mask_function(lambda b, h, q, k: numbers[q] < numbers[k], 1, 1, 333, 333)
    assert torch.equal(mask_of(sparse)[0, 0], numbers[:, None] < numbers)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (100, -1), (40, 70), (0, 0)])
@pytest.mark.parametrize("seqlens", [(300, 450), (450, 300)])
def test_visible_pairs_under_a_band(causal, window, seqlens):
    sparse = Sparse.from_mask_function(
        lambda b, h, q, k: (q // 100 + k // 90 + h) % 3 == 0, 1, 2, *seqlens
    )
    seen = band(*seqlens, causal, window)
    expected = (mask_of(sparse) & seen).sum().item() / 2
    assert sparse.visible_pairs(causal, window) == expected
    assert sparse.visible_pairs_of_dense(causal, window) == seen.sum().item()


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(seqlens):
    made = (
        Sparse.from_mask_function(keeps, 1, 2, *seqlens),
        Sparse.topk(torch.zeros(1, seqlens[0], 2, 3).long(), seqlen_k=seqlens[1]),
        Sparse.intervals(*torch.zeros(2, 1, 2, seqlens[0]).int(), seqlen_k=seqlens[1]),
    )
    for sparse in made:
        assert mask_of(sparse).shape == (1, 2, *seqlens)
        assert sparse.density == 0


@pytest.mark.parametrize("kind", ["none", "left", "right", "any", "tiles"])
@pytest.mark.parametrize("batches", [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_key_masks(kind, batches):
    seqlens = (200, 450)
    sparse = Sparse.from_mask_function(
        lambda b, h, q, k: (q // 70 + k // 90 + h + b) % 3 > 0, batches[0], 2, *seqlens
    )
    key, length = torch.arange(450), torch.randint(0, 451, (batches[1], 1))
    keys = {
        "none": torch.ones(batches[1], 450, dtype=torch.bool),
        "left": key >= length,
        "right": key < length,
        "any": torch.rand(batches[1], 450) < 0.7,
        "tiles": (torch.rand(batches[1], 8) < 0.5).repeat_interleave(64, 1)[:, :450],
    }[kind]
    kept = sparse.with_key_mask(keys)
    assert torch.equal(mask_of(kept), mask_of(sparse) & keys[:, None, None])
    if kind == "none":
        assert torch.equal(kept.tile_bits, sparse.tile_bits)
    assert (kept.seqlen_q, kept.seqlen_k, kept.format) == (*seqlens, sparse.format)


def test_explain_says_what_there_is():
    sparse = Sparse.from_mask_function(lambda b, h, q, k: k <= q, 1, 1, 256, 256)
    text = sparse.explain()
    for part in (
        "256 queries",
        "3 of 4",
        "2 with a mask",
        f"{sparse.density:.4f}",
        "mask_function",
    ):
        assert part in text
