"""The patterns that choose blocks, and the order in which those that see no content do."""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

from flash_cute.sparse.grid import BlockGrid

GLOBAL_BLOCKS = 1  # that all see, and that see all, in LOCAL_GLOBAL
_MASK_OF_32_BITS = 0xFFFFFFFF


class SparsePattern(Enum):
    """Which blocks of keys a block of queries sees.

    RANDOM: its own, and others by chance. BLOCK_SPARSE: those of a given map, or the nearest.
    STRIDED: every l-th before and behind its own, and the nearest (Sparse Transformers, arXiv
    1904.10509). LOCAL_GLOBAL: the nearest, and the first, which sees all (Longformer, arXiv
    2004.05150). DYNAMIC_THRESHOLD: those that get most attention by an estimate from q and k.
    LEARNED: those that get most by a gate, which is trained for it.

    Example::

        from flash_cute.attention import SparsePattern, create_sparse_attention

        attention = create_sparse_attention(512, 8, pattern=SparsePattern.STRIDED)
        same = create_sparse_attention(512, 8, pattern="strided")
    """

    RANDOM = "random"
    BLOCK_SPARSE = "block_sparse"
    STRIDED = "strided"
    LOCAL_GLOBAL = "local_global"
    DYNAMIC_THRESHOLD = "dynamic_threshold"
    LEARNED = "learned"


FOLLOW_CONTENT = (SparsePattern.DYNAMIC_THRESHOLD, SparsePattern.LEARNED)


def preferences(
    pattern: SparsePattern,
    grid: BlockGrid,
    sparsity_ratio: float,
    heads: int,
    seed: int,
    device: torch.device,
) -> Tensor:
    """What a pattern without content takes first: fp64 (1, heads or 1, blocks, blocks), the largest
    first. Of a row no two are equal, but RANDOM's by chance."""
    row = torch.arange(grid.blocks, device=device).unsqueeze(-1)
    column = row.mT
    near = -(2 * (row - column).abs() - (column < row).long())  # of two as near the one before
    if pattern is SparsePattern.RANDOM:
        drawn = _hash(seed, heads, row, column)
        return drawn.masked_fill(row == column, 4 * _MASK_OF_32_BITS).double().unsqueeze(0)
    first = torch.zeros_like(near, dtype=torch.bool)
    if pattern is SparsePattern.STRIDED:
        first = (row - column) % stride_of(sparsity_ratio) == 0
    if pattern is SparsePattern.LOCAL_GLOBAL:
        first = (column < GLOBAL_BLOCKS).expand_as(near)
    return torch.where(first, near + 2 * grid.blocks, near).double()[None, None]


def stride_of(sparsity_ratio: float) -> int:
    """STRIDED's distance, in blocks: half of what is kept goes to it, half to the nearest."""
    return math.ceil(2 / (1 - sparsity_ratio))


def _hash(seed: int, heads: int, row: Tensor, column: Tensor) -> Tensor:
    """int64 (heads, rows, columns) of 32 bits each, by chance, the same on every device."""
    x = torch.arange(heads, device=row.device).view(-1, 1, 1) + (seed & _MASK_OF_32_BITS)
    for place in (0, row, column):
        x = (x + place) & _MASK_OF_32_BITS
        for _ in range(2):
            x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK_OF_32_BITS
        x = x ^ (x >> 16)
    return x
