"""ATen's operators of flash attention, in terms of flash_cute's.

Shapes, strides and dtypes of results are those of ATen's, which graphs rely on. Kernels are called
below autograd: ATen's operators bring their own formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import ops
from flash_cute.call import spellings
from flash_cute.call.rng import rng_state
from flash_cute.functional import kvcache
from flash_cute.ops.switches import deterministic
from flash_cute.ops.typed import BwdCall, FwdCall, VarlenBwdCall, VarlenFwdCall

_FWD_OUT, _BWD_OUT = torch.ops.flash_cute.fwd.out, torch.ops.flash_cute.bwd.out
_SDPA = "_scaled_dot_product_flash_attention"


def kernels() -> dict[tuple[str, str], Callable[..., Any]]:
    """Kernels by the operator's name and the dispatch key."""
    found: dict[tuple[str, str], Callable[..., Any]] = {}
    for key in ("CUDA", "CPU"):
        found[_SDPA, key] = sdpa_forward
        found[f"{_SDPA}_backward", key] = sdpa_backward
        found["_flash_attention_forward", key] = flash_forward
        found["_flash_attention_backward", key] = flash_backward
        if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
            found["_flash_attention_forward_no_dropout_inplace", key] = flash_forward_inplace
    for name, kernel in (("", cpu_forward), ("_backward", cpu_backward)):
        op = f"{_SDPA}_for_cpu{name}"
        found[op, "CPU"] = partial(kernel, internals.kernel_of(f"aten::{op}", "CPU"))
    return found


# --- (batch, heads, seqlen, dim) ------------------------------------------------------------------


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """ATen's dense forward; a causal mask is aligned to the bottom right."""
    rng = rng_state(query.device) if dropout_p else None
    wants_softmax = return_debug_mask and dropout_p > 0
    out, lse, softmax = _dense(
        query, key, value, scale, is_causal, -1, dropout_p, rng, wants_softmax
    )
    last = _of_dropout(rng, softmax, query)
    return out, lse, None, None, query.shape[2], key.shape[2], *last


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """ATen's dense backward; gradients have the memory layout of their inputs."""
    rng = philox_seed.view(torch.int64) if dropout_p else None
    grads = tuple(torch.empty_like(x) for x in (query, key, value))
    saved = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    dout, q, k, v, out = spellings.copy_if_last_dim_strided(*saved)
    rows = tuple(x.transpose(1, 2) for x in grads)
    written = spellings.copy_if_last_dim_strided(*rows)
    call = BwdCall(
        dout, q, k, v, out, logsumexp.contiguous(), softmax_scale=scale, is_causal=is_causal,
        dropout_p=dropout_p, rng=rng, deterministic=deterministic(False),
        allow_tf32=ops.allow_tf32(query),
    )  # fmt: skip
    with internals.below_versions():  # as in _dense
        _BWD_OUT(*call, dq=written[0], dk=written[1], dv=written[2])
    for x, y in zip(rows, written, strict=True):
        if x is not y:  # its rows were not contiguous
            x.copy_(y)
    return grads  # type: ignore[return-value]


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    is_causal: bool,
    right: int,
    dropout_p: float,
    rng: Tensor | None,
    wants_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out with query's memory layout, softmax_lse (batch, heads, seqlen), and probabilities."""
    batch, heads, seqlen, dim = query.shape
    dim_v = value.shape[-1]
    with internals.below_versions():  # the written tensors are new
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
            q, k, v = spellings.copy_if_last_dim_strided(q, k, v)
        call: tuple[Any, ...] = (q, k, v, scale, is_causal)
        allow_tf32 = ops.allow_tf32(query)
        if right != -1 or dropout_p or allow_tf32:  # each argument costs time
            call = FwdCall(
                q, k, v, scale, is_causal, window_size_right=right, dropout_p=dropout_p, rng=rng,
                return_softmax=wants_softmax, allow_tf32=allow_tf32,
            )  # fmt: skip
        if dim == dim_v and query.stride() == (seqlen * heads * dim, dim, heads * dim, 1):
            out, lse, _, softmax = ops.fwd(*call)  # whose out has this layout
            return out.transpose(1, 2), lse, softmax
        out = (
            torch.empty_like(query)
            if dim == dim_v
            else query.new_empty((batch, heads, seqlen, dim_v))
        )
        rows = (
            out
            if out.stride(-1) == 1 or dim_v == 1
            else torch.empty_like(out, memory_format=torch.contiguous_format)
        )
        statistic = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = query.new_empty((batch, heads, seqlen), dtype=statistic)
        softmax = query.new_empty((batch, heads, seqlen, key.shape[2])) if wants_softmax else None
        _FWD_OUT(*call, out=rows.transpose(1, 2), softmax_lse=lse, softmax=softmax)
        return (out if rows is out else out.copy_(rows)), lse, softmax


