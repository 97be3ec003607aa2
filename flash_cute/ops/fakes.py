"""Fakes of the ops: shapes, dtypes and strides of their results, for tracing and meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import validate_ops
from flash_cute.ops.schema import OUT_OVERLOADS, Results, bind, bwd, fwd, varlen_bwd, varlen_fwd


def register(library: torch.library.Library) -> None:
    fakes: dict[str, Callable[..., Results | None]] = {
        "fwd": _fwd,
        "varlen_fwd": _varlen_fwd,
        "bwd": partial(_bwd, bwd),
        "varlen_bwd": partial(_bwd, varlen_bwd),
        "fwd_kvcache": _fwd_kvcache,
        "attend_kvcache": _kvcache,
        "combine": _combine,
        "lab_forward": _out,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"flash_cute::{name}", fake, lib=library)
    for op in OUT_OVERLOADS:
        torch.library.register_fake(op, _out, lib=library)


def _accumulator(x: Tensor) -> torch.dtype:
    """dtype of log-sum-exps and row statistics: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fwd_results(
    q: Tensor,
    v: Tensor,
    lse_shape: Sequence[int],
    softmax_shape: Sequence[int],
    return_softmax: bool,
    return_row_max: bool,
) -> Results:
    statistic = _accumulator(q)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse_shape, dtype=statistic),
        q.new_empty(lse_shape, dtype=statistic) if return_row_max else None,
        q.new_empty(softmax_shape) if return_softmax else None,
    )


def _fwd(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Results:
    bound = bind(fwd, (q, k, v, *options), named)
    batch, seqlen_q, heads, _ = q.shape
    return _fwd_results(
        q,
        v,
        (batch, heads, seqlen_q),
        (batch, heads, seqlen_q, k.shape[1]),
        bound["return_softmax"],
        bound["return_row_max"],
    )


def _varlen_fwd(q: Tensor, *options: Any, **named: Any) -> Results:
    bound = bind(varlen_fwd, (q, *options), named)
    total_q, heads, _ = q.shape
    batch = bound["cu_seqlens_q"].shape[0] - 1
    return _fwd_results(
        q,
        bound["v"],
        (heads, total_q),
        (batch, heads, bound["max_seqlen_q"], bound["max_seqlen_k"]),
        bound["return_softmax"],
        bound["return_row_max"],
    )


def _bwd(op: Any, *args: Any, **named: Any) -> Results:
    bound = bind(op, args, named)
    validate_ops.of_forward(bound)
    q, sink, lse = bound["q"], bound["sink"], bound["softmax_lse"]
    return (
        *(x.new_empty(x.shape) for x in (q, bound["k"], bound["v"])),
        None if sink is None else q.new_empty(sink.shape, dtype=torch.float32),
        lse.new_empty(lse.shape),
    )


def _kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any, **__: Any) -> Results:
    batch, (rows, heads) = q.shape[:-3], q.shape[-3:-1]
    return (
        q.new_empty((*q.shape[:-1], v_cache.shape[-1])),
        q.new_empty((*batch, heads, rows), dtype=_accumulator(q)),
    )


def _fwd_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, *_: Any, **__: Any
) -> Results:
    if k is not None:
        _refuse_lost_views(k_cache=k_cache, v_cache=v_cache)
        _refuse_lost_rows(k_cache, k)
    return _kvcache(q, k_cache, v_cache)


def _out(*_: Any, **outputs: Tensor | None) -> None:
    _refuse_lost_views(**outputs)


_WAYS_OUT = (
    "Give each layer a tensor of its own, make the view outside of the compiled function, or "
)


def _refuse_lost_views(**written: Tensor | None) -> None:
    """torch's inductor takes 0 for an offset that it does not know."""
    for name, x in written.items():
        if x is not None and internals.in_graph() and internals.begins_by_sizes(x):
            raise NotImplementedError(
                f"{name} is a view that begins at element {x.storage_offset()}, by dynamic sizes, "
                f"and torch.compile would write at element 0 (pytorch#198068). {_WAYS_OUT}compile "
                "for static sizes: dynamic=False, or torch._dynamo.mark_static"
            )


def _refuse_lost_rows(k_cache: Tensor, k: Tensor) -> None:
    """torch counts the rows of a slice from where the memory of its base begins, not the base."""
    lacks_rows = any(type(n) is int and n == 0 for n in k_cache.shape[:2])
    if lacks_rows and internals.in_graph() and not (type(k.shape[0]) is int and k.shape[0] == 0):
        raise NotImplementedError(
            f"k_cache has shape {tuple(k_cache.shape)} in the graph: torch.compile loses slices of "
            f"a view that begins inside of its memory. {_WAYS_OUT}slice it there"
        )


def _combine(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype | None = None) -> Results:
    return (
        out_partial.new_empty(out_partial.shape[1:], dtype=dtype or out_partial.dtype),
        lse_partial.new_empty(lse_partial.shape[1:]),
    )
