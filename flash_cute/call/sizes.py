"""Sizes of a call, which dense ones have as shapes, and packed ones as offsets and numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def batch_of(call: Any) -> int:
    """How many sequences a call has."""
    offsets = getattr(call, "cu_seqlens_q", None)
    return call.q.shape[0] if offsets is None else offsets.shape[0] - 1


def longest_queries(call: Any) -> int:
    """Queries of the longest sequence."""
    packed = getattr(call, "cu_seqlens_q", None) is not None
    return call.max_seqlen_q if packed else call.q.shape[1]


def longest_keys(call: Any) -> int:
    """Keys of the longest sequence; not of a cache, whose lengths are data."""
    return call.max_seqlen_k if hasattr(call, "max_seqlen_k") else call.k.shape[1]


def cache_capacity(k_cache: Tensor, block_table: Tensor | None) -> int:
    """Keys of a sequence that a cache (batch or pages, rows, heads_k, dim) has room for."""
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
