"""The checks of calls over a key/value cache. Errors as in :mod:`flash_cute.call.validate`.

Values of index tensors are not read here, but in :mod:`flash_cute.check`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call import validate
from flash_cute.call.sizes import cache_capacity
from flash_cute.call.validate import ops as validate_ops
from flash_cute.call.validate import options as validate_options

if TYPE_CHECKING:
    from flash_cute.ops.typed import FwdKvcacheCall

KVCACHE_CUDA_DTYPES = (torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn


def check(
    call: FwdKvcacheCall,
    names: validate_options.Names,
    is_quantized: bool = False,
    dtypes: tuple[torch.dtype, ...] = validate.DTYPES,
) -> int:
    """Checks all of a call, with q of ``dtypes``, but the values of index tensors; returns the
    batch size. Not the dtypes of caches that :mod:`flash_cute.call.validate.quantized_kvcache`
    found to be of 8 bits."""
    batch = _shapes(call, is_quantized, dtypes)
    validate_options.check(call, batch, names)
    return batch


def wide_dtype(q: Tensor) -> torch.dtype:
    """q's dtype, or bf16, which e4m3 is widened to: of out, new keys and rotary tables."""
    return torch.bfloat16 if q.dtype == E4M3 else q.dtype


def _shapes(call: FwdKvcacheCall, is_quantized: bool, dtypes: tuple[torch.dtype, ...]) -> int:
    """Shapes, dtypes, devices, strides and counts; returns the batch size. ``cache_seqlens`` may be
    one number for all, as the function takes it."""
    q, k_cache, v_cache, k = call.q, call.k_cache, call.v_cache, call.k
    cu_seqlens_q, block_table, lengths = call.cu_seqlens_q, call.block_table, call.cache_seqlens
    validate.same_kind(q, k_cache, v_cache, "k_cache", "v_cache", is_quantized, dtypes)
    rank = 4 if cu_seqlens_q is None else 3
    if q.dim() != rank:
        layout = "(batch, seqlen_q, heads, dim)" if rank == 4 else "(total_q, heads, dim)"
        raise ValueError(f"q has shape {tuple(q.shape)}; expected {layout}")
    _caches(q, k_cache, v_cache, paged=block_table is not None)
    if cu_seqlens_q is None:
        batch = q.shape[0]
    else:
        batch = validate.index_tensor("cu_seqlens_q", cu_seqlens_q, q) - 1
        validate.length("max_seqlen_q", call.max_seqlen_q)
        if batch < 0:
            raise ValueError("cu_seqlens_q is empty; it holds batch + 1 offsets")
    if isinstance(lengths, (int, torch.SymInt)):
        _check_common_length(lengths)
        lengths = None
    for name, x in (
        ("cache_seqlens", lengths),
        ("cache_batch_idx", call.cache_batch_idx),
        ("cache_leftpad", call.cache_leftpad),
        ("rotary_seqlens", call.rotary_seqlens),
    ):
        if x is not None and validate.index_tensor(name, x, q) != batch:
            raise ValueError(f"{name} has {len(x)} entries; expected {batch}, one a sequence")
    if block_table is not None:
        validate.check_block_table(block_table, q, batch)
        if call.cache_batch_idx is not None:
            raise ValueError("cache_batch_idx and block_table are given; give one of them")
    elif call.cache_batch_idx is None and len(k_cache) < batch:
        raise ValueError(
            f"the caches hold {len(k_cache)} sequences, q has {batch}; give cache_batch_idx, or "
            "larger caches"
        )
    _new_keys(q, k_cache, v_cache, k, call.v, batch, call.cache_seqlens, call.cu_seqlens_k_new)
    if lengths is not call.cache_seqlens:
        new = 0 if k is None or call.cu_seqlens_k_new is not None else k.shape[1]
        _check_capacity(call.cache_seqlens, new, cache_capacity(k_cache, block_table))
    rotary(q, k, call.rotary_cos, call.rotary_sin, call.rotary_seqlens)
    _splits(call.num_splits, call.split_size)
    return batch


