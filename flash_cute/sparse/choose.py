"""From a pattern to the blocks that a call keeps, on the device, which is not waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
from flash_cute.sparse.made_once import made_once
from flash_cute.sparse.patterns import FOLLOW_CONTENT, GLOBAL_BLOCKS, SparsePattern, preferences
from flash_cute.sparse.value import Sparse

_STEPS_OF_MASS = 2**40
_CONSTANT = (SparsePattern.BLOCK_SPARSE, SparsePattern.LOCAL_GLOBAL)


@dataclass(frozen=True)
class BlockChoice:
    """Blocks that are kept. A choice that follows no content is made once for many calls: its
    tensors, and those of its value, must not be changed.

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
    _made: tuple[Sparse, Tensor] | None = field(default=None, init=False, repr=False, compare=False)

    def sparsity(self) -> Tensor:
        """The share of visible pairs that is left out: fp64, one element."""
        if self._made is not None:
            return self._made[1]
        pairs = self.grid.pairs(self.kept.device, self.lengths)
        kept = pairs * self.kept.sum(1, keepdim=True)
        repeats = self.kept.shape[1] * (kept.numel() // max(1, pairs.numel()))
        visible: int | Tensor = max(1, repeats * self.grid.all_pairs)
        if self.lengths is not None:
            visible = (repeats * pairs.sum()).clamp(min=1)
        return 1 - kept.sum(dtype=torch.float64) / visible  # whole numbers: the sum is exact

    def value(self) -> Sparse:
        """What attention functions take as ``sparse``."""
        if self._made is not None:
            return self._made[0]
        seqlen, block = self.grid.seqlen, self.grid.block
        if block < FINE:
            codes, masks = codes_of_small_blocks(self.kept, block, seqlen)
        else:
            codes, masks = codes_of_blocks(self.kept, None, None, (block, block), (seqlen, seqlen))
        return self._sparse(tile_lists(codes, self.most), masks)

    def _sparse(self, lists: Tensor, masks: Tensor | None) -> Sparse:
        seqlen, block = self.grid.seqlen, self.grid.block
        return Sparse(lists, masks, seqlen, seqlen, "from_block_map", granularity=block)


def budget_of(pattern: SparsePattern, grid: BlockGrid, sparsity_ratio: float) -> Budget:
    """How many blocks a pattern keeps in each row for a ratio."""
    is_global = pattern is SparsePattern.LOCAL_GLOBAL and not grid.is_causal
    return solve(grid, sparsity_ratio, pattern in _CONSTANT, GLOBAL_BLOCKS * is_global)


def keep_most(scores: Tensor, ranks: Tensor) -> Tensor:
    """bool like ``scores`` (.., rows, blocks): of each row the largest, second, .. for which
    ``ranks``, bool (.., rows, most), is True; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., : ranks.shape[-1]]
    return _scattered(order, ranks, scores)


def keep_mass(mass: Tensor, threshold: float) -> Tensor:
    """bool like ``mass`` (.., rows, blocks): the fewest that hold ``threshold``."""
    largest, order = mass.sort(dim=-1, descending=True, stable=True)
    steps = (largest * _STEPS_OF_MASS).long()  # sums of integers are bitwise repeatable
    return _scattered(order, steps.cumsum(-1) - steps < threshold * _STEPS_OF_MASS, mass)


def _scattered(order: Tensor, chosen: Tensor, like: Tensor) -> Tensor:
    """bool like ``like``: what ``chosen`` says of the columns ``order``."""
    kept = torch.zeros_like(like, dtype=torch.bool)
    return kept.scatter_(-1, order, chosen.expand(order.shape))


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
    if rows == 1:
        return x
    return F.pad(x, (0, 0, 0, -x.shape[-2] % rows)).unflatten(-2, (-1, rows)).mean(-2)


def _spread(kept: Tensor, grid: BlockGrid, lengths: Tensor | None, rows: int) -> Tensor:
    """What each ``rows`` rows keep, as (.., rows, blocks) of all rows."""
    if rows > 1:
        kept = kept.repeat_interleave(rows, -2)[..., : grid.blocks, :]
    return kept if grid.sees_all(lengths) else kept & grid.visible(kept.device, lengths)


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
        TypeError, ValueError: q and k of other shapes, lengths that are no (batch,) ints, a ratio
            outside of 0 to 0.95, a threshold outside of 0 to 1 or of a pattern that sees no
            content, a stride that is no power of two up to 64, LEARNED without a gate.

    Example::

        import torch
        from flash_cute import flash_attn_func
        from flash_cute.sparse import choose_blocks

        q, k, v = torch.randn(3, 1, 2048, 4, 64).unbind()
        choice = choose_blocks(q, k, "dynamic_threshold", 0.9)
        out = flash_attn_func(q, k, v, sparse=choice.value())
        print(choice.sparsity())
    """
    pattern = _pattern_of(pattern)
    check.choice(q, k, sparsity_ratio, threshold, stride, causal, lengths, softmax_scale, seed)
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
        if not isinstance(gate, LearnedGate):
            raise TypeError(f"gate is {type(gate).__name__}; expected a LearnedGate")
        gate.check(q, k)
        with torch.no_grad():
            mass = gate(q, k, grid, softmax_scale=softmax_scale, lengths=lengths)
    elif grid.block < FINE:  # few tokens
        mass = block_mass(q, k, grid, softmax_scale=softmax_scale, lengths=lengths)
    else:
        mass = estimated_mass(
            q, k, grid, stride=stride, softmax_scale=softmax_scale, lengths=lengths
        )
    return choose_by_mass(mass, grid, sparsity_ratio, threshold=threshold, lengths=lengths)


def _pattern_of(pattern: Any) -> SparsePattern:
    try:
        return SparsePattern(pattern)
    except ValueError:
        supported = ", ".join(repr(x.value) for x in SparsePattern)
        raise ValueError(f"pattern is {pattern!r}; supported: {supported}") from None


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
    if pattern is not SparsePattern.RANDOM:
        heads, seed = 1, 0
    if lengths is not None:
        return _without_content(device, pattern, grid, sparsity_ratio, heads, seed, lengths)
    kept, lists, masks, sparsity = _made(device, pattern, grid, sparsity_ratio, heads, seed)
    most = _most(budget_of(pattern, grid, sparsity_ratio), grid, _sharing(pattern, grid))
    choice = BlockChoice(kept, grid, most=most)
    object.__setattr__(choice, "_made", (choice._sparse(lists, masks), sparsity))
    return choice


@made_once
def _made(
    device: torch.device,
    pattern: SparsePattern,
    grid: BlockGrid,
    sparsity_ratio: float,
    heads: int,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """A choice of whole sequences: what is kept, its value's lists and masks, and its sparsity."""
    choice = _without_content(device, pattern, grid, sparsity_ratio, heads, seed, None)
    value = choice.value()
    return choice.kept, value.tile_lists, value.tile_bits, choice.sparsity()


def _without_content(
    device: torch.device,
    pattern: SparsePattern,
    grid: BlockGrid,
    sparsity_ratio: float,
    heads: int,
    seed: int,
    lengths: Tensor | None,
) -> BlockChoice:
    order = preferences(pattern, grid, sparsity_ratio, heads, seed, device)
    budget, rows = budget_of(pattern, grid, sparsity_ratio), _sharing(pattern, grid)
    visible = grid.visible(device, lengths)
    ranks = budget.ranks(budget.counts(visible.sum(-1))[..., ::rows], grid.blocks)
    kept = keep_most(_shared(order, rows).masked_fill(~visible[..., ::rows, :], -torch.inf), ranks)
    return BlockChoice(_spread(kept, grid, lengths, rows), grid, lengths, _most(budget, grid, rows))


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
    rows = _sharing(SparsePattern.DYNAMIC_THRESHOLD, grid)
    if threshold is not None:
        forced, seen = _forced(mass.device, grid, lengths)
        mass = _shared(mass, rows)
        if not grid.sees_all(lengths):
            mass = mass.masked_fill(~seen[..., ::rows, :], 0)
        kept = _spread(keep_mass(mass, threshold), grid, lengths, rows)
        return BlockChoice(kept | forced, grid, lengths)
    bonus, ranks = _bonus_and_ranks(mass.device, grid, sparsity_ratio, lengths)
    kept = _spread(keep_most(_shared(mass, rows) + bonus, ranks), grid, lengths, rows)
    budget = budget_of(SparsePattern.DYNAMIC_THRESHOLD, grid, sparsity_ratio)
    return BlockChoice(kept, grid, lengths, _most(budget, grid, rows))


@made_once
def _bonus_and_ranks(
    device: torch.device, grid: BlockGrid, sparsity_ratio: float, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What masses of rows that keep the same get besides, fp32: those that are forced the most, and
    the invisible the least; and the ranks that rows keep."""
    budget = budget_of(SparsePattern.DYNAMIC_THRESHOLD, grid, sparsity_ratio)
    rows = _sharing(SparsePattern.DYNAMIC_THRESHOLD, grid)
    visible = grid.visible(device, lengths)
    counts = budget.counts(visible.sum(-1))
    most_forced = (counts // 4).clamp(int(grid.is_causal), 3).unsqueeze(-1)
    bonus = _shared(3 * (_number_of_forced(grid, device) < most_forced).float(), rows)
    return (
        bonus.masked_fill(~visible[..., ::rows, :], -torch.inf),
        budget.ranks(counts[..., ::rows], grid.blocks),
    )


@made_once
def _forced(device: torch.device, grid: BlockGrid, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Whether blocks are forced and visible, and whether they are visible."""
    visible = grid.visible(device, lengths)
    return (_number_of_forced(grid, device) < 3) & visible, visible


def _number_of_forced(grid: BlockGrid, device: torch.device) -> Tensor:
    """int64 (blocks, blocks): 0 for a row's own block, 1 for the first, 2 for the one before its
    own, 3 for all others."""
    row = torch.arange(grid.blocks, device=device).unsqueeze(-1)
    column = row.mT
    number = torch.full_like(row - column, 3)
    number = number.masked_fill(column == row - 1, 2).masked_fill(column == 0, 1)
    return number.masked_fill(column == row, 0)
