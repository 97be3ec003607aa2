"""From a pattern to the blocks that a call keeps, on the device, which is not waited for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute.sparse import validate as check
from flash_cute.sparse.blocks import codes_of_blocks, codes_of_small_blocks
from flash_cute.sparse.budget import Budget, solve
from flash_cute.sparse.estimate import block_mass, estimated_mass
from flash_cute.sparse.gate import LearnedGate
from flash_cute.sparse.grid import COARSE, FINE, BlockGrid, grid_of
from flash_cute.sparse.lists import tile_lists
from flash_cute.sparse.patterns import FOLLOW_CONTENT, GLOBAL_BLOCKS, SparsePattern, preferences
from flash_cute.sparse.value import Sparse

_STEPS_OF_MASS = 2**40
_CONSTANT = (SparsePattern.BLOCK_SPARSE, SparsePattern.LOCAL_GLOBAL)


@dataclass(frozen=True)
class BlockChoice:
    """Blocks that are kept.

    Attributes:
        kept: bool (1 or batch, 1 or heads_k, blocks, blocks), rows are blocks of queries.
        grid: the blocks.
        lengths: (batch,) tokens of each sequence; None means all.
        most: tiles of 128 keys that any 128 queries see, if less than all is known.
    """

    kept: Tensor
    grid: BlockGrid
    lengths: Tensor | None = None
    most: int | None = None

    def sparsity(self) -> Tensor:
        """The share of visible pairs that is left out: fp64, one element."""
        pairs = self.grid.pairs(self.kept.device, self.lengths)
        kept = pairs * self.kept.sum(1, keepdim=True)
        repeats = self.kept.shape[1] * (kept.numel() // max(1, pairs.numel()))
        return 1 - kept.sum().double() / (repeats * pairs.sum()).clamp(min=1)

    def value(self) -> Sparse:
        """What attention functions take as ``sparse``."""
        seqlen, block = self.grid.seqlen, self.grid.block
        if block < FINE:
            codes, masks = codes_of_small_blocks(self.kept, block, seqlen)
        else:
            codes, masks = codes_of_blocks(self.kept, None, None, (block, block), (seqlen, seqlen))
        lists = tile_lists(codes, self.most)
        return Sparse(lists, masks, seqlen, seqlen, "from_block_map", granularity=block)


def budget_of(pattern: SparsePattern, grid: BlockGrid, sparsity_ratio: float) -> Budget:
    """How many blocks a pattern keeps in each row for a ratio."""
    is_global = pattern is SparsePattern.LOCAL_GLOBAL and not grid.is_causal
    return solve(grid, sparsity_ratio, pattern in _CONSTANT, GLOBAL_BLOCKS * is_global)


def keep_most(scores: Tensor, counts: Tensor, visible: Tensor) -> Tensor:
    """bool like ``scores`` (.., rows, blocks): the ``counts`` (.., rows) largest visible ones."""
    order = (
        scores.masked_fill(~visible, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    )
    first = torch.arange(scores.shape[-1], device=scores.device) < counts.unsqueeze(-1)
    shape = torch.broadcast_shapes(order.shape, first.shape)
    kept = torch.zeros(shape, dtype=torch.bool, device=scores.device)
    return kept.scatter(-1, order.expand(shape), first.expand(shape))


def keep_mass(mass: Tensor, threshold: float, visible: Tensor) -> Tensor:
    """bool like ``mass`` (.., rows, blocks): the fewest visible ones that hold ``threshold``."""
    mass = mass.masked_fill(~visible, 0)
    largest, order = mass.sort(dim=-1, descending=True, stable=True)
    steps = (largest.double() * _STEPS_OF_MASS).long()  # sums of integers are bitwise repeatable
    kept = steps.cumsum(-1) - steps < threshold * _STEPS_OF_MASS
    return torch.zeros_like(visible).expand_as(mass).scatter(-1, order, kept) & visible


def _sharing(pattern: SparsePattern, grid: BlockGrid) -> int:
    """Rows of blocks that keep the same: both of a kernel's tile, of 128 queries, where each would
    else choose other keys, and the tile compute them all."""
    scattered = pattern in (*FOLLOW_CONTENT, SparsePattern.RANDOM)
    return 2 if scattered and grid.block < COARSE and not grid.is_causal else 1


def _most(budget: Budget, grid: BlockGrid, sharing: int) -> int:
    """Tiles that any row of tiles has, whose rows of blocks may all keep others."""
    return budget.most * (COARSE // (grid.block * sharing))


def _shared(x: Tensor, rows: int) -> Tensor:
    """The means of x (.., rows, blocks) over each ``rows`` rows."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % rows)).unflatten(-2, (-1, rows)).mean(-2)


def _spread(kept: Tensor, visible: Tensor, rows: int) -> Tensor:
    """What each ``rows`` rows keep, as (.., rows, blocks) of all rows."""
    return kept.repeat_interleave(rows, -2)[..., : visible.shape[-2], :] & visible


