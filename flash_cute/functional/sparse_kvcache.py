"""Sparse attention over a key/value cache: each query reads the pages that it sees, and no others.

Every token, and every head of the lists, is a sequence of one query to the op of caches. Its block
table names runs of keys that are visible as a whole, in pages that are views of the cache itself:
nothing is copied, and no kernel knows of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_cute.call.sizes import batch_of, longest_queries
from flash_cute.functional.cache_rows import Rows, capacity, keys_before, with_new_keys
from flash_cute.functional.run import run_kvcache
from flash_cute.kernels import plan_log
from flash_cute.ops.typed import FwdKvcacheCall
from flash_cute.sparse.lists import HALF, QUADRANTS, TILE, codes_of, tile_lists
from flash_cute.sparse.value import Sparse

_PAGES_AT_ONCE = 2**25  # of block tables


class Tokens(NamedTuple):
    """The queries of a call, one behind the other, all int64 (tokens,)."""

    sequence: Tensor
    place: Tensor  # in its sequence
    first: Tensor  # key that the token may see
    end: Tensor  # behind the last one
    belongs: Tensor  # bool: to a sequence; else it sees nothing

    def part(self, rows: slice) -> Tokens:
        return Tokens(*(x[rows] for x in self))


class Pages(NamedTuple):
    """Views (pages, size, heads, dim) of both caches. The run of keys that begins at row r of
    sequence or page s of the caches, for kv head h, is page ``s * of_sequence + h * of_head + r //
    size * of_run``."""

    k: Tensor
    v: Tensor
    size: int
    of_sequence: int
    of_head: int
    of_run: int


def attend(call: FwdKvcacheCall, sparse: Sparse) -> tuple[Tensor, Tensor]:
    """out and softmax_lse of a call that is valid, and whose new keys join first."""
    check(call, sparse)
    if batch_of(call) == 0 or call.k_cache.numel() == 0:
        return run_kvcache(call)  # no key is there that lists could hide
    list_heads = sparse.tile_lists.shape[1]
    pages = _pages(call, sparse.granularity, split_heads=list_heads > 1)
    if call.k is not None:
        none, offsets = call.q[:, :0], None
        if call.cu_seqlens_q is not None:
            none, offsets = call.q[:0], torch.zeros_like(call.cu_seqlens_q)
        run_kvcache(call._replace(q=none, cu_seqlens_q=offsets, max_seqlen_q=0, sink=None))
    tokens = _tokens(call)
    q = call.q if call.cu_seqlens_q is not None else call.q.flatten(0, 1)
    tiles = sparse.tile_lists.shape[3] - 1
    runs = min(tiles * (TILE // pages.size), capacity(call) // pages.size)
    codes = codes_of(sparse.tile_lists, sparse.key_tiles)
    runs_of_all = sparse.key_tiles * TILE // pages.size
    step = max(1, _PAGES_AT_ONCE // max(runs_of_all * list_heads, 1))
    parts = [
        _attend(call, sparse, codes, q[i : i + step], tokens.part(slice(i, i + step)), pages, runs)
        for i in range(0, max(len(q), 1), step)
    ]
    out, lse = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))
    if call.cu_seqlens_q is not None:
        return out, lse.t().contiguous()
    by_sequence = call.q.shape[:2]
    return out.unflatten(0, by_sequence), lse.unflatten(0, by_sequence).transpose(1, 2).contiguous()


def check(call: FwdKvcacheCall, sparse: Sparse) -> None:
    """Refuses what pages cannot say."""
    heads, heads_k = call.q.shape[-2], call.k_cache.shape[2]
    for name, x in (("alibi_slopes", call.alibi_slopes), ("rotary_cos", call.rotary_cos)):
        if x is not None:
            raise NotImplementedError(
                f"{name} and sparse are given; over a cache they do not go together yet: "
                + ("leave one out" if name == "alibi_slopes" else "rotate q and k before the call")
            )
    batch, seqlens = batch_of(call), (longest_queries(call), capacity(call))
    sparse.check(batch, heads, heads_k, seqlens, call.q.device, call.is_causal)


def _tokens(call: FwdKvcacheCall) -> Tokens:
    rows = Rows.of(call.q, call.cu_seqlens_q, call.max_seqlen_q)
    sequence, used = rows.sequence, keys_before(call)
    keys = with_new_keys(call, used)[sequence]
    diagonal = keys - rows.counts[sequence] + rows.place
    right = 0 if call.is_causal else call.window_size_right
    end = keys if right < 0 else torch.minimum(keys, diagonal + right + 1)
    first = torch.zeros_like(end) if call.window_size_left < 0 else diagonal - call.window_size_left
    if call.cache_leftpad is not None:
        leftpad = call.cache_leftpad.long().minimum(used)
        first = torch.maximum(first, leftpad[sequence])
    end = end.clamp_min(0) * rows.belongs
    return Tokens(sequence, rows.place, first, end, rows.belongs)


def _pages(call: FwdKvcacheCall, granularity: int, split_heads: bool) -> Pages:
    rows = call.k_cache.shape[1]
    size = math.gcd(granularity, rows) or 1
    views, steps = [], []
    for x in (call.k_cache, call.v_cache):
        sequences, _, heads, dim = x.shape
        of_sequence, of_row, of_head, _ = x.stride()
        strides = (
            of_sequence if sequences > 1 else 0,
            of_head if split_heads and heads > 1 else 0,
            of_row * size if rows > size else 0,
        )
        unit = math.gcd(*strides) or max(dim, 1)
        ends = (sequences - 1, heads - 1, rows // size - 1)
        last = sum(n * stride for n, stride in zip(ends, strides, strict=True)) // unit
        count = 0 if x.numel() == 0 else 1 + last
        shape = (count, size, 1 if split_heads else heads, dim)
        views.append(x.as_strided(shape, (unit, of_row, of_head, 1)))
        steps.append(tuple(stride // unit for stride in strides))
    if steps[0] != steps[1]:
        raise ValueError(
            f"k_cache has strides {call.k_cache.stride()}, and v_cache {call.v_cache.stride()}; "
            "sparse calls need both caches in one layout"
        )
    return Pages(views[0], views[1], size, *steps[0])


def _attend(
    call: FwdKvcacheCall,
    sparse: Sparse,
    codes: Tensor,
    q: Tensor,
    tokens: Tokens,
    pages: Pages,
    runs: int,
) -> tuple[Tensor, Tensor]:
    """out (tokens, heads, dim_v) and softmax_lse (tokens, heads) of some tokens."""
    heads, list_heads = q.shape[1], sparse.tile_lists.shape[1]
    listed, counts = _runs_seen(sparse, codes, tokens, pages.size, runs)
    starts = listed * pages.size
    last = starts.gather(-1, (counts - 1).clamp_min(0)[..., None])[..., 0] if runs else counts
    tail = (tokens.end[:, None] - last).clamp(0, pages.size)
    lengths = ((counts - 1) * pages.size + tail).masked_fill(counts == 0, 0)
    leftpad = None
    if (call.window_size_left >= 0 or call.cache_leftpad is not None) and runs:
        hidden = (tokens.first[:, None] - starts[..., 0]).clamp(0, pages.size)
        leftpad = torch.minimum(hidden, lengths).flatten().int()
    shares_sink = list_heads == 1
    one_query = FwdKvcacheCall(
        q.unflatten(1, (list_heads, -1)).flatten(0, 1)[:, None],
        pages.k,
        pages.v,
        cache_seqlens=lengths.flatten().int(),
        cache_leftpad=leftpad,
        block_table=_block_table(call, tokens, starts, pages, heads),
        softmax_scale=call.softmax_scale,
        softcap=call.softcap,
        sink=call.sink if shares_sink else None,
        num_splits=call.num_splits,
        split_size=call.split_size,
    )
    if plan_log.is_on():
        plan_log.cache(one_query)
    out, lse = run_kvcache(one_query)
    out = out.reshape(len(q), heads, call.v_cache.shape[-1])
    lse = lse.reshape(len(q), heads)
    if call.sink is not None and not shares_sink:
        sink = call.sink.to(lse.dtype)
        share = torch.sigmoid(lse - sink).masked_fill_(lse == -torch.inf, 0)  # that keys have
        out, lse = (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, sink)
    return out, lse.masked_fill(~tokens.belongs[:, None], -torch.inf)


def _runs_seen(
    sparse: Sparse, codes: Tensor, tokens: Tokens, size: int, runs: int
) -> tuple[Tensor, Tensor]:
    """Numbers of the runs of ``size`` keys of which each token sees any key, ascending, int64
    (tokens, list heads, ``runs``), 0 behind their counts (tokens, list heads)."""
    device, row = tokens.place.device, tokens.place % TILE
    of_batch = tokens.sequence if len(codes) > 1 else torch.zeros_like(tokens.sequence)
    codes = codes[of_batch, :, tokens.place // TILE][..., None]
    key = torch.arange(0, TILE, size, device=device)  # that a run of a tile begins with
    quadrant = 2 * (row // HALF)[:, None, None, None] + key // HALF
    seen = codes.bitwise_right_shift(quadrant.int()) & 1
    if sparse.tile_bits is not None and len(sparse.tile_bits):
        number = (codes[..., 0] // QUADRANTS - 1).long()
        words = sparse.tile_bits[number.clamp_min(0), row[:, None, None]][..., key // 32]
        seen &= words.bitwise_right_shift((key % 32).int()) | (number < 0)[..., None].int()
    start = torch.arange(0, sparse.key_tiles * TILE, size, device=device)
    in_band = (start < tokens.end[:, None]) & (start + size > tokens.first[:, None])
    seen = seen.flatten(-2) * in_band[:, None]
    found = tile_lists(seen[None].contiguous(), runs)[0]
    counts = found[..., 0, 0].long()
    behind = torch.arange(runs, device=device) >= counts[..., None]
    return found[..., 1:, 0].long().masked_fill(behind, 0), counts


def _block_table(
    call: FwdKvcacheCall, tokens: Tokens, starts: Tensor, pages: Pages, heads: int
) -> Tensor:
    """int32 (tokens * list heads, runs), the pages that begin at the rows ``starts``."""
    sequence = tokens.sequence
    if call.block_table is not None:
        size = call.k_cache.shape[1]
        of_token = call.block_table[sequence].long()[:, None].expand(-1, starts.shape[1], -1)
        place = of_token.gather(-1, starts // max(size, 1)) if starts.numel() else starts
        row = starts % max(size, 1)
    else:
        place = sequence if call.cache_batch_idx is None else call.cache_batch_idx[sequence].long()
        place, row = place[:, None, None], starts
    kv_head = torch.arange(starts.shape[1], device=starts.device)
    if starts.shape[1] == heads:
        kv_head = kv_head // (heads // max(call.k_cache.shape[2], 1))
    found = place * pages.of_sequence + kv_head[:, None] * pages.of_head
    found = found + row // pages.size * pages.of_run
    exists = (place >= 0) & (place < len(call.k_cache))
    return found.masked_fill(~exists, -1).int().flatten(0, 1)