def cuda(q: Tensor, v_cache: Tensor, sink: Tensor | None) -> None:
    """Refuses dtypes and head dims without CUDA kernels over a cache."""
    validate.cuda_build_and_sink(q, sink)
    if wide_dtype(q) not in KVCACHE_CUDA_DTYPES:
        raise NotImplementedError(
            f"dtype {q.dtype} is not supported over a key/value cache on CUDA yet; supported: "
            f"{validate.listed(KVCACHE_CUDA_DTYPES)}; cast q and the caches, or run on the CPU"
        )
    for name, x in (("q", q), ("v_cache", v_cache)):
        dim = x.shape[-1]
        if dim > validate.CUDA_MAX_HEAD_DIM:
            raise NotImplementedError(
                f"{name}'s head dim {dim} is not supported over a key/value cache on CUDA yet; "
                f"the largest is {validate.CUDA_MAX_HEAD_DIM}; run on the CPU"
            )


def vectors(q: Tensor | None, k_cache: Tensor | None = None, v_cache: Tensor | None = None) -> None:
    """Raises ValueError for the first tensor whose rows do not start on 16-byte boundaries."""
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x is None or x.numel() == 0:
            continue
        steps = [step for n, step in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
        begin = (validate_ops.address(x) or 0) % 16
        if begin or any(step % 8 for step in steps):
            raise ValueError(
                f"{name} has strides {x.stride()} and starts at byte {begin} of 16; on "
                f"CUDA heads must start on 16-byte boundaries: call {name}.contiguous(), or clone()"
            )


def partials(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype | None = None) -> None:
    """out_partial (parts, .., dim) and lse_partial (parts, ..), fp32 on one device."""
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            raise TypeError(f"{name} is {validate.dtype_or_kind(x)}; expected float32")
        validate.strided(name, x)
    if out_partial.device != lse_partial.device:
        raise ValueError(
            f"devices differ: out_partial is on {out_partial.device}, lse_partial on "
            f"{lse_partial.device}"
        )
    if out_partial.dim() < 2 or out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(
            f"out_partial has shape {tuple(out_partial.shape)}, lse_partial "
            f"{tuple(lse_partial.shape)}; expected (parts, .., dim) and (parts, ..)"
        )
    if len(out_partial) == 0:
        raise ValueError("out_partial holds no part; there must be at least one")
    if out_partial.shape[-1] == 0:
        raise ValueError("out_partial has a head dim of 0; there must be columns")
    supported = (torch.float16, torch.bfloat16, torch.float32)
    if dtype is not None and dtype not in supported:
        raise TypeError(f"the result's dtype is {dtype}; supported: {validate.listed(supported)}")


def _check_common_length(cache_seqlens: int) -> None:
    if isinstance(cache_seqlens, bool):
        raise TypeError("cache_seqlens is bool; expected an int, or an int32 torch.Tensor")
    if not (validate.allowed(cache_seqlens >= 0) and validate.allowed(cache_seqlens < 2**31)):
        raise ValueError(
            f"cache_seqlens is {validate.shown(cache_seqlens)}; expected a length that fits int32"
        )


def _check_capacity(cache_seqlens: Any, new: int, capacity: int) -> None:
    if not validate.allowed(cache_seqlens + new <= capacity):
        if any(map(internals.is_symbolic, (cache_seqlens, new, capacity))):
            raise ValueError(
                "cache_seqlens is too large: with the rows of k it exceeds the rows that the cache "
                "has for a sequence"
            )
        raise ValueError(
            f"cache_seqlens is {cache_seqlens}; with {new} new rows a cache of {capacity} rows a "
            "sequence is too small"
        )


def _caches(q: Tensor, k_cache: Tensor, v_cache: Tensor, paged: bool) -> None:
    layout = "(num_blocks, page_size, heads_k, dim)" if paged else "(batch, seqlen, heads_k, dim)"
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {layout}")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache and v_cache differ in {layout}: {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    heads, heads_k, dim = q.shape[-2], k_cache.shape[2], k_cache.shape[3]
    if heads_k == 0 or heads % heads_k != 0:
        raise ValueError(
            f"q has {heads} heads and the caches {heads_k}; heads must be a multiple of heads_k"
        )
    if q.shape[-1] != dim or dim == 0 or v_cache.shape[3] == 0:
        raise ValueError(
            f"head dims are {q.shape[-1]} of q, {dim} of k_cache, {v_cache.shape[3]} of v_cache; "
            "the first two must agree, and none may be 0"
        )
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        validate.contiguous_last(name, x)


def _new_keys(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    batch: int,
    cache_seqlens: int | Tensor | None,
    cu_seqlens_k_new: Tensor | None,
) -> None:
    if k is None or v is None:
        if k is not v:
            raise ValueError("k or v is None; give both, or neither")
        if cu_seqlens_k_new is not None:
            raise ValueError("cu_seqlens_k_new is given, but no k and v")
        return
    if cache_seqlens is None:
        raise ValueError("cache_seqlens is None; k and v need it: they are appended there")
    if q.dtype == E4M3 and not k.dtype == v.dtype == wide_dtype(q):
        raise TypeError(
            f"dtypes differ: q has {q.dtype}, k {k.dtype}, v {v.dtype}; with q in e4m3, k and v "
            f"are to be {wide_dtype(q)}"
        )
    validate.same_kind(q, k, v, is_quantized=q.dtype == E4M3, dtypes=(*validate.DTYPES, E4M3))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        validate_ops.check_not_expanded(name, cache)
    if k_cache is v_cache or (
        not torch.compiler.is_compiling() and validate_ops.overlap(k_cache, v_cache)
    ):
        raise ValueError("k_cache and v_cache share memory; appending k and v needs two tensors")
    if cu_seqlens_k_new is not None:
        entries = validate.index_tensor("cu_seqlens_k_new", cu_seqlens_k_new, q)
        if entries != batch + 1:
            raise ValueError(f"cu_seqlens_k_new has {entries} entries; expected {batch + 1}")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        lead = (k.shape[0],) if cu_seqlens_k_new is not None else (batch, *k.shape[1:2])
        expected = (*lead, *cache.shape[2:])
        if tuple(x.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {expected}")
        validate.contiguous_last(name, x)


def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rotary_seqlens: Tensor | None,
) -> None:
    """Checks the tables of rotary embedding of q and new keys k."""
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("rotary_cos or rotary_sin is None; give both, or neither")
        if rotary_seqlens is not None:
            raise ValueError("rotary_seqlens is given, but no rotary_cos and rotary_sin")
        return
    if k is None:
        raise ValueError("rotary_cos is given, but no k and v: rotary embedding is for new keys")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(x, Tensor) or x.dtype != wide_dtype(q):
            expected = f"; expected {wide_dtype(q)}" if q.dtype == E4M3 else ""
            raise TypeError(f"{name} is {validate.dtype_or_kind(x)}; q is {q.dtype}{expected}")
        validate.strided(name, x)
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; they must agree")
        if x.dim() != 2 or x.shape != cos.shape or not x.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected contiguous (positions, rotary_dim / "
                "2), the same for cos and sin"
            )
    if 2 * cos.shape[1] > q.shape[-1] or cos.shape[1] == 0 or cos.shape[0] == 0:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)}; twice its width must be in [2, "
            f"{q.shape[-1]}], the head dim, and it needs positions"
        )


def _splits(num_splits: int, split_size: int) -> None:
    for name, x in (("num_splits", num_splits), ("split_size", split_size)):
        if isinstance(x, bool) or not isinstance(x, int):
            raise TypeError(f"{name} is {validate.kind_of(x)}; expected an int")
        if not 0 <= x <= validate.INT64_MAX:
            raise ValueError(f"{name} is {x}; expected a count >= 0 (0: the library chooses)")
    if num_splits and split_size:
        raise ValueError(
            f"num_splits is {num_splits} and split_size {split_size}; give one of them"
        )
