"""The blocks of a sequence's scores: which are visible, and how many pairs each holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_cute.sparse.made_once import made_once

FINE, COARSE = 64, 128
COARSE_FROM = 4096  # tokens, from which blocks of 128 are fine enough
FEWEST = 16  # blocks in a row, from as many tokens on: any ratio is met within 1 / 16


@dataclass(frozen=True)
class BlockGrid:
    """Square blocks of the scores of ``seqlen`` tokens with themselves.

    Attributes:
        seqlen: tokens.
        block: rows and keys of a block.
        is_causal: token i sees token j only if ``j <= i``.
    """

    seqlen: int
    block: int
    is_causal: bool = False

    @property
    def blocks(self) -> int:
        """Blocks in a row, and rows of blocks."""
        return -(-self.seqlen // self.block)

    def visible_in_row(self, row: int) -> int:
        """Blocks of a row of blocks in which at least one pair is visible."""
        return row + 1 if self.is_causal else self.blocks

    @property
    def all_pairs(self) -> int:
        """The visible pairs of all blocks."""
        return self.seqlen * (self.seqlen + 1) // 2 if self.is_causal else self.seqlen**2

    def is_full(self, lengths: Tensor | None = None) -> bool:
        """Whether each block holds ``block`` tokens."""
        return lengths is None and self.seqlen % self.block == 0

    def sees_all(self, lengths: Tensor | None = None) -> bool:
        """Whether all blocks are visible."""
        return lengths is None and not self.is_causal

    @made_once
    def visible(self, device: torch.device, lengths: Tensor | None = None) -> Tensor:
        """bool (1 or batch, 1, blocks, blocks); ``lengths`` (batch,) are those of the sequences,
        None means ``seqlen``."""
        return self.pairs(device, lengths) > 0

    @made_once
    def pairs(self, device: torch.device, lengths: Tensor | None = None) -> Tensor:
        """int64 (1 or batch, 1, blocks, blocks): the visible pairs of each block."""
        tokens = self.tokens(device, lengths).unsqueeze(1)
        pairs = tokens.unsqueeze(-1) * tokens.unsqueeze(-2)
        if not self.is_causal:
            return pairs
        triangles = torch.diag_embed(tokens * (tokens + 1) // 2)
        return pairs.tril(-1) + triangles

    @made_once
    def padding(self, device: torch.device, lengths: Tensor | None = None) -> Tensor:
        """bool (1 or batch, blocks * block): what is no token."""
        whole = self.seqlen if lengths is None else lengths.view(-1, 1)
        places = torch.arange(self.blocks * self.block, device=device)
        return (places >= whole).view(-1, len(places))

    @made_once
    def tokens(self, device: torch.device, lengths: Tensor | None = None) -> Tensor:
        """int64 (1 or batch, blocks): how many tokens each block holds."""
        first = torch.arange(self.blocks, device=device) * self.block
        whole = self.seqlen if lengths is None else lengths.long().view(-1, 1)
        return (whole - first).clamp(0, self.block).view(-1, self.blocks)

    @made_once
    def seen(
        self, queries: int, keys: int, device: torch.device, lengths: Tensor | None = None
    ) -> Tensor:
        """int32 (1 or batch, blocks * queries): of ``keys`` runs of keys a block, how many each run
        of queries sees, from the first on; 0 if it holds no token."""
        run_q, run_k = self.block // queries, self.block // keys
        first = torch.arange(self.blocks * queries, device=device) * run_q
        whole = self.seqlen if lengths is None else lengths.long().view(-1, 1)
        past = first + run_q if self.is_causal else torch.full_like(first, self.seqlen)
        runs = (past.clamp(max=whole) + run_k - 1) // run_k
        return torch.where(first < whole, runs, 0).int().view(-1, len(first))


def grid_of(seqlen: int, is_causal: bool) -> BlockGrid:
    """The blocks that patterns choose from: of 128 x 128 from 4096 tokens on, of 64 x 64 from 1024
    on, and below of half of that as often as it takes to have 16 in a row."""
    seqlen = len(range(seqlen))  # a number, by which graphs are specialised
    block = COARSE if seqlen >= COARSE_FROM else FINE
    while block > 1 and seqlen < FEWEST * block:
        block //= 2
    return BlockGrid(seqlen, block, is_causal)
