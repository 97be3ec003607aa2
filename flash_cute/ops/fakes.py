"""Fakes of the ops: shapes, dtypes and strides of their results, for tracing and meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call.sizes import batch_of, longest_keys, longest_queries
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.call.validate import ops as validate_ops
from flash_cute.call.validate import quantized_kvcache
from flash_cute.call.validate.options import OF_OPS
from flash_cute.ops import schema
from flash_cute.ops.schema import CALLS, OUT_OF, Results, bwd, fwd, varlen_bwd, varlen_fwd
from flash_cute.ops.typed import (
    AttendKvcacheCall,
    AttendQuantizedKvcacheCall,
    CombineCall,
    FwdKvcacheCall,
)


def register(library: torch.library.Library) -> None:
    fakes: dict[str, Callable[..., Results | None]] = {
        "fwd": partial(_fwd, fwd),
        "varlen_fwd": partial(_fwd, varlen_fwd),
        "bwd": partial(_bwd, bwd),
        "varlen_bwd": partial(_bwd, varlen_bwd),
        "fwd_kvcache": _fwd_kvcache,
        "attend_kvcache": _attend_kvcache,
        "attend_quantized_kvcache": _attend_quantized_kvcache,
        "combine": _combine,
        "lab_forward": _refuse_lost_views_of_out,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"flash_cute::{name}", fake, lib=library)
    for functional, op in OUT_OF.items():
        torch.library.register_fake(op, partial(_out, op, functional), lib=library)


def check(checks: Callable[..., object], call: Any, *outputs: Tensor | None) -> None:
    """Refuses what the op refuses, by the numbers that a graph is made with, and makes no guard:
    ``checks`` gets the call, and what an out overload writes into, with examples of symbolic sizes.
    Where data is to tell some of them, the op asks when it runs."""
    made: dict[int, Tensor] = {}
    given: list[Any] = []
    for x in (*call, *outputs):
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
            given.append(internals.example(x))
            if given[-1] is None and x is not None:
                return
            continue
        numbers = [internals.example(n) for n in (*x.shape, *x.stride())]
        if None in numbers:
            return
        if id(x) not in made:
            made[id(x)] = x
            if any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride())):
                made[id(x)] = x.new_empty_strided(numbers[: x.dim()], numbers[x.dim() :])
        given.append(made[id(x)])
    checks(call._make(given[: len(call)]), *given[len(call) :])


def _fwd_results(
    q: Tensor,
    v: Tensor,
    lse_shape: Sequence[int],
    softmax_shape: Sequence[int],
    return_softmax: bool,
    return_row_max: bool,
) -> Results:
    statistic = validate_ops.statistic_dtype(q)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse_shape, dtype=statistic),
        q.new_empty(lse_shape, dtype=statistic) if return_row_max else None,
        q.new_empty(softmax_shape) if return_softmax else None,
    )


def _fwd(op: Any, *args: Any, **named: Any) -> Results:
    call = CALLS[op](*args, **named)
    check(validate_ops.arguments, call)
    q = call.q
    *lead, rows, heads, _ = q.shape
    lse_shape = (*lead, heads, rows)
    softmax_shape = (batch_of(call), heads, longest_queries(call), longest_keys(call))
    returns = call.return_softmax, call.return_row_max
    return _fwd_results(q, call.v, lse_shape, softmax_shape, *returns)


def _bwd(op: Any, *args: Any, **named: Any) -> Results:
    call = CALLS[op](*args, **named)
    check(validate_ops.arguments, call)
    q, sink, lse = call.q, call.sink, call.softmax_lse
    return (
        *(x.new_empty(x.shape) for x in (q, call.k, call.v)),
        None if sink is None else q.new_empty(sink.shape, dtype=torch.float32),
        lse.new_empty(lse.shape),
    )


def _kvcache(call: FwdKvcacheCall) -> Results:
    check(lambda given: validate_kvcache.check(given, OF_OPS), call)
    return _over_cache(call)


def _over_cache(call: Any) -> Results:
    q, v_cache = call.q, call.v_cache
    batch, (rows, heads) = q.shape[:-3], q.shape[-3:-1]
    return (
        q.new_empty((*q.shape[:-1], v_cache.shape[-1])),
        q.new_empty((*batch, heads, rows), dtype=validate_ops.statistic_dtype(q)),
    )


def _attend_kvcache(*args: Any, **named: Any) -> Results:
    return _kvcache(schema.over_cache(AttendKvcacheCall(*args, **named)))


def _attend_quantized_kvcache(*args: Any, **named: Any) -> Results:
    call = AttendQuantizedKvcacheCall(*args, **named)
    check(
        lambda given: quantized_kvcache.check_op(
            schema.over_cache(given), given.k_descale, given.v_descale
        ),
        call,
    )
    return _over_cache(call)


def _fwd_kvcache(*args: Any, **named: Any) -> Results:
    call = FwdKvcacheCall(*args, **named)
    if call.k is not None:
        _refuse_lost_views(k_cache=call.k_cache, v_cache=call.v_cache)
        _refuse_lost_rows(call.k_cache, call.k)
    return _kvcache(call)


def _out(op: Any, functional: Any, *args: Any, **named: Any) -> None:
    written = schema.written_arguments(op)
    outputs = {name: named.pop(name, None) for name in written}
    _refuse_lost_views(**outputs)
    fake = _fwd if functional in (fwd, varlen_fwd) else _bwd

    def check_outputs(call: Any, *given: Tensor | None) -> None:
        validate_ops.outputs(
            call, dict(zip(written, given, strict=True)), internals.results(functional),
            lambda changed: fake(functional, *changed),
        )  # fmt: skip

    check(check_outputs, CALLS[functional](*args, **named), *outputs.values())


def _refuse_lost_views_of_out(*_: Any, out: Tensor) -> None:
    _refuse_lost_views(out=out)


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


def _combine(*args: Any, **named: Any) -> Results:
    call = CombineCall(*args, **named)
    check(lambda given: validate_kvcache.partials(*given), call)
    out, lse = call.out_partial, call.lse_partial
    return (
        out.new_empty(out.shape[1:], dtype=call.dtype or out.dtype),
        lse.new_empty(lse.shape[1:]),
    )
