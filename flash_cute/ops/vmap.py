"""``torch.vmap`` over the ops: one call for all samples, if its results equal those of one each.

A sample is one of the calls that vmap replaces. Samples become part of the batch or of the heads,
which are independent in attention:

- dense calls and calls over a cache: the batch, most often without a copy;
- dense calls whose sink differs from sample to sample or gets a gradient (a sink has one logit a
  head for the whole batch), and packed sequences, which all samples share: the heads;
- ``combine``: the rows.

Other calls are made one by one: sparse calls; those with dropout, whose mask depends on the index
in the batch and in the heads; those whose samples differ in offsets or lengths of packed sequences;
packed ones of e4m3, and of e4m3 those whose samples differ in the sink; those over caches of 8
bits; and over others those with packed queries, or whose samples differ in the sink or in only one
of the caches. Ops that write into their arguments raise an error that names them.

The rules of ops that are no attention stand with them: ``tile_lists.py``, ``pooled_softmax.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.ops.schema import CALLS, OPS, Results
from flash_cute.ops.typed import AttendKvcacheCall, CombineCall

# (op, how many samples, names of the mapped arguments, the call, whose mapped arguments have the
# dimension of samples in front): results with a dimension of samples, and where it is
Rule = Callable[[Any, int, set[str], Any], tuple[Results, tuple[int | None, ...]]]

_ROWS = ("q", "k", "v", "dout", "out")  # (.., heads, dim)
_STATISTICS = ("softmax_lse", "dlse")  # (.., heads, rows)
_PLACES = ("cache_seqlens", "cache_leftpad")  # (batch,)
_DESCALES = ("q_descale", "k_descale", "v_descale")  # (batch, ..)
_SEQUENCES = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table"}
# Tensors that the rules of attention know: calls with others are made one by one.
_KNOWN = {*_ROWS, *_STATISTICS, *_SEQUENCES, "alibi_slopes", "sink", "rng"}
# Where results have their heads, if not in the last dimension but one.
_HEADS = {"softmax": -3, "dsink": -1}


# --- rules ---------------------------------------------------------------------------------------


def _readable(name: str, x: Tensor) -> Tensor:
    """``x``, or a contiguous copy if the ops need one for the argument of this name."""
    if name not in _STATISTICS and (x.stride(-1) == 1 or x.shape[-1] <= 1):
        return x
    return x.contiguous()


def _each(name: str, samples: int, mapped: set[str], call: Any) -> Tensor:
    """The argument with a dimension of samples in front, mapped or not."""
    x = getattr(call, name)
    return x if name in mapped else x.expand(samples, *x.shape)


def _given(call: Any, *names: str) -> list[str]:
    """Those of the names whose arguments the call has, and which are not None."""
    return [name for name in names if getattr(call, name, None) is not None]


def _one_by_one(op: Any, samples: int, mapped: set[str], call: Any) -> Any:
    def sample(i: int) -> Results:
        own = {name: _readable(name, getattr(call, name)[i]) for name in mapped}
        return op(*call._replace(**own))

    calls = [sample(i) for i in range(samples)]
    results = [None if xs[0] is None else torch.stack(xs) for xs in zip(*calls, strict=True)]
    return tuple(results), tuple(None if x is None else 0 for x in results)


def _into_batch(op: Any, samples: int, mapped: set[str], call: Any) -> Any:
    """Samples become part of the batch, the first dimension of all results: dsink must be None."""
    batch = call.q.shape["q" in mapped]
    folded = {
        name: _readable(name, _each(name, samples, mapped, call).flatten(0, 1))
        for name in _given(call, *_ROWS, *_STATISTICS, *_PLACES, *_DESCALES)
    }
    slopes = getattr(call, "alibi_slopes", None)
    if slopes is not None and (slopes.dim() == 2 or "alibi_slopes" in mapped):
        each = _each("alibi_slopes", samples, mapped, call)
        each = each if each.dim() == 3 else each[:, None].expand(-1, batch, -1)
        folded["alibi_slopes"] = _readable("alibi_slopes", each.flatten(0, 1))
    results = op(*call._replace(**folded))
    unfolded = tuple(None if x is None else x.unflatten(0, (samples, batch)) for x in results)
    return unfolded, tuple(None if x is None else 0 for x in results)


def _into_heads(op: Any, samples: int, mapped: set[str], call: Any) -> Any:
    folded = {}
    for name in _given(call, *_ROWS, *_STATISTICS, "alibi_slopes", "sink"):
        dim = -1 if name in ("alibi_slopes", "sink") else -2
        each = _each(name, samples, mapped, call).movedim(0, dim - 1)
        folded[name] = _readable(name, each.flatten(dim - 1, dim))
    results = op(*call._replace(**folded))
    heads = [_HEADS.get(name, -2) for name in internals.results(op)]
    unfolded = tuple(
        None if x is None else x.unflatten(dim, (samples, x.shape[dim] // samples))
        for x, dim in zip(results, heads, strict=True)
    )
    dims = (None if x is None else x.dim() + h - 1 for x, h in zip(unfolded, heads, strict=True))
    return unfolded, tuple(dims)


def _attention(op: Any, samples: int, mapped: set[str], call: Any) -> Any:
    """The rule of ``fwd``, ``bwd`` and their varlen forms."""
    given = {name for name, x in call._asdict().items() if isinstance(x, Tensor)}
    if call.dropout_p > 0 or mapped & _SEQUENCES or given - _KNOWN:
        return _one_by_one(op, samples, mapped, call)
    call = call._replace(rng=None)
    sink_of_each = "sink" in mapped or (call.sink is not None and hasattr(call, "dout"))
    if sink_of_each or hasattr(call, "cu_seqlens_q"):
        return _into_heads(op, samples, mapped, call)
    return _into_batch(op, samples, mapped, call)


def _attend_kvcache(op: Any, samples: int, mapped: set[str], call: AttendKvcacheCall) -> Any:
    """Samples share their caches, or each has its own, which are concatenated."""
    caches = mapped & {"k_cache", "v_cache"}
    if call.cu_seqlens_q is not None or "sink" in mapped or len(caches) == 1:
        return _one_by_one(op, samples, mapped, call)
    q = call.q
    batch, pages = q.shape["q" in mapped], call.k_cache.shape[bool(caches)]
    name = "cache_batch_idx" if call.block_table is None else "block_table"
    if getattr(call, name) is None and not (caches and batch == pages):
        own = torch.arange(batch, dtype=torch.int32, device=q.device)
        call = call._replace(cache_batch_idx=own)
    folded: dict[str, Any] = {}
    if getattr(call, name) is not None:
        places = _each(name, samples, mapped, call)
        if caches:  # indices outside of their sample's cache stay invalid
            first = torch.arange(samples, dtype=torch.int32, device=q.device) * pages
            first = first.view(samples, *[1] * (places.dim() - 1))
            places = torch.where((places >= 0) & (places < pages), places + first, -1)
        folded[name] = places.flatten(0, 1).contiguous()
    for cache in caches:
        folded[cache] = _readable(cache, getattr(call, cache).flatten(0, 1))
    return _into_batch(op, samples, mapped, call._replace(**folded))


def _fp8(op: Any, samples: int, mapped: set[str], call: Any) -> Any:
    """The rule of ``fp8_fwd`` and its varlen form."""
    if "sink" in mapped or hasattr(call, "cu_seqlens_q"):
        return _one_by_one(op, samples, mapped, call)
    return _into_batch(op, samples, mapped, call)


def _combine(op: Any, samples: int, mapped: set[str], call: CombineCall) -> Any:
    """Samples of shape (parts, .., dim) become rows of one (parts, rows, dim)."""
    out_partial, lse_partial = (
        _each(name, samples, mapped, call).movedim(0, 1) for name in ("out_partial", "lse_partial")
    )
    rows = out_partial.shape[1:-1]
    out, lse = op(
        out_partial.flatten(1, -2).contiguous(), lse_partial.flatten(1).contiguous(), call.dtype
    )
    return (out.view(*rows, out.shape[-1]), lse.view(rows)), (0, 0)


def _refuse(op: Any, samples: int, mapped: set[str], call: Any) -> NoReturn:
    names = ", ".join(name for name in call._fields if name in mapped)
    raise NotImplementedError(
        f"{op}: vmap over {names} is not supported, as the op writes into its caches; make samples "
        "part of the batch"
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
    call = CALLS[op](*args)
    dims = {name: d for name, d in zip(call._fields, in_dims, strict=False) if d is not None}
    call = call._replace(**{name: getattr(call, name).movedim(d, 0) for name, d in dims.items()})
    if samples > 0:
        return rule(op, samples, set(dims), call)
    # With no sample the shapes of results are unknown: those of one sample of zeros are used.
    given = {name: getattr(call, name) for name in dims}
    one = {name: x.new_zeros((1, *x.shape[1:])) for name, x in given.items()}
    results, out_dims = rule(op, 1, set(dims), call._replace(**one))
    none = [
        None if x is None else x.narrow(d or 0, 0, 0)
        for x, d in zip(results, out_dims, strict=True)
    ]
    return tuple(none), out_dims


def _legacy(op: Any, rule: Rule, *args: Any) -> Results:
    """The kernel for tensors of autograd's ``is_grads_batched``."""
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
    for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd"):
        _register(library, name, _attention)
    _register(library, "fwd_kvcache", _refuse)
    _register(library, "attend_kvcache", _attend_kvcache)
    for name in ("fp8_fwd", "fp8_varlen_fwd"):
        _register(library, name, _fp8)
    _register(library, "attend_quantized_kvcache", _one_by_one)
    _register(library, "combine", _combine)
