"""What the tests of sparse attention share: the mask that a value means, read off its lists one
entry after the other, and random inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute import Sparse


def mask_of(sparse: Sparse) -> Tensor:
    """bool (batch or 1, heads or 1, seqlen_q, seqlen_k), by the definition of lists, which are
    checked on the way: ascending, within the tiles, no empty entry."""
    lists, bits = sparse.tile_lists, sparse.tile_bits
    rows, columns = (-(-x // 128) for x in (sparse.seqlen_q, sparse.seqlen_k))
    assert lists.dtype == torch.int32 and lists.is_contiguous()
    assert lists.shape[2] == rows and lists.shape[4] == 2
    seen = torch.zeros(*lists.shape[:2], rows * 128, columns * 128, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in lists.shape[:3])).tolist():
        count, of_all = lists[b, h, i, 0].tolist()
        assert of_all in (0, 15) and 0 <= count < lists.shape[3]
        assert of_all == 0 or (count > 0 and (lists[b, h, i, 1 : 1 + count, 1] == 15).all())
        before = -1
        for column, code in lists[b, h, i, 1 : 1 + count].tolist():
            assert before < column < columns and code > 0
            before = column
            tile = seen[b, h, i * 128 : i * 128 + 128, column * 128 : column * 128 + 128]
            for quadrant in range(4):
                top, left = quadrant // 2 * 64, quadrant % 2 * 64
                tile[top : top + 64, left : left + 64] = bool(code >> quadrant & 1)
            if code >= 16:
                words = bits[code // 16 - 1]
                assert words.dtype == torch.int32 and words.shape == (128, 4)
                pairs = torch.stack([words >> c & 1 for c in range(32)], -1).flatten(1).bool()
                assert not (pairs & ~tile).any()  # quadrants say which have any visible pair
                tile &= pairs
            assert tile.any()
    return seen[:, :, : sparse.seqlen_q, : sparse.seqlen_k]


def band(seqlen_q: int, seqlen_k: int, causal: bool = False, window=(-1, -1)) -> Tensor:
    """bool (seqlen_q, seqlen_k)."""
    distance = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window[0] >= 0:
        seen &= distance <= window[0]
    if window[1] >= 0:
        seen &= distance >= -window[1]
    return seen


def lists_of(blocks: Tensor, capacity: int | None = None) -> tuple[Tensor, Tensor]:
    """index and counts, int32, of a map of blocks: in random order, with any numbers behind."""
    capacity = capacity or max(1, int(blocks.sum(-1).max()))
    index = torch.randint(-9, 99, (*blocks.shape[:-1], capacity), dtype=torch.int32)
    counts = blocks.sum(-1).int()
    for at in torch.cartesian_prod(*(torch.arange(n) for n in blocks.shape[:3])).tolist():
        named = blocks[tuple(at)].nonzero()[:, 0]
        index[tuple(at)][: len(named)] = named[torch.randperm(len(named))].int()
    return index, counts
