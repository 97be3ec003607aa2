"""The reference of attention, in plain PyTorch: what every implementation here must compute.

It stores the whole matrix of scores, works in fp64 by default, runs on every device, and autograd
gives its gradients. For a sequence of seqlen_q queries and seqlen_k keys:

- Scores are ``s[i, j] = scale * q[i]·k[j]``, with scale ``dim ** -0.5`` by default. Softcap c > 0
  makes them ``c * tanh(s / c)``. Then ALiBi adds ``-slope[head] * |i + shift - j|``, where
  ``shift = seqlen_k - seqlen_q`` aligns the last query with the last key. Query head h reads kv
  head ``h // (heads / heads_k)``.
- Query i sees key j iff ``i + shift - left <= j <= i + shift + right``; a negative left or right is
  unbounded, and ``is_causal`` makes right 0.
- With ``tile_lists`` and ``tile_bits`` these must show the pair, too
  (:mod:`flash_cute.sparse.lists`): the lists of the batch entry (in a packed batch the sequence)
  and of the head or kv head; a single list is for all.
- The softmax is over the keys seen, with ``sink[head]`` as one more logit that has no value:
  ``p[i, j] = exp(s[i, j] - softmax_lse[i])``. ``softmax_lse`` is the natural log of the sum of the
  exponentials, including the sink's. ``row_max`` is the largest score that a row sees, else -inf.
- A row that sees no key, or only scores of -inf, has out 0 and zero gradients; its softmax_lse is
  the sink, or -inf without one.
- nan and inf in what a row sees follow IEEE arithmetic with ``exp(s - max)``: a score of nan or
  +inf makes the row's out and softmax_lse nan. Hidden keys are excluded by selection, never by a
  product with 0, so that their bits do not matter. (Autograd does multiply: its gradients are right
  for finite inputs.)
- Dropout zeroes the probabilities that :func:`flash_cute.call.philox.dropout_keep` does not keep
  and multiplies the others by 1 / (1 - the rate), the rate being ``dropout_p`` to the nearest
  65536th (:func:`flash_cute.call.philox.dropout_rate`); with ``dropout_p`` 1, out is 0. softmax_lse
  and row_max are those without dropout. ``softmax`` is the probability before that factor, negative
  where dropout drops it, and 0 where the row does not see the key.
- Over a key/value cache, see :func:`attention_kvcache`, sequence b reads the rows of its pages
  (``block_table[b]``), or entry ``cache_batch_idx[b]`` of the cache (entry b without it), which is
  like one large page. Its first ``cache_seqlens[b]`` rows are in use, clamped to [0, capacity]. New
  keys and values are appended; rows that do not fit, or whose page does not exist, are dropped. Its
  keys are the rows from ``cache_leftpad[b]``, clamped to [0, cache_seqlens[b]], on.
  A page whose id does not exist reads as zeros.
- Rotary embedding turns pairs of the first dims of q and of new keys, ``x[2i], x[2i + 1]`` where
  interleaved, else ``x[i], x[i + rotary_dim / 2]``, by the angles whose cos and sin stand in the
  row of the position, clamped to the rows that there are; the result is rounded to q's dtype. New
  key i of sequence b stands at position ``rotary_seqlens[b] + i``, by default ``cache_seqlens[b] +
  i``; query i too if there is a band, else at the position of the first.
- In a packed batch, offsets are clamped to [0, total], lengths to [0, max_seqlen] and then to
  seqused; the shift follows from the clamped lengths. A paged sequence takes its length from
  seqused_k, else from cu_seqlens_k, and a page whose id does not exist reads as zeros. Rows of no
  sequence have out 0, softmax_lse -inf (with a sink, too) and zero gradients. Where sequences
  overlap, the results of the last one stand.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute.call.philox import dropout_keep, dropout_rate
from flash_cute.reference.masks import listed, visible


class Attention(NamedTuple):
    """Results, all in the dtype of the computation."""

    out: Tensor  # (batch, seqlen_q, heads, dim_v), packed: (total_q, heads, dim_v)
    softmax_lse: Tensor  # (batch, heads, seqlen_q), packed: (heads, total_q)
    row_max: Tensor  # as softmax_lse
    softmax: Tensor  # (batch, heads, seqlen_q, seqlen_k), packed: of the max_seqlens


class CachedAttention(NamedTuple):
    """Results over a key/value cache, the first three as in :class:`Attention`."""

    out: Tensor
    softmax_lse: Tensor
    row_max: Tensor
    k_cache: Tensor  # both caches with what joined them, in their dtype
    v_cache: Tensor


def _scores(
    q: Tensor, k: Tensor, scale: float | None, softcap: float, alibi_slopes: Tensor | None
) -> Tensor:
    """Scores (batch, heads, seqlen_q, seqlen_k) of q and k with as many heads, nothing hidden."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    scores = scores * (max(q.shape[-1], 1) ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        seqlen_q, seqlen_k = scores.shape[2:]
        i = torch.arange(seqlen_q, device=q.device)[:, None]
        distance = (i + seqlen_k - seqlen_q - torch.arange(seqlen_k, device=q.device)).abs()
        scores = scores - alibi_slopes.to(q.dtype)[..., None, None] * distance.to(q.dtype)
    return scores


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, log-sum-exp and maximum of the rows of ``scores``, where -inf is hidden."""
    row_max = F.pad(scores, (0, 1), value=-torch.inf).amax(-1)
    extra = torch.full_like(row_max, -torch.inf)  # the sink's logit; -inf without a sink
    if sink is not None:
        extra = sink.to(scores.dtype)[:, None].expand_as(row_max)
    logits = torch.cat([scores, extra[..., None]], -1)
    top = logits.detach().amax(-1, keepdim=True)
    empty = top == -torch.inf
    top = top.masked_fill(empty, 0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    safe_total = torch.where(empty, 1, total)
    lse = torch.where(empty, -torch.inf, top + torch.log(safe_total))
    return (weights / safe_total)[..., :-1], lse[..., 0], row_max


def _weighted_sum(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """out[b, i, h] = sum over the keys j that i sees of weights[b, h, i, j] * v[b, j, h]."""
    if weights.numel() == 0 or v.isfinite().all():  # weights of 0 hide finite values
        return torch.einsum("bhij,bjhd->bihd", weights, v)
    out = v.new_zeros(*weights.shape[:3], v.shape[3])
    for b, h, i in product(*(range(n) for n in weights.shape[:3])):
        keys = seen[b, h, i]
        out[b, h, i] = weights[b, h, i, keys] @ v[b, keys, h]
    return out.transpose(1, 2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    tile_lists: Tensor | None = None,
    tile_bits: Tensor | None = None,
    dtype: torch.dtype | None = torch.float64,
    first: int = 0,
) -> Attention:
    """Attention of a dense batch; see the module for what it computes.

    q (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_k, dim), v (batch, seqlen_k, heads_k,
    dim_v), ``alibi_slopes`` (heads,) or (batch, heads), ``sink`` (heads,), ``rng`` int64 (2,),
    ``tile_lists`` and ``tile_bits`` those of a :class:`flash_cute.Sparse`.
    Everything is computed in ``dtype``; None means the dtype of q, which gives the unfused chain
    whose error bounds that of gradients. ``first`` is the index of the first sequence for dropout.
    Raises ValueError for dropout without ``rng``.

    Example::

        import torch
        from flash_cute import flash_attn_func, reference

        q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
        expected = reference.attention(q, k, v, is_causal=True)
        out = flash_attn_func(q, k, v, causal=True)
        torch.testing.assert_close(out.double(), expected.out, atol=1e-4, rtol=1e-4)
    """
    dtype = dtype or q.dtype
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_k = k.shape[1:3]
    group = heads // max(heads_k, 1)
    q = q.to(dtype)
    k, v = (x.to(dtype).repeat_interleave(group, 2) for x in (k, v))
    seen = visible(
        seqlen_q, seqlen_k, is_causal, window_size_left, window_size_right, device=q.device
    )
    seen = seen.expand(batch, heads, seqlen_q, seqlen_k)
    if tile_lists is not None:
        of_lists = listed(tile_lists, tile_bits, seqlen_q, seqlen_k)
        seen = seen & of_lists.repeat_interleave(heads // of_lists.shape[1], 1)
    scores = _scores(q, k, softmax_scale, softcap, alibi_slopes).masked_fill(~seen, -torch.inf)
    softmax, lse, row_max = _softmax(scores, sink)
    weights = softmax
    if dropout_p > 0:
        bh = torch.arange(batch * heads, device=q.device) + first * heads
        rows, cols = (torch.arange(n, device=q.device) for n in (seqlen_q, seqlen_k))
        keep = dropout_keep(rng, dropout_p, bh, rows, cols).view(softmax.shape)
        weights = softmax.masked_fill(~keep, 0) * dropout_rate(dropout_p)[1]
        softmax = torch.where(keep, softmax, -softmax)
    return Attention(_weighted_sum(weights, v, seen), lse, row_max, softmax)


def _sequence(
    x: Tensor, cu_seqlens: Tensor, seqused: Tensor | None, max_seqlen: int, index: int
) -> slice:
    """Rows of sequence ``index`` in the packed ``x``."""
    start, stop = (min(max(int(cu_seqlens[i]), 0), len(x)) for i in (index, index + 1))
    length = min(max(stop - start, 0), max_seqlen)
    if seqused is not None:
        length = min(length, max(int(seqused[index]), 0))
    return slice(start, start + length)


def _unpaged(x: Tensor, pages: list[int], length: int) -> Tensor:
    """The first ``length`` rows of the pages of ``x``; pages that do not exist are zeros."""
    zeros = x.new_zeros(x.shape[1:])
    rows = [x[page] if 0 <= page < len(x) else zeros for page in pages]
    return torch.cat(rows)[:length] if rows else zeros[:0]


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tile_lists: Tensor | None = None,
    dtype: torch.dtype | None = torch.float64,
    **options: Any,
) -> Attention:
    """Attention of a packed batch; ``options`` are those of :func:`attention`.

    q (total_q, heads, dim), k and v (total_k, heads_k, dim or dim_v), or with ``block_table`` int32
    (batch, max_blocks) paged, (num_blocks, page_size, heads_k, dim or dim_v). ``cu_seqlens_q`` and
    ``cu_seqlens_k`` int32 (batch + 1,), ``seqused_q`` and ``seqused_k`` int32 (batch,).
    """
    batch, (total_q, heads, _) = max(len(cu_seqlens_q) - 1, 0), q.shape
    q = q.to(dtype or q.dtype)
    out = q.new_zeros(total_q, heads, v.shape[-1])
    lse = q.new_full((heads, total_q), -torch.inf)
    row_max = q.new_full((heads, total_q), -torch.inf)
    softmax = q.new_zeros(batch, heads, max_seqlen_q, max_seqlen_k)
    for index in range(batch):
        rows = _sequence(q, cu_seqlens_q, seqused_q, max_seqlen_q, index)
        if block_table is None:
            keys = _sequence(k, cu_seqlens_k, seqused_k, max_seqlen_k, index)
            part_k, part_v = k[keys], v[keys]
        else:
            length = int(cu_seqlens_k[index + 1] - cu_seqlens_k[index])
            length = length if seqused_k is None else int(seqused_k[index])
            length = min(max(length, 0), max_seqlen_k)
            pages = block_table[index].tolist()
            part_k, part_v = (_unpaged(x, pages, length) for x in (k, v))
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[index]
        lists = tile_lists
        if lists is not None and len(lists) > 1:
            lists = lists[index, None]
        part = attention(
            *(x[None] for x in (q[rows], part_k, part_v)),
            alibi_slopes=slopes,
            tile_lists=lists,
            dtype=q.dtype,
            first=index,
            **options,
        )
        out[rows], lse[:, rows], row_max[:, rows] = (
            part.out[0],
            part.softmax_lse[0],
            part.row_max[0],
        )
        seqlen_q, seqlen_k = part.softmax.shape[2:]
        softmax[index, :, :seqlen_q, :seqlen_k] = part.softmax[0]
    return Attention(out, lse, row_max, softmax)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of x (rows, heads, dim), rounded to its dtype.

    ``cos`` and ``sin`` (positions, rotary_dim / 2), ``positions`` int64 (rows,).
    """
    positions = positions.clamp(0, len(cos) - 1)
    cos, sin = (table[positions][:, None].double() for table in (cos, sin))
    half = cos.shape[-1]
    turned, rest = x.double().split((2 * half, x.shape[-1] - 2 * half), -1)
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), axis).flatten(-2)
    return torch.cat((turned, rest), -1).to(x.dtype)


