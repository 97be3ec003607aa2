"""Attention over caches of 8 bits: new keys are quantised, then an op reads the 8 bits.

New rows are rotated, divided by their descale, rounded and written. The op
``attend_quantized_kvcache`` attends, which takes descales that are tensors. Numbers multiply
softmax_scale, and out for V. Many queries of e4m3 go to an op that rounds weights to e4m3, too
(:mod:`flash_cute.functional.e4m3_kvcache`); others of e4m3 are widened to bf16.

Where neither op serves a call, for a reason that :func:`copied_because` tells, the caches, or
the pages in use if these are fewer, are copied to q's dtype, which holds every number of both 8-bit
dtypes, and attention of that dtype is over the copy. Descales of heads then multiply q, or out for
V; those of a token multiply its row of the copy. Nothing here waits for the device.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flash_cute import check, ops
from flash_cute.call.fp8 import Descale, of_rows, scaled
from flash_cute.call.sizes import batch_of
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.cpu.kvcache import Rotary
from flash_cute.functional import e4m3_kvcache, sparse_kvcache
from flash_cute.functional.cache_rows import (
    MOST_ROWS,
    Rows,
    begins_on_vectors,
    capacity,
    keys_before,
    query_rows,
)
from flash_cute.functional.cache_status import Places
from flash_cute.functional.run import run_kvcache
from flash_cute.kernels import plan_log, support
from flash_cute.ops.typed import AttendKvcacheCall, AttendQuantizedKvcacheCall, FwdKvcacheCall
from flash_cute.sparse.value import Sparse

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def attend(
    call: FwdKvcacheCall,
    q_descale: Descale,
    k_descale: Descale,
    v_descale: Descale,
    sparse: Sparse | None,
) -> tuple[Tensor, Tensor]:
    """out and softmax_lse of a valid call over 8-bit caches, which k and v join first."""
    given = [x for x in (*call, q_descale, k_descale, v_descale) if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise RuntimeError(
            "flash_attn_with_kvcache: an argument requires grad, and attention over a cache has no "
            "backward: detach() it, or call under torch.no_grad()"
        )
    if sparse is not None:
        sparse_kvcache.check(call, sparse)
    why_widened = e4m3_kvcache.widened_because(call, v_descale, sparse)
    why = copied_because(call, sparse, why_widened)
    if why_widened:
        call = call._replace(q=call.q.to(validate_kvcache.wide_dtype(call.q)))
    elif call.q.is_cpu and check.is_readable(call.q):  # the op would look behind the append
        check_values(call, q_descale, k_descale, v_descale)
    if why_widened and call.q.is_cuda and not torch.compiler.is_compiling():
        if call.q.shape[-1] % 8 == 0 and call.rotary_cos is None:
            validate_kvcache.vectors(call.q)  # before anything is written
        if why:
            _say(call.k_cache.dtype, call.q.dtype, why)
    q_descale, k_descale, v_descale = (
        _expanded_to_batch(x, batch_of(call)) for x in (q_descale, k_descale, v_descale)
    )
    has_new_keys = call.k is not None
    call = _appended(call, k_descale, v_descale)
    if not why_widened:
        if has_new_keys and call.q.is_cpu and isinstance(k_descale, Tensor) and k_descale.dim() > 2:
            # New rows with inf or NaN hold NaN, whose descales the op would refuse on the CPU.
            k_descale = k_descale.nan_to_num(1.0, posinf=1.0)
        return e4m3_kvcache.attend(call, q_descale, k_descale, v_descale)
    call, k_descale = _with_descale_of_q(call, q_descale, k_descale)
    if not why:
        return _attend_in_8_bits(call, k_descale, v_descale)
    return _attend_over_copies(call, k_descale, v_descale, sparse)


def copied_because(call: FwdKvcacheCall, sparse: Sparse | None, why_widened: str) -> str:
    """Why the caches of a valid call are copied to q's dtype, or to bf16 if that is e4m3; empty if
    an op reads them. ``why_widened``: :func:`.e4m3_kvcache.widened_because`."""
    if not why_widened:
        return ""
    if sparse is not None:
        return "where sparse= names the keys"
    return _copied_on_cuda(call, why_widened) if call.q.is_cuda else ""


def _copied_on_cuda(call: FwdKvcacheCall, why_widened: str) -> str:
    """The same of a call on CUDA that is not sparse."""
    q, caches = call.q, (call.k_cache, call.v_cache)
    dims, dtype = (q.shape[-1], call.v_cache.shape[-1]), validate_kvcache.wide_dtype(q)
    if query_rows(call) > MOST_ROWS:
        return f"on CUDA for more than {MOST_ROWS} rows of queries a kv head where {why_widened}"
    if any(dim % 16 for dim in dims) or not all(map(begins_on_vectors, caches)):
        return "on CUDA but in rows that are multiples of 16 bytes and begin on their boundaries"
    if not support.reads_eight_bits(dtype, call.k_cache.dtype, dims, q.get_device()):
        return f"on this GPU of head dims {dims[0]} and {dims[1]}"
    return ""


def _with_descale_of_q(
    call: FwdKvcacheCall, q_descale: Descale, k_descale: Descale
) -> tuple[FwdKvcacheCall, Descale]:
    """The call, and k's descale, of which one is multiplied by q's; q is rounded to its dtype."""
    if q_descale is None:
        return call, k_descale
    if not isinstance(q_descale, Tensor):
        scale = scaled(call.softmax_scale, call.q.shape[-1], q_descale)
        return call._replace(softmax_scale=scale), k_descale
    is_of_tokens = isinstance(k_descale, Tensor) and k_descale.dim() == 3
    if q_descale.dim() > 2 or (q_descale.dim() == 2 and is_of_tokens):
        is_of_rows = q_descale.dim() > 2
        factor = q_descale if is_of_rows else of_rows(q_descale, call.q, call.cu_seqlens_q)
        return call._replace(q=(call.q * factor).to(call.q.dtype)), k_descale
    return call, q_descale if k_descale is None else q_descale * k_descale


def _attend_in_8_bits(
    call: FwdKvcacheCall, k_descale: Descale, v_descale: Descale
) -> tuple[Tensor, Tensor]:
    """out and softmax_lse by the op, of a call that nothing joins any more."""
    if plan_log.is_on():
        plan_log.cache(call)
    scaled = call if isinstance(k_descale, Tensor) else _scaled(call, k_descale)
    heads = (batch_of(call), call.k_cache.shape[2])
    of_op = AttendQuantizedKvcacheCall(
        call.q,
        call.k_cache,
        call.v_cache,
        _op_descale(k_descale, heads),
        _op_descale(v_descale, heads),
    )
    given = {name: getattr(scaled, name) for name in AttendKvcacheCall._fields[3:]}
    out, softmax_lse = ops.attend_quantized_kvcache(*of_op._replace(**given))
    if v_descale is not None and not isinstance(v_descale, Tensor):
        out.mul_(v_descale)
    return out, softmax_lse


def _op_descale(descale: Descale, heads: tuple[int, int]) -> Tensor | None:
    """A descale as the op takes it, (batch, heads_k) or of each token; None for a number."""
    if not isinstance(descale, Tensor):
        return None
    return descale if descale.dim() >= 2 else descale.reshape(1, 1).expand(heads)


def _attend_over_copies(
    call: FwdKvcacheCall, k_descale: Descale, v_descale: Descale, sparse: Sparse | None
) -> tuple[Tensor, Tensor]:
    """out and softmax_lse over copies in q's dtype, of a call that nothing joins any more."""
    call = _scaled(_widened(call, k_descale, v_descale), k_descale)
    if sparse is not None:
        out, softmax_lse = sparse_kvcache.attend(call, sparse)
    else:
        if plan_log.is_on():
            plan_log.cache(call)
        out, softmax_lse = run_kvcache(call)
    if isinstance(v_descale, Tensor) and v_descale.dim() < 3:
        out.mul_(of_rows(v_descale, out, call.cu_seqlens_q))
    elif v_descale is not None and not isinstance(v_descale, Tensor):
        out.mul_(v_descale)
    return out, softmax_lse