def _of_dropout(rng: Tensor | None, softmax: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
    """The last three results of ATen's operators: the state of dropout, uint64 (2,), an unused
    scalar, and probabilities. Without dropout none of them is used."""
    if rng is None:
        return _unused_results(like)
    softmax = like.new_empty(0) if softmax is None else softmax
    return rng.view(torch.uint64), like.new_empty((), dtype=torch.uint64), softmax


_kept: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}


def _unused_results(like: Tensor) -> tuple[Tensor, ...]:
    """The same tensors in every call, since allocating them takes a fifth of its time; but new ones
    in graphs, which reuse the memory of results."""
    kind = like.device, like.dtype
    if internals.has_inductor():
        return _new_unused_results(like)
    if kind not in _kept:
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            return _new_unused_results(like)
        with torch.inference_mode(False):  # autograd may save them later
            _kept[kind] = _new_unused_results(like)
    return _kept[kind]


def _new_unused_results(like: Tensor) -> tuple[Tensor, ...]:
    state, unused = (like.new_empty(size, dtype=torch.uint64) for size in ((2,), ()))
    return state, unused, like.new_empty(0)


# --- the CPU's own operators ----------------------------------------------------------------------


def cpu_forward(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """ATen's CPU forward; a causal mask is aligned to the top left. ATen runs masked calls."""
    if attn_mask is not None:
        return original(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    key, value, right = _top_left(query, key, value, is_causal)
    out, lse, _ = _dense(query, key, value, scale, False, right, dropout_p, None, False)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def cpu_backward(
    original: Callable[..., Any],
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if attn_mask is not None:
        return original(
            grad_out, query, key, value, out, logsumexp, dropout_p, is_causal,
            attn_mask=attn_mask, scale=scale,
        )  # fmt: skip
    seen_k, seen_v, right = _top_left(query, key, value, is_causal)
    tensors = (grad_out, query, seen_k, seen_v, out)
    dout, q, k, v, out = spellings.copy_if_last_dim_strided(*(x.transpose(1, 2) for x in tensors))
    call = BwdCall(
        dout, q, k, v, out, logsumexp.contiguous(), softmax_scale=scale, window_size_right=right,
        deterministic=deterministic(False),
    )  # fmt: skip
    with internals.below_autograd():
        dq, dk, dv, *_ = ops.bwd(*call)
    hidden = key.shape[2] - seen_k.shape[2]
    pad = (0, 0, 0, 0, 0, hidden)
    dk, dv = (torch.nn.functional.pad(x, pad) if hidden else x for x in (dk, dv))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _top_left(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, int]:
    """The number of visible keys, and the right bound with which query i sees keys <= i."""
    if not is_causal:
        return key, value, -1
    seqlen = query.shape[2]
    key, value = key[:, :, :seqlen], value[:, :, :seqlen]
    return key, value, seqlen - key.shape[2]


# --- (batch, seqlen, heads, dim), or (total, heads, dim) ------------------------------------------


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """ATen's forward of packed sequences, also in pages; dense without ``cum_seq_q``."""
    lost = {"seqused_k": seqused_k, "alibi_slopes": alibi_slopes, "block_table": block_table}
    _refuse_gradients((query, key, value), lost)
    q, k, v = spellings.copy_if_last_dim_strided(query, key, value)
    window = _bound(window_size_left), _bound(window_size_right)
    if block_table is not None:
        out, lse = kvcache.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=seqused_k, block_table=block_table, cu_seqlens_q=cum_seq_q,
            max_seqlen_q=max_q, softmax_scale=scale, causal=is_causal, window_size=window,
            alibi_slopes=alibi_slopes, num_splits=num_splits or 0, return_softmax_lse=True,
        )  # fmt: skip
        return out, lse, *_of_dropout(None, None, q)
    if num_splits:
        raise NotImplementedError(
            f"num_splits is {num_splits}, which flash_cute supports only with pages; leave it None"
        )
    rng = rng_state(q.device) if dropout_p else None
    if cum_seq_q is not None and cum_seq_k is None:
        k, v, cum_seq_k = spellings.pack_keys(k, v, seqused_k, None)
    options: dict[str, Any] = {
        "softmax_scale": scale, "is_causal": is_causal, "window_size_left": window[0],
        "window_size_right": window[1], "alibi_slopes": alibi_slopes, "dropout_p": dropout_p,
        "rng": rng, "return_softmax": return_debug_mask and dropout_p > 0,
        "allow_tf32": ops.allow_tf32(q),
    }  # fmt: skip
    with internals.below_autograd():
        if cum_seq_q is None or cum_seq_k is None:
            out, lse, _, softmax = ops.fwd(*FwdCall(q, k, v, **options))
        else:
            sequences = (cum_seq_q, cum_seq_k, max_q, max_k)
            call = VarlenFwdCall(q, k, v, *sequences, seqused_k=seqused_k, **options)
            out, lse, _, softmax = ops.varlen_fwd(*call)
    return out, lse, *_of_dropout(rng, softmax, q)


def _refuse_gradients(tensors: tuple[Tensor, ...], lost: dict[str, Tensor | None]) -> None:
    """Refuses gradients with arguments that ATen's formula does not pass to backward."""
    given = [name for name, x in lost.items() if x is not None]
    if given and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError(
            f"{', '.join(given)} given with tensors that require grad: ATen does not pass it to "
            "backward; call flash_cute.flash_attn_varlen_func, or under torch.no_grad()"
        )


def _bound(x: int | None) -> int:
    return -1 if x is None or x < 0 else x


def flash_forward_inplace(out: Tensor, *args: Any, **named: Any) -> Tensor:
    """:func:`flash_forward` into ``out``; returns softmax_lse."""
    result, lse, *_ = flash_forward(*args, **named)
    out.copy_(result)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = spellings.copy_if_last_dim_strided(grad_out, query, key, value, out)
    window = _bound(window_size_left), _bound(window_size_right)
    rng = state.view(torch.int64) if dropout_p else None
    options: dict[str, Any] = {
        "softmax_scale": scale, "is_causal": is_causal, "window_size_left": window[0],
        "window_size_right": window[1], "dropout_p": dropout_p, "rng": rng,
        "deterministic": deterministic(False), "allow_tf32": ops.allow_tf32(query),
    }  # fmt: skip
    lse = logsumexp.contiguous()
    with internals.below_autograd():
        if cum_seq_q is None or cum_seq_k is None:
            dq, dk, dv, *_ = ops.bwd(*BwdCall(dout, q, k, v, out, lse, **options))
        else:
            sequences = (cum_seq_q, cum_seq_k, max_q, max_k)
            dq, dk, dv, *_ = ops.varlen_bwd(
                *VarlenBwdCall(dout, q, k, v, out, lse, *sequences, **options)
            )
    return dq, dk, dv