def choose_blocks(
    q: Tensor,
    k: Tensor,
    pattern: SparsePattern | str,
    sparsity_ratio: float,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    threshold: float | None = None,
    stride: int = 16,
    seed: int = 0,
    gate: LearnedGate | None = None,
    lengths: Tensor | None = None,
) -> BlockChoice:
    """The blocks that a pattern keeps for q and k, without a gradient.

    Args:
        q: (batch, seqlen, heads, dim), any floating point.
        k: (batch, seqlen, heads_k, dim).
        pattern: a :class:`SparsePattern`, or its value.
        sparsity_ratio: share of the visible pairs that is left out, as nearly as blocks can.
        causal: token i sees token j only if ``j <= i``.
        softmax_scale: factor of q k^T; None means ``dim ** -0.5``.
        threshold: DYNAMIC_THRESHOLD and LEARNED keep the fewest blocks of each row that hold this
            share of its attention by their estimate, in place of the ratio.
        stride: of DYNAMIC_THRESHOLD's estimate, a power of two up to 64.
        seed: of RANDOM; the same one gives the same blocks, on every device.
        gate: of LEARNED.
        lengths: (batch,) tokens of each sequence; None means all.

    Raises:
        TypeError, ValueError: q and k of other shapes, a ratio outside of 0 to 0.95, a threshold
            outside of 0 to 1 or of a pattern that sees no content, a stride that is no power of two
            up to 64, LEARNED without a gate.

    Example::

        import torch
        from flash_cute import flash_attn_func
        from flash_cute.sparse import choose_blocks

        q, k, v = torch.randn(3, 1, 2048, 4, 64).unbind()
        choice = choose_blocks(q, k, "dynamic_threshold", 0.9)
        out = flash_attn_func(q, k, v, sparse=choice.value())
        print(choice.sparsity())
    """
    pattern = SparsePattern(pattern)
    check.choice(q, k, sparsity_ratio, threshold, stride, causal)
    if threshold is not None and pattern not in FOLLOW_CONTENT:
        raise ValueError(
            f"threshold is {threshold}, and pattern {pattern.name}; it is for "
            f"{' and '.join(x.name for x in FOLLOW_CONTENT)}"
        )
    grid = grid_of(q.shape[1], causal)
    if pattern not in FOLLOW_CONTENT:
        return choose_without_content(
            pattern, grid, sparsity_ratio, heads=k.shape[2], seed=seed, lengths=lengths,
            device=q.device,
        )  # fmt: skip
    if pattern is SparsePattern.LEARNED:
        if gate is None:
            raise ValueError("pattern is LEARNED and gate None; give a LearnedGate")
        with torch.no_grad():
            mass = gate(q, k, grid, softmax_scale=softmax_scale, lengths=lengths)
    elif grid.block < FINE:  # few tokens
        mass = block_mass(q, k, grid, softmax_scale=softmax_scale, lengths=lengths)
    else:
        mass = estimated_mass(
            q, k, grid, stride=stride, softmax_scale=softmax_scale, lengths=lengths
        )
    return choose_by_mass(mass, grid, sparsity_ratio, threshold=threshold, lengths=lengths)


def choose_without_content(
    pattern: SparsePattern,
    grid: BlockGrid,
    sparsity_ratio: float,
    *,
    heads: int = 1,
    seed: int = 0,
    lengths: Tensor | None = None,
    device: torch.device,
) -> BlockChoice:
    """RANDOM, BLOCK_SPARSE's band, STRIDED or LOCAL_GLOBAL; of RANDOM each head has its own."""
    visible = grid.visible(device, lengths)
    order = preferences(pattern, grid, sparsity_ratio, heads, seed, device)
    budget = budget_of(pattern, grid, sparsity_ratio)
    counts = budget.counts(visible.sum(-1))
    rows = _sharing(pattern, grid)
    kept = keep_most(_shared(order, rows), counts[..., ::rows], visible[..., ::rows, :])
    return BlockChoice(_spread(kept, visible, rows), grid, lengths, _most(budget, grid, rows))


def choose_by_mass(
    mass: Tensor,
    grid: BlockGrid,
    sparsity_ratio: float,
    *,
    threshold: float | None = None,
    lengths: Tensor | None = None,
) -> BlockChoice:
    """Those blocks of ``mass`` (batch, heads_k, blocks, blocks) that hold most.

    Each row keeps as many as the ratio says, its own block, the first and the one before its own
    among them where they are at most a quarter; a causal row always its own. With a ``threshold``
    it keeps the fewest that hold this share, and these three.
    """
    visible = grid.visible(mass.device, lengths)
    number = _number_of_forced(grid, mass.device)
    rows = _sharing(SparsePattern.DYNAMIC_THRESHOLD, grid)
    seen = visible[..., ::rows, :]
    if threshold is not None:
        kept = _spread(keep_mass(_shared(mass, rows), threshold, seen), visible, rows)
        return BlockChoice(kept | (number < 3) & visible, grid, lengths)
    budget = budget_of(SparsePattern.DYNAMIC_THRESHOLD, grid, sparsity_ratio)
    counts = budget.counts(visible.sum(-1))
    is_forced = number < (counts // 4).clamp(int(grid.is_causal), 3).unsqueeze(-1)
    preferred = _shared(mass + 3.0 * is_forced, rows)
    kept = _spread(keep_most(preferred, counts[..., ::rows], seen), visible, rows)
    return BlockChoice(kept, grid, lengths, _most(budget, grid, rows))


def _number_of_forced(grid: BlockGrid, device: torch.device) -> Tensor:
    """int64 (blocks, blocks): 0 for a row's own block, 1 for the first, 2 for the one before its
    own, 3 for all others."""
    row = torch.arange(grid.blocks, device=device).unsqueeze(-1)
    column = row.mT
    number = torch.full_like(row - column, 3)
    number = number.masked_fill(column == row - 1, 2).masked_fill(column == 0, 1)
    return number.masked_fill(column == row, 0)
