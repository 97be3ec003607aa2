"""Which rows of a cache a call has to do with, as tensors: nothing here waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_cute.call.sizes import batch_of, cache_capacity, longest_queries
from flash_cute.call.validate import ops as validate_ops
from flash_cute.ops.typed import FwdKvcacheCall

MOST_ROWS = 64  # of queries a kv head, for which kernels read 8 bits with q in 16


class Rows(NamedTuple):
    """The rows of q or of k, one behind the other, int64 (rows,), and how many each sequence has,
    int64 (batch,)."""

    counts: Tensor
    sequence: Tensor
    place: Tensor  # in its sequence
    belongs: Tensor  # bool: to a sequence

    @classmethod
    def of(cls, x: Tensor, offsets: Tensor | None, longest: int) -> Rows:
        """Rows of x (batch, seqlen, ..), or with ``offsets`` (batch + 1,) of x (total, ..), whose
        sequences have ``longest`` rows at most."""
        device = x.device
        if offsets is None:
            batch, seqlen = x.shape[:2]
            counts = torch.full((batch,), seqlen, device=device)
            sequence = torch.arange(batch, device=device).repeat_interleave(seqlen)
            place = torch.arange(seqlen, device=device).repeat(batch)
            return cls(counts, sequence, place, torch.ones_like(place, dtype=torch.bool))
        offsets = offsets.long().clamp(0, len(x))
        counts = (offsets[1:] - offsets[:-1]).clamp(0, longest)
        places = torch.arange(len(x), device=device)[:, None] - offsets[:-1]
        inside = (places >= 0) & (places < counts)  # (rows, sequences)
        belongs = inside.any(-1)
        last = inside * torch.arange(1, len(counts) + 1, device=device)  # of several sequences
        sequence = last.amax(-1).sub(1).clamp_min(0)
        place = places.gather(-1, sequence[:, None])[:, 0].masked_fill(~belongs, 0)
        return cls(counts, sequence, place, belongs)


def query_rows(call: FwdKvcacheCall) -> int:
    """Queries of the longest sequence times query heads of a kv head."""
    return longest_queries(call) * (call.q.shape[-2] // call.k_cache.shape[-2])


def begins_on_vectors(cache: Tensor) -> bool:
    """Whether rows of the heads of an 8-bit cache begin on 16-byte boundaries; in a graph an
    address is the kernel's to refuse."""
    steps = [step for n, step in zip(cache.shape[:-1], cache.stride(), strict=False) if n > 1]
    begins = 0 if torch.compiler.is_compiling() else validate_ops.address(cache) or 0
    return not any(at % 16 for at in (begins, *steps))


def capacity(call: FwdKvcacheCall) -> int:
    """Keys that the cache has room for, of a sequence."""
    return cache_capacity(call.k_cache, call.block_table)


def keys_before(call: FwdKvcacheCall) -> Tensor:
    """Keys in use of each sequence before others join: int64 (batch,)."""
    room = capacity(call)
    if call.cache_seqlens is None:
        return torch.full((batch_of(call),), room, device=call.q.device)
    return call.cache_seqlens.long().clamp(0, room)


def with_new_keys(call: FwdKvcacheCall, used: Tensor) -> Tensor:
    """Keys in use of each sequence after k joined."""
    if call.k is None:
        return used
    offsets = call.cu_seqlens_k_new
    new = call.k.shape[1] if offsets is None else (offsets[1:] - offsets[:-1]).clamp_min(0)
    return (used + new).clamp_max(capacity(call))
