"""How many blocks each row of blocks keeps, so that a given share of visible pairs is left out.

Counts are whole; the fraction that a row lacks is made up by others, spread evenly over the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.sparse.grid import BlockGrid

_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, fill [0, 1) evenly


@dataclass(frozen=True)
class Budget:
    """How many blocks each row keeps: ``size * visible`` of its visible ones, or ``size`` if all
    rows keep as many (``is_constant``); at least one, and of the first ``global_rows`` all.

    Attributes:
        size: blocks, or a share of the visible ones.
        is_constant: of a band that is as wide everywhere.
        global_rows: rows of blocks that see all.
        sparsity: share of visible pairs that this leaves out if each row keeps its own block.
        most: no row keeps more blocks, however a compiler rounds its share.
    """

    size: float
    is_constant: bool
    global_rows: int
    sparsity: float
    most: int

    def counts(self, visible: Tensor) -> Tensor:
        """int64 (.., rows) of ``visible`` (.., rows), the visible blocks of each row. The band of a
        sequence that is shorter than the others is as much narrower."""
        rows = torch.arange(visible.shape[-1], device=visible.device)
        phase = rows.double() * _GOLDEN % 1
        blocks = visible.amax(-1, keepdim=True)
        per_row = blocks / len(rows) if self.is_constant else visible
        wanted = self.size * per_row.double() + phase
        kept = wanted.floor().long().clamp(min=1).minimum(visible)
        return torch.where(rows < self.global_rows, visible, kept)

    def ranks(self, counts: Tensor, blocks: int) -> Tensor:
        """bool (.., rows, most or ``blocks``): whether a row of ``counts`` (.., rows) keeps the
        first, second, .. of what it prefers."""
        rank = torch.arange(min(self.most, blocks), device=counts.device)
        return rank < counts.unsqueeze(-1)


def solve(
    grid: BlockGrid, sparsity_ratio: float, is_constant: bool = False, global_rows: int = 0
) -> Budget:
    """The budget that leaves out ``sparsity_ratio`` of the visible pairs, as nearly as blocks
    can."""
    size, sparsity, most = _solved(
        grid.seqlen, grid.block, grid.is_causal, sparsity_ratio, is_constant, global_rows
    )
    return Budget(size, is_constant, global_rows, sparsity, most)


@internals.constant_in_graphs
def _solved(*of: Any) -> tuple[float, float, int]:
    return _solve(*of)


@lru_cache(maxsize=256)
def _solve(
    seqlen: int,
    block: int,
    is_causal: bool,
    sparsity_ratio: float,
    is_constant: bool,
    global_rows: int,
) -> tuple[float, float, int]:
    """:class:`Budget`'s size, sparsity and most."""
    grid = BlockGrid(seqlen, block, is_causal)
    visible = [grid.visible_in_row(row) for row in range(grid.blocks)]
    halves = grid.blocks / 2 if is_causal else 0  # a causal block on the diagonal is half a one

    def counts(size: float) -> list[int]:
        wanted = [
            int(size * (1 if is_constant else blocks) + row * _GOLDEN % 1)
            for row, blocks in enumerate(visible)
        ]
        kept = [min(max(x, 1), blocks) for x, blocks in zip(wanted, visible, strict=True)]
        return visible[:global_rows] + kept[global_rows:]

    def sparsity(size: float) -> float:
        return 1 - (sum(counts(size)) - halves) / max(sum(visible) - halves, 1)

    low, high = 0.0, float(grid.blocks if is_constant else 1)
    for _ in range(48):
        middle = (low + high) / 2
        low, high = (middle, high) if sparsity(middle) > sparsity_ratio else (low, middle)
    nearest = min((low, high), key=lambda size: abs(sparsity(size) - sparsity_ratio))
    return nearest, sparsity(nearest), 1 + max(counts(nearest), default=0)
