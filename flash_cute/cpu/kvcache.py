"""Attention over a key/value cache: ``fwd_kvcache``, and ``combine``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.cpu import varlen
from flash_cute.cpu.forward import Outputs, attend
from flash_cute.cpu.tiles import Options, compute_dtype

if TYPE_CHECKING:
    from flash_cute.ops.typed import AttendQuantizedKvcacheCall, FwdKvcacheCall

    AnyCall = FwdKvcacheCall | AttendQuantizedKvcacheCall


class Rotary(NamedTuple):
    """Rotary embedding: cos and sin (positions, rotary_dim / 2), and which dims make a pair."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (rows, heads, dim), each row rotated to its position, in its dtype."""
        positions = positions.clamp(0, len(self.cos) - 1)
        cos, sin = (table[positions, None].to(compute_dtype(x)) for table in (self.cos, self.sin))
        half = cos.shape[-1]
        pairs = x[..., : 2 * half].to(cos.dtype)
        pairs = pairs.unflatten(-1, (half, 2) if self.interleaved else (2, half))
        axis = -1 if self.interleaved else -2
        a, b = pairs.unbind(axis)
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2)
        return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), -1)


class CachedSequence(NamedTuple):
    """A sequence in a cache: its pages in order, and its rows before k is appended."""

    pages: Tensor  # (blocks,), ids of which some may not exist
    used: int
    leftpad: int
    capacity: int  # rows of all its pages

    def rows(self, cache: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Page, row in the page, and whether the page exists, of rows [first, last)."""
        page_size = max(cache.shape[1], 1)
        rows = torch.arange(first, last, device="cpu")
        ids = self.pages[rows // page_size]
        return ids, rows % page_size, (ids >= 0) & (ids < len(cache))

    def write(self, cache: Tensor, new: Tensor, last: int) -> None:
        """Writes the first rows of ``new`` after those in use, up to row ``last``."""
        ids, rows, exists = self.rows(cache, self.used, last)
        cache[ids[exists], rows[exists]] = new[: len(ids)][exists]

    def read(self, cache: Tensor, last: int) -> Tensor:
        """Rows [leftpad, last) as a batch of one, a view if they are in one page; pages that do not
        exist are zeros."""
        if len(self.pages) == 1 and 0 <= (page := int(self.pages)) < len(cache):
            return cache[page, None, self.leftpad : last]
        ids, rows, exists = self.rows(cache, self.leftpad, last)
        gathered = cache.new_zeros((len(ids), *cache.shape[2:]))
        gathered[exists] = cache[ids[exists], rows[exists]]
        return gathered[None]


def cached_sequences(call: AnyCall, batch: int) -> Iterator[CachedSequence]:
    """Each sequence; without a table it has one page."""
    if call.block_table is not None:
        pages = call.block_table.long()
    elif call.cache_batch_idx is not None:
        pages = call.cache_batch_idx.long()[:, None]
    else:
        pages = torch.arange(batch, device="cpu")[:, None]
    capacity = pages.shape[1] * call.k_cache.shape[1]
    used, leftpad = call.cache_seqlens, call.cache_leftpad
    lengths = [capacity] * batch if used is None else used.clamp(0, capacity).tolist()
    pads = [0] * batch if leftpad is None else leftpad.tolist()
    for page, length, pad in zip(pages, lengths, pads, strict=True):
        yield CachedSequence(page, length, min(max(pad, 0), length), capacity)


@torch.no_grad()
def fwd_kvcache(call: FwdKvcacheCall) -> tuple[Tensor, Tensor]:
    """The op ``fwd_kvcache`` on the CPU: (out, softmax_lse); k and v are appended in place.

    q (batch, seqlen_q, heads, dim), or (total_q, heads, dim) with ``cu_seqlens_q``; caches (batch,
    capacity, heads_k, dim or dim_v), or (num_blocks, page_size, ..) with ``block_table``. No row's
    result depends on another row, so ``num_splits`` and ``split_size`` change nothing.
    """
    q, options = call.q, Options.of(call)
    rotary = None
    if call.rotary_cos is not None and call.rotary_sin is not None:
        rotary = Rotary(call.rotary_cos, call.rotary_sin, call.rotary_interleaved)
    step = int(max(options.window) >= 0)  # without a window all queries have the first's position
    packed, offsets, longest_q = packed_queries(call)
    outputs = Outputs.of_no_keys(packed, call.v_cache, (q.shape[-2], len(packed)), (), False, False)
    sequences = list(cached_sequences(call, len(offsets) - 1))
    appended = _new_rows(call, len(sequences))
    rows_of_each = varlen.spans(offsets, None, longest_q, len(packed))
    for index, (rows, sequence) in enumerate(zip(rows_of_each, sequences, strict=True)):
        queries, last = packed[rows], sequence.used
        position = last if call.rotary_seqlens is None else int(call.rotary_seqlens[index])
        if call.k is not None and call.v is not None:
            new_k, new_v = call.k[appended[index]], call.v[appended[index]]
            last = min(last + len(new_k), sequence.capacity)
            if rotary is not None:
                places = torch.arange(max(len(new_k), len(queries)), device="cpu")
                new_k = rotary.rotate(new_k, position + places[: len(new_k)])
                queries = rotary.rotate(queries, position + step * places[: len(queries)])
            sequence.write(call.k_cache, new_k, last)
            sequence.write(call.v_cache, new_v, last)
        keys, values = sequence.read(call.k_cache, last), sequence.read(call.v_cache, last)
        part = outputs.of_sequence(index, rows, keys.shape[1])
        attend(queries[None], keys, values, options, part, index)
    return results_of(call, outputs)


def packed_queries(call: AnyCall) -> tuple[Tensor, Tensor, int]:
    """q as (total_q, heads, dim), the offsets of its sequences, and the longest one's length."""
    q = call.q
    if call.cu_seqlens_q is not None:
        return q, call.cu_seqlens_q, call.max_seqlen_q
    return q.flatten(0, 1), torch.arange(len(q) + 1, device="cpu") * q.shape[1], q.shape[1]


def results_of(call: AnyCall, outputs: Outputs) -> tuple[Tensor, Tensor]:
    """out and softmax_lse of a call, of those of packed queries."""
    q, out, lse = call.q, outputs.out, outputs.softmax_lse
    if call.cu_seqlens_q is None:
        with internals.below_versions():  # the tensors are new, and have no views
            out = out.view(*q.shape[:-1], out.shape[-1])
            lse = lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1).contiguous()
    return out, lse


def _new_rows(call: FwdKvcacheCall, batch: int) -> Sequence[int | slice]:
    """The rows of k and v that are appended to each sequence."""
    if call.k is None or call.cu_seqlens_k_new is None:
        return range(batch)
    return list(varlen.spans(call.cu_seqlens_k_new, None, len(call.k), len(call.k)))


@torch.no_grad()
def combine(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The op ``combine`` on the CPU: (out, lse) of parts over different keys.

    ``out_partial`` (parts, .., dim) and ``lse_partial`` (parts, ..), fp32. A part whose lse is -inf
    saw no key, and may hold anything.
    """
    top = lse_partial.amax(0)
    weights = (lse_partial - top.masked_fill(top == -torch.inf, 0)).exp_()
    total = weights.sum(0)
    parts = out_partial.masked_fill(weights[..., None] == 0, 0)
    out = (weights[..., None] * parts).sum(0).div_(total.masked_fill(total == 0, 1)[..., None])
    lse = torch.where(total == 0, -torch.inf, top + total.log())
    return out.to(dtype or out_partial.dtype), lse
