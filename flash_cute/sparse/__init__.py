"""Sparse attention: which pairs of queries and keys are computed."""

from __future__ import annotations

from flash_cute.sparse.choose import BlockChoice, choose_blocks
from flash_cute.sparse.gate import LearnedGate
from flash_cute.sparse.indexer import indexer_topk
from flash_cute.sparse.patterns import SparsePattern
from flash_cute.sparse.value import Sparse

__all__ = [
    "BlockChoice",
    "LearnedGate",
    "Sparse",
    "SparsePattern",
    "choose_blocks",
    "indexer_topk",
]