def check_values(
    call: FwdKvcacheCall, q_descale: Descale, k_descale: Descale, v_descale: Descale
) -> None:
    """ValueError for the first descale of keys in use that is not a positive finite number."""
    places = Places(
        call.k_cache, keys_before(call), call.cache_batch_idx, call.cache_leftpad, call.block_table
    )
    if isinstance(q_descale, Tensor) and not ((q_descale > 0) & (q_descale < torch.inf)).all():
        raise ValueError(
            "q_descale holds a number that is not positive and finite; expected what q is to be "
            "multiplied by"
        )
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        wrong = places.lack(x) if isinstance(x, Tensor) else places.used.new_zeros(0)
        if bool(wrong.any()):
            raise ValueError(
                f"{name} of sequence {int(wrong.int().argmax())} holds a number that is not "
                "positive and finite; expected what its keys in use are to be multiplied by"
            )


def quantized(x: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / ``descale`` in fp32, rounded to the nearest even number of ``dtype``, the largest one if
    it is beyond. NaN stays NaN in fp8, and is 0 in int8."""
    x = x.float() / descale
    if dtype == torch.int8:
        x = x.round().nan_to_num(0.0)
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def token_descales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 (.., heads), with which each row of x (.., heads, dim) fills the range of ``dtype``; 1
    where a row is zero."""
    largest = x.abs().amax(-1).float()
    descale = largest / largest.new_full((), LARGEST[dtype])  # a number would be inverted on CUDA
    return descale.masked_fill_(descale == 0, 1)


@lru_cache(maxsize=64)
def _say(stored: torch.dtype, wide: torch.dtype, why: str) -> None:
    warnings.warn(
        f"flash_cute: no kernel reads a cache of {stored} {why}; each call copies the rows that it "
        f"may read to {wide}, which costs time and memory. This is said once",
        stacklevel=4,
    )


def _expanded_to_batch(x: Descale, batch: int) -> Descale:
    """A descale of every head, (heads_k,), for every sequence; others as they are."""
    if isinstance(x, Tensor) and x.dim() == 1 and len(x) > 1:
        return x.expand(batch, -1)
    return x


class _Targets(NamedTuple):
    """Where rows go: row i of what is written is row ``source[i]`` of what is given. Rows that do
    not fit repeat one that does; if ``none`` does, they write what is there."""

    page: Tensor
    row: Tensor
    source: Tensor
    none: Tensor  # bool ()

    @classmethod
    def of(cls, call: FwdKvcacheCall, rows: Rows, used: Tensor) -> _Targets:
        pages, page_size = call.k_cache.shape[:2]
        row, page = used[rows.sequence] + rows.place, rows.sequence
        fits = rows.belongs & (row < capacity(call))
        if call.block_table is not None:
            column = (row // page_size).clamp_max(call.block_table.shape[1] - 1)
            page, row = call.block_table[page, column].long(), row % page_size
        elif call.cache_batch_idx is not None:
            page = call.cache_batch_idx[page].long()
        fits &= (page >= 0) & (page < pages)
        source = torch.arange(len(row), device=row.device)
        source = torch.where(fits, source, fits.int().argmax())
        page, row = page.clamp(0, pages - 1)[source], row.clamp_max(page_size - 1)[source]
        return cls(page, row, source, ~fits.any())

    def write(self, x: Tensor, given: Tensor) -> None:
        """``given`` (rows, ..) into x (pages, page_size, ..)."""
        x, given = _as_bytes(x), _as_bytes(given)
        there = x[self.page, self.row]
        x[self.page, self.row] = torch.where(self.none, there, given[self.source])


def _as_bytes(x: Tensor) -> Tensor:
    """x, or as int8 if it is fp8, which torch cannot index everywhere."""
    return x.view(torch.int8) if x.dtype == torch.float8_e4m3fn else x


def _appended(call: FwdKvcacheCall, k_descale: Descale, v_descale: Descale) -> FwdKvcacheCall:
    """The call after k and v joined, q being rotated."""
    if call.k is None or call.v is None:
        return call
    used, k, v, offsets = keys_before(call), call.k, call.v, call.cu_seqlens_k_new
    if len(used) == 0 or call.k_cache.numel() == 0 or capacity(call) == 0:
        return _without_new_keys(call, used, used)  # nothing fits, so that nothing is seen
    rows = Rows.of(k, offsets, len(k))
    q, start = call.q, used if call.rotary_seqlens is None else call.rotary_seqlens.long()
    if call.rotary_cos is not None and call.rotary_sin is not None:
        rotary = Rotary(call.rotary_cos, call.rotary_sin, call.rotary_interleaved)
        k = _rotated(k, rotary, rows, start, 1)
        sides = (call.window_size_left, call.window_size_right)
        step = int(call.is_causal or max(sides) >= 0)  # else all are at the first one's position
        queries = Rows.of(q, call.cu_seqlens_q, call.max_seqlen_q)
        q = _rotated(q, rotary, queries, start, step)
    if len(rows.place):
        places = _Targets.of(call, rows, used)
        for x, cache, descale in ((k, call.k_cache, k_descale), (v, call.v_cache, v_descale)):
            factor = _factor(descale, x, offsets)
            if isinstance(descale, Tensor) and descale.dim() == 3:
                factor = token_descales(x, cache.dtype)
                places.write(descale, factor.reshape(-1, factor.shape[-1]))
                factor = factor[..., None]
            places.write(cache, quantized(x, factor, cache.dtype).reshape(-1, *x.shape[-2:]))
    keys = (used + rows.counts).clamp_max(capacity(call))
    return _without_new_keys(call._replace(q=q), used, keys)


def _without_new_keys(call: FwdKvcacheCall, used: Tensor, keys: Tensor) -> FwdKvcacheCall:
    """The call over ``keys`` keys a sequence, of which ``used`` were there before."""
    leftpad = call.cache_leftpad
    return call._replace(
        k=None, v=None, rotary_cos=None, rotary_sin=None, rotary_seqlens=None,
        cu_seqlens_k_new=None, cache_seqlens=keys.int(),
        cache_leftpad=None if leftpad is None else leftpad.minimum(used).int(),
    )  # fmt: skip


def _rotated(x: Tensor, rotary: Rotary, rows: Rows, start: Tensor, step: int) -> Tensor:
    """x with row i of each sequence at position ``start + step * i``."""
    positions = start[rows.sequence] + step * rows.place
    return rotary.rotate(x.reshape(-1, *x.shape[-2:]), positions).view(x.shape)


def _factor(descale: Descale, x: Tensor, offsets: Tensor | None) -> Tensor:
    """A descale that is not each token's, as a tensor that broadcasts to new rows x."""
    if isinstance(descale, Tensor):
        return of_rows(descale, x, offsets)
    return torch.full((), descale or 1.0, dtype=torch.float32, device=x.device)


def _widened(call: FwdKvcacheCall, k_descale: Descale, v_descale: Descale) -> FwdKvcacheCall:
    """The call over copies in q's dtype of the pages in use, or if they are fewer of all."""
    index = call.cache_batch_idx if call.block_table is None else call.block_table
    pages: Tensor | slice = slice(None)
    if index is None:
        pages = slice(batch_of(call))
    elif index.numel() < len(call.k_cache):
        pages = index.long().clamp(0, len(call.k_cache) - 1).flatten()
        exists = (index >= 0) & (index < len(call.k_cache))
        own = torch.arange(index.numel(), dtype=torch.int32, device=index.device).view(index.shape)
        index = own.masked_fill(~exists, -1)
    call = call._replace(
        k_cache=_wide(call.k_cache, k_descale, pages, call.q.dtype),
        v_cache=_wide(call.v_cache, v_descale, pages, call.q.dtype),
    )
    if call.block_table is not None:
        return call._replace(block_table=index)
    return call._replace(cache_batch_idx=index)


def _wide(cache: Tensor, descale: Descale, pages: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """Pages of a cache, contiguous in ``dtype``; times their tokens' descales, if it has these."""
    found = _as_bytes(cache)[pages]
    if found.dtype != cache.dtype:
        found = found.view(cache.dtype)
    wide = found.to(dtype, memory_format=torch.contiguous_format)
    if isinstance(descale, Tensor) and descale.dim() == 3:
        wide.mul_(descale[pages][..., None])  # in fp32, and rounded once
    return wide


def _scaled(call: FwdKvcacheCall, k_descale: Descale) -> FwdKvcacheCall:
    """The call with the descale of heads of K in softmax_scale or in q."""
    if isinstance(k_descale, Tensor):
        if k_descale.dim() == 3:
            return call
        factor = of_rows(k_descale, call.q, call.cu_seqlens_q)
        return call._replace(q=(call.q * factor).to(call.q.dtype))
    scale = call.q.shape[-1] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    return call._replace(softmax_scale=scale * (k_descale or 1.0))