def _cache_places(
    k_cache: Tensor, index: int, count: int, page: int | None, block_table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The first ``count`` rows of sequence ``index`` in a cache: pages, rows in them, and whether
    the page exists; without a table all rows are in ``page``."""
    pages, page_size = k_cache.shape[:2]
    rows = torch.arange(count, device=k_cache.device)
    if block_table is None:
        ids = torch.full_like(rows, index if page is None else page)
    else:
        ids = block_table[index].long()[rows // max(page_size, 1)]
    return ids, rows % max(page_size, 1), (ids >= 0) & (ids < pages)


def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
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
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> CachedAttention:
    """Attention over a key/value cache after k and v are appended to it.

    q (batch, seqlen_q, heads, dim), or with ``cu_seqlens_q`` (total_q, heads, dim); caches (batch,
    capacity, heads_k, dim or dim_v), or with ``block_table`` (num_blocks, page_size, heads_k, dim
    or dim_v); k and v (batch, seqlen_new, heads_k, dim or dim_v), or with ``cu_seqlens_k_new``
    (total_new, heads_k, dim or dim_v). ``options`` are those of :func:`attention`.
    """
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    blocks = 1 if block_table is None else block_table.shape[1]
    capacity = blocks * k_cache.shape[1]
    out = q.new_zeros((*q.shape[:-1], v_cache.shape[-1]), dtype=dtype)
    lse, row_max = (out.new_full(out.shape[:-1], -torch.inf) for _ in range(2))
    banded = options.get("is_causal") or any(
        options.get(f"window_size_{side}", -1) >= 0 for side in ("left", "right")
    )
    for index in range(batch):
        used = capacity if cache_seqlens is None else int(cache_seqlens[index])
        used = min(max(used, 0), capacity)
        pad = 0 if cache_leftpad is None else min(max(int(cache_leftpad[index]), 0), used)
        page = None if cache_batch_idx is None else int(cache_batch_idx[index])
        position = used if rotary_seqlens is None else int(rotary_seqlens[index])
        rows: int | slice = index
        if cu_seqlens_q is not None:
            rows = _sequence(q, cu_seqlens_q, None, max_seqlen_q, index)
        queries, length = q[rows], used
        if k is not None and v is not None:
            new: int | slice = index
            if cu_seqlens_k_new is not None:
                new = _sequence(k, cu_seqlens_k_new, None, len(k), index)
            new_k, new_v = k[new], v[new]
            length = min(used + len(new_k), capacity)
            if rotary_cos is not None and rotary_sin is not None:
                steps = torch.arange(max(len(new_k), len(queries)), device=q.device)
                turn = (rotary_cos, rotary_sin, rotary_interleaved)
                new_k = rotate(new_k, position + steps[: len(new_k)], *turn)
                stands = position + steps[: len(queries)] * int(bool(banded))
                queries = rotate(queries, stands, *turn)
            ids, places, there = (
                x[used:] for x in _cache_places(k_cache, index, length, page, block_table)
            )
            k_cache[ids[there], places[there]] = new_k[: len(ids)][there]
            v_cache[ids[there], places[there]] = new_v[: len(ids)][there]
        ids, places, there = (
            x[pad:] for x in _cache_places(k_cache, index, length, page, block_table)
        )
        keys, values = (x.new_zeros(len(ids), *x.shape[2:]) for x in (k_cache, v_cache))
        keys[there] = k_cache[ids[there], places[there]]
        values[there] = v_cache[ids[there], places[there]]
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[index]
        part = attention(
            *(x[None] for x in (queries, keys, values)), alibi_slopes=slopes, dtype=dtype, **options
        )
        out[rows], lse[rows], row_max[rows] = (
            part.out[0],
            part.softmax_lse[0].T,
            part.row_max[0].T,
        )
    lse, row_max = (x.transpose(-1, -2).contiguous() for x in (lse, row_max))
    return CachedAttention(out, lse, row_max, k_cache, v_cache)


def combine(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """Combines results over parts of the keys: out (.., dim) and lse (..,) in fp64.

    ``out_partial`` (parts, .., dim), ``lse_partial`` (parts, ..). Parts with lse -inf saw no key
    and have weight 0, whatever they hold.
    """
    lse_partial = lse_partial.double()
    lse = torch.logsumexp(lse_partial, 0)
    weights = torch.exp(lse_partial - lse.masked_fill(lse == -torch.inf, 0))[..., None]
    parts = out_partial.double().masked_fill(weights == 0, 0)
    return (weights * parts).sum(0), lse
