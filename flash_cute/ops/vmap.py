"""``torch.vmap`` over the ops: one call for all samples where that gives what one call each would.

A sample is one of the calls that vmap stands for. Samples become part of the batch, or of the
heads, both of which attention keeps apart:

- dense calls and calls over a cache: the batch, most often without a copy;
- dense calls whose sink differs from sample to sample or gets a gradient (a sink has one logit a
  head for the whole batch), and packed sequences, which all samples share: the heads;
- ``combine``: the rows.

Some calls are made one by one. With dropout, as what is dropped depends on the place in the batch
and in the heads. And where samples differ in what describes packed sequences; over a cache where
queries are packed, and where samples differ in the sink or in one cache of the two. Ops that write
into their arguments are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.ops.schema import OPS, Results, bind

Bound = dict[str, Any]  # arguments by name; mapped ones have the dimension of samples in front
# (op, how many samples, names of the mapped arguments, all arguments): results with a dimension of
# samples, and where it is
Rule = Callable[[Any, int, set[str], Bound], tuple[Results, tuple[int | None, ...]]]

_ROWS = ("q", "k", "v", "dout", "out")  # (.., heads, dim)
_STATISTICS = ("softmax_lse", "dlse")  # (.., heads, rows)
_PLACES = ("cache_seqlens", "cache_leftpad")  # (batch,)
_SEQUENCES = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table"}
# Where the results of an op have their heads.
_HEADS_OF_FORWARD = (-2, -2, -2, -3)  # out, softmax_lse, row_max, softmax
_HEADS_OF_BACKWARD = (-2, -2, -2, -1, -2)  # dq, dk, dv, dsink, softmax_d


# --- rules ---------------------------------------------------------------------------------------


def _readable(name: str, x: Tensor) -> Tensor:
    """``x``, or a copy of it that is as contiguous as the ops want the argument of this name."""
    if name not in _STATISTICS and (x.stride(-1) == 1 or x.shape[-1] <= 1):
        return x
    return x.contiguous()


def _each(name: str, samples: int, mapped: set[str], bound: Bound) -> Tensor:
    """The argument with a dimension of samples in front, mapped or not."""
    x = bound[name]
    return x if name in mapped else x.expand(samples, *x.shape)


def _one_by_one(op: Any, samples: int, mapped: set[str], bound: Bound) -> Any:
    def sample(i: int) -> Results:
        return op(*(_readable(n, x[i]) if n in mapped else x for n, x in bound.items()))

    calls = [sample(i) for i in range(samples)]
    results = [None if xs[0] is None else torch.stack(xs) for xs in zip(*calls, strict=True)]
    return tuple(results), tuple(None if x is None else 0 for x in results)


def _into_batch(op: Any, samples: int, mapped: set[str], bound: Bound) -> Any:
    """Results have the batch in front, all of them: dsink is none."""
    batch = bound["q"].shape["q" in mapped]
    folded = dict(bound)
    for name in (*_ROWS, *_STATISTICS, *_PLACES):
        if bound.get(name) is not None:
            x = _each(name, samples, mapped, bound).flatten(0, 1)
            folded[name] = _readable(name, x)
    slopes = bound["alibi_slopes"]
    if slopes is not None and (slopes.dim() == 2 or "alibi_slopes" in mapped):
        each = _each("alibi_slopes", samples, mapped, bound)
        each = each if each.dim() == 3 else each[:, None].expand(-1, batch, -1)
        folded["alibi_slopes"] = _readable("alibi_slopes", each.flatten(0, 1))
    results = op(*folded.values())
    unfolded = tuple(None if x is None else x.unflatten(0, (samples, batch)) for x in results)
    return unfolded, tuple(None if x is None else 0 for x in results)


def _into_heads(op: Any, samples: int, mapped: set[str], bound: Bound, heads: Any) -> Any:
    """``heads``: where each result has them."""
    folded = dict(bound)
    for name in (*_ROWS, *_STATISTICS, "alibi_slopes", "sink"):
        if bound.get(name) is not None:
            dim = -1 if name in ("alibi_slopes", "sink") else -2
            each = _each(name, samples, mapped, bound).movedim(0, dim - 1)
            x = each.flatten(dim - 1, dim)
            folded[name] = _readable(name, x)
    results = op(*folded.values())
    unfolded = tuple(
        None if x is None else x.unflatten(dim, (samples, x.shape[dim] // samples))
        for x, dim in zip(results, heads, strict=True)
    )
    dims = (None if x is None else x.dim() + h - 1 for x, h in zip(unfolded, heads, strict=True))
    return unfolded, tuple(dims)


def _attention(
    op: Any, samples: int, mapped: set[str], bound: Bound, heads: tuple[int, ...]
) -> Any:
    """Of ``fwd``, ``bwd`` and their varlen forms; ``heads``: where each result has them."""
    if bound["dropout_p"] > 0 or mapped & _SEQUENCES:
        return _one_by_one(op, samples, mapped, bound)
    bound["rng"] = None
    sink_of_each = "sink" in mapped or (bound["sink"] is not None and "dout" in bound)
    if sink_of_each or "cu_seqlens_q" in bound:
        return _into_heads(op, samples, mapped, bound, heads)
    return _into_batch(op, samples, mapped, bound)


def _attend_kvcache(op: Any, samples: int, mapped: set[str], bound: Bound) -> Any:
    """Samples share their caches, or have caches of their own, which become one."""
    caches = mapped & {"k_cache", "v_cache"}
    if bound["cu_seqlens_q"] is not None or "sink" in mapped or len(caches) == 1:
        return _one_by_one(op, samples, mapped, bound)
    q, k_cache = bound["q"], bound["k_cache"]
    batch, pages = q.shape["q" in mapped], k_cache.shape[bool(caches)]
    name = "cache_batch_idx" if bound["block_table"] is None else "block_table"
    if bound[name] is None and not (caches and batch == pages):
        bound[name] = torch.arange(batch, dtype=torch.int32, device=q.device)
    if bound[name] is not None:
        places = _each(name, samples, mapped, bound)
        if caches:  # a place that is outside of its sample's cache stays outside of all
            first = torch.arange(samples, dtype=torch.int32, device=q.device) * pages
            first = first.view(samples, *[1] * (places.dim() - 1))
            places = torch.where((places >= 0) & (places < pages), places + first, -1)
        bound[name] = places.flatten(0, 1).contiguous()
    for cache in caches:
        bound[cache] = _readable(cache, bound[cache].flatten(0, 1))
    return _into_batch(op, samples, mapped, bound)


def _combine(op: Any, samples: int, mapped: set[str], bound: Bound) -> Any:
    """(parts, .., dim) of each sample becomes (parts, rows, dim) of all."""
    out_partial, lse_partial = (
        _each(name, samples, mapped, bound).movedim(0, 1) for name in ("out_partial", "lse_partial")
    )
    rows = out_partial.shape[1:-1]
    out, lse = op(
        out_partial.flatten(1, -2).contiguous(),
        lse_partial.flatten(1).contiguous(),
        bound["dtype"],
    )
    return (out.view(*rows, out.shape[-1]), lse.view(rows)), (0, 0)


def _refuse(op: Any, samples: int, mapped: set[str], bound: Bound) -> NoReturn:
    raise NotImplementedError(
        f"{op}: vmap over {', '.join(x for x in bound if x in mapped)} is not supported, as the op "
        "writes into its caches; make samples part of the batch"
    )


def _refuse_outputs(op: Any, *_: Any, **__: Any) -> NoReturn:
    """Kernel of an out overload."""
    output = next(x.name for x in internals.arguments(op) if x.kwarg_only)
    raise NotImplementedError(
        f"{op}: vmap over an op that writes into {output}, and other tensors it is given, is not "
        "supported; call the overload that returns new ones"
    )


# --- registration --------------------------------------------------------------------------------


def _apply(op: Any, rule: Rule, samples: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    bound = bind(op, args)
    dims = {name: dim for name, dim in zip(bound, in_dims, strict=False) if dim is not None}
    bound |= {name: bound[name].movedim(dim, 0) for name, dim in dims.items()}
    if samples > 0:
        return rule(op, samples, set(dims), bound)
    # Nothing has the shapes of one sample's results, so that one of zeros is computed.
    one = {name: bound[name].new_zeros((1, *bound[name].shape[1:])) for name in dims}
    results, out_dims = rule(op, 1, set(dims), bound | one)
    none = [
        None if x is None else x.narrow(d or 0, 0, 0)
        for x, d in zip(results, out_dims, strict=True)
    ]
    return tuple(none), out_dims


def _legacy(op: Any, rule: Rule, *args: Any) -> Results:
    """Kernel for the tensors of ``is_grads_batched``."""
    for level in range(1, 65):  # as many as torch has
        plain, in_dims = zip(*(internals.without_samples(x, level) for x in args), strict=True)
        if any(dim is not None for dim in in_dims):
            break
    if any(map(internals.is_of_several_gradients, plain)):
        raise NotImplementedError(f"{op}: is_grads_batched inside of itself is not supported")
    samples = next(len(x) for x, dim in zip(plain, in_dims, strict=True) if dim is not None)
    results, out_dims = _apply(op, rule, samples, in_dims, plain)
    return tuple(
        None if x is None or dim is None else internals.with_samples(x, dim, level)
        for x, dim in zip(results, out_dims, strict=True)
    )


def _register(library: torch.library.Library, name: str, rule: Rule) -> None:
    packet = getattr(OPS, name)
    op = packet.default

    def mapped(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        return _apply(op, rule, info.batch_size, in_dims, args)

    torch.library.register_vmap(f"flash_cute::{name}", mapped, lib=library)
    library.impl(name, partial(_legacy, op, rule), "Batched")
    if "out" in packet.overloads():
        for key in ("FuncTorchBatched", "Batched"):
            library.impl(f"{name}.out", partial(_refuse_outputs, packet.out), key)


def register(library: torch.library.Library) -> None:
    """Gives every op its rule."""
    for name in ("fwd", "varlen_fwd"):
        _register(library, name, partial(_attention, heads=_HEADS_OF_FORWARD))
    for name in ("bwd", "varlen_bwd"):
        _register(library, name, partial(_attention, heads=_HEADS_OF_BACKWARD))
    _register(library, "fwd_kvcache", _refuse)
    _register(library, "attend_kvcache", _attend_kvcache)
    _register(library, "combine", _combine)
