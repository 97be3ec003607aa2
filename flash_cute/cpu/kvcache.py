"""Attention over a key/value cache: ``fwd_kvcache``, and ``combine``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.cpu import varlen
from flash_cute.cpu.forward import Outputs, attend
from flash_cute.cpu.tiles import Options, compute_dtype


class Rotary(NamedTuple):
    """Rotary embedding: tables (positions, rotary_dim / 2), and which dims make a pair."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def turn(self, x: Tensor, position: int, step: int) -> Tensor:
        """x (rows, heads, dim) with row i turned to ``position + i * step``, in its dtype."""
        positions = (position + step * torch.arange(len(x))).clamp_(0, len(self.cos) - 1)
        cos, sin = (table[positions, None].to(compute_dtype(x)) for table in (self.cos, self.sin))
        half = cos.shape[-1]
        pairs = x[..., : 2 * half].to(cos.dtype)
        pairs = pairs.unflatten(-1, (half, 2) if self.interleaved else (2, half))
        axis = -1 if self.interleaved else -2
        a, b = pairs.unbind(axis)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2)
        return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


class Place(NamedTuple):
    """Where a sequence lies in a cache: its pages in order, and its rows before new ones join."""

    pages: Tensor  # (blocks,), ids of which some may not exist
    used: int
    leftpad: int

    def rows(self, cache: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Page, row in the page, and whether the page exists, of rows [first, last)."""
        page_size = max(cache.shape[1], 1)
        rows = torch.arange(first, last)
        ids = self.pages[rows // page_size]
        return ids, rows % page_size, (ids >= 0) & (ids < len(cache))

    def write(self, cache: Tensor, new: Tensor, last: int) -> None:
        """Puts the first rows of ``new`` behind those in use, up to row ``last``."""
        ids, rows, there = self.rows(cache, self.used, last)
        cache[ids[there], rows[there]] = new[: len(ids)][there]

    def read(self, cache: Tensor, last: int) -> Tensor:
        """Rows [leftpad, last) as a batch of one, a view if they are in one page; pages that do not
        exist are zeros."""
        if len(self.pages) == 1 and 0 <= (page := int(self.pages)) < len(cache):
            return cache[page, None, self.leftpad : last]
        ids, rows, there = self.rows(cache, self.leftpad, last)
        gathered = cache.new_zeros((len(ids), *cache.shape[2:]))
        gathered[there] = cache[ids[there], rows[there]]
        return gathered[None]


def _places(
    batch: int,
    capacity: int,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> Iterator[Place]:
    """The place of each sequence; without a table a sequence has one page."""
    if block_table is None:
        pages = torch.arange(batch) if cache_batch_idx is None else cache_batch_idx.long()
        pages = pages[:, None]
    else:
        pages = block_table.long()
    lengths = [capacity] * batch if cache_seqlens is None else cache_seqlens.tolist()
    pads = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    for index in range(batch):
        used = min(max(lengths[index], 0), capacity)
        yield Place(pages[index], used, min(max(pads[index], 0), used))


@torch.no_grad()
def fwd_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    split_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """The op ``fwd_kvcache`` on the CPU: (out, softmax_lse); k and v join the caches in place.

    q (batch, seqlen_q, heads, dim), or (total_q, heads, dim) with ``cu_seqlens_q``; caches (batch,
    capacity, heads_k, dim or dim_v), or (num_blocks, page_size, ..) with ``block_table``. No row's
    result depends on another row, so ``num_splits`` and ``split_size`` change nothing.
    """
    window = (window_size_left, 0 if is_causal else window_size_right)
    options = Options.of(q, softmax_scale, window, softcap, alibi_slopes, sink, 0.0, None)
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    step = int(max(window) >= 0)  # without a band all queries stand where the first does
    heads = q.shape[-2]
    packed = q if cu_seqlens_q is not None else q.flatten(0, 1)
    offsets = cu_seqlens_q
    if offsets is None:
        max_seqlen_q = q.shape[1]
        offsets = torch.arange(len(q) + 1) * max_seqlen_q
    batch = len(offsets) - 1
    blocks = 1 if block_table is None else block_table.shape[1]
    capacity = blocks * k_cache.shape[1]
    outputs = Outputs.of_no_keys(packed, v_cache, (heads, len(packed)), (), False, False)
    new_rows = [slice(0)] * batch
    if k is not None and cu_seqlens_k_new is not None:
        new_rows = list(varlen.spans(cu_seqlens_k_new, None, len(k), len(k)))
    parts = zip(
        varlen.spans(offsets, None, max_seqlen_q, len(packed)),
        _places(batch, capacity, cache_seqlens, cache_batch_idx, cache_leftpad, block_table),
        strict=True,
    )
    for index, (rows, place) in enumerate(parts):
        queries, last = packed[rows], place.used
        position = last if rotary_seqlens is None else int(rotary_seqlens[index])
        if k is not None and v is not None:
            at = index if cu_seqlens_k_new is None else new_rows[index]
            new_k, new_v = k[at], v[at]
            last = min(last + len(new_k), capacity)
            if rotary is not None:
                new_k = rotary.turn(new_k, position, 1)
                queries = rotary.turn(queries, position, step)
            place.write(k_cache, new_k, last)
            place.write(v_cache, new_v, last)
        keys, values = place.read(k_cache, last), place.read(v_cache, last)
        part = outputs.of_sequence(index, rows, keys.shape[1])
        attend(queries[None], keys, values, options, part, index)
    out, lse = outputs.out, outputs.softmax_lse
    if cu_seqlens_q is None:
        with internals.below_versions():  # new tensors, and no views of them
            out = out.view(*q.shape[:-1], out.shape[-1])
            lse = lse.view(heads, *q.shape[:2]).transpose(0, 1).contiguous()
    return out, lse


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
