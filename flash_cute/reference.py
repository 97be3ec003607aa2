"""Attention written down plainly: what every implementation in this library must compute.

It stores the whole matrix of scores, works in fp64 unless told otherwise, runs on every device, and
autograd through it gives the gradients. For a sequence of seqlen_q queries and seqlen_k keys:

- Scores are ``s[i, j] = scale * q[i]·k[j]``, with scale ``dim ** -0.5`` by default. Softcap c > 0
  makes them ``c * tanh(s / c)``. Then ALiBi adds ``-slope[head] * |i + shift - j|``, where
  ``shift = seqlen_k - seqlen_q`` aligns the last query with the last key. Query head h reads kv
  head ``h // (heads / heads_k)``.
- Query i sees key j iff ``i + shift - left <= j <= i + shift + right``; a negative left or right is
  unbounded, and ``is_causal`` makes right 0.
- The softmax is over the keys seen, with ``sink[head]`` as one more logit that has no value:
  ``p[i, j] = exp(s[i, j] - softmax_lse[i])``. ``softmax_lse`` is the natural log of the sum of the
  exponentials, the sink's included. ``row_max`` is the largest score that a row sees, else -inf.
- A row that sees no key, or only scores of -inf, has out 0 and zero gradients; its softmax_lse is
  the sink, or -inf without one.
- nan and inf in what a row sees follow IEEE arithmetic with ``exp(s - max)``: a score of nan or
  +inf makes the row's out and softmax_lse nan. What a row does not see is selected away, never
  multiplied by 0, so that its bits do not matter. (Autograd does multiply: the gradients that it
  takes from here are right for finite inputs.)
- Dropout zeroes the probabilities that :func:`flash_cute.philox.dropout_keep` does not keep and
  multiplies the others by ``1 / (1 - dropout_p)``; with ``dropout_p`` 1, out is 0. softmax_lse and
  row_max are those without dropout. ``softmax`` is the probability before that factor, negative
  where dropout drops it, and 0 where the row does not see the key.
- In a packed batch, offsets are clamped to [0, total], lengths to [0, max_seqlen] and then to
  seqused; the shift follows from the clamped lengths. A paged sequence takes its length from
  seqused_k, else from cu_seqlens_k, and a page whose id does not exist reads as zeros. Rows of no
  sequence have out 0, softmax_lse -inf (with a sink, too) and zero gradients. Where sequences
  overlap, the results of the last one stand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute.philox import dropout_keep


class Attention(NamedTuple):
    """Results, all in the dtype of the computation."""

    out: Tensor  # (batch, seqlen_q, heads, dim_v), packed: (total_q, heads, dim_v)
    softmax_lse: Tensor  # (batch, heads, seqlen_q), packed: (heads, total_q)
    row_max: Tensor  # as softmax_lse
    softmax: Tensor  # (batch, heads, seqlen_q, seqlen_k), packed: of the max_seqlens


def visible(
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which keys each query sees: bool (seqlen_q, seqlen_k), aligned to the bottom right."""
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    keys = torch.arange(seqlen_k, device=device)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    right = 0 if is_causal else window_size_right
    if window_size_left >= 0:
        seen &= keys >= diagonal - window_size_left
    if right >= 0:
        seen &= keys <= diagonal + right
    return seen


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
    extra = torch.full_like(row_max, -torch.inf)  # the sink's logit, or one that weighs nothing
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
    if len(seen) == 0 or v.isfinite().all():  # hidden weights are 0, which hides finite values
        return torch.einsum("bhij,bjhd->bihd", weights, v)
    rows = [
        torch.einsum("bhj,bjhd->bhd", weights[:, :, i, keys], v[:, keys])
        for i, keys in enumerate(seen)
    ]
    return torch.stack(rows, 1)


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
    dtype: torch.dtype | None = torch.float64,
    first: int = 0,
) -> Attention:
    """Attention of a dense batch; see the module for what it computes.

    q (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_k, dim), v (batch, seqlen_k, heads_k,
    dim_v), ``alibi_slopes`` (heads,) or (batch, heads), ``sink`` (heads,), ``rng`` int64 (2,).
    Everything is computed in ``dtype``; None means the dtype of q, which gives the unfused chain
    whose error bounds that of gradients. ``first`` is the index of the first sequence for dropout.
    Raises ValueError for dropout without ``rng``.
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
    scores = _scores(q, k, softmax_scale, softcap, alibi_slopes).masked_fill(~seen, -torch.inf)
    softmax, lse, row_max = _softmax(scores, sink)
    weights = softmax
    if dropout_p > 0:
        bh = torch.arange(batch * heads, device=q.device) + first * heads
        rows, cols = (torch.arange(n, device=q.device) for n in (seqlen_q, seqlen_k))
        keep = dropout_keep(rng, dropout_p, bh, rows, cols).view(softmax.shape)
        weights = softmax.masked_fill(~keep, 0) * (1 / (1 - dropout_p) if dropout_p < 1 else 0)
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
        part = attention(
            *(x[None] for x in (q[rows], part_k, part_v)),
            alibi_slopes=slopes,
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
