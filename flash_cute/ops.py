"""``torch.ops.flash_cute``: fakes, autograd formulas and CPU implementations of the ops.

Schemas and CUDA implementations are C++ (``csrc/library.cpp``). ``fwd``, ``bwd``, ``varlen_fwd``
and ``varlen_bwd`` are functional; each has an ``out`` overload that writes into tensors that the
caller gives. ``fwd_kvcache`` writes into the caches it is given, ``attend_kvcache``, which has
no keys to append, and ``combine`` into nothing; none of them has a gradient. ``deterministic`` of
``bwd`` and ``varlen_bwd`` is that argument alone: torch's global switch is autograd's to take in,
when backward runs. Everything is registered here, before the first call, so that
``torch.compile``, ``torch.export`` and ``opcheck`` see complete ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flash_cute import cpu, flops, validate, validate_kvcache, validate_ops
from flash_cute.library import has_cuda_kernels, kernels

__all__ = [
    "attend_kvcache",
    "bwd",
    "combine",
    "fwd",
    "fwd_kvcache",
    "has_cuda_kernels",
    "kernels",
    "varlen_bwd",
    "varlen_fwd",
]

Results = tuple[Tensor | None, ...]  # of an op; None is what was not asked for

_ops = torch.ops.flash_cute
fwd = _ops.fwd.default
bwd = _ops.bwd.default
varlen_fwd = _ops.varlen_fwd.default
varlen_bwd = _ops.varlen_bwd.default
fwd_kvcache = _ops.fwd_kvcache.default
attend_kvcache = _ops.attend_kvcache.default
combine = _ops.combine.default


# Arguments of every op in order, with their defaults: reading a schema takes long.
_DEFAULTS = {
    op: {argument.name: argument.default_value for argument in op._schema.arguments}
    for packet in (_ops.fwd, _ops.bwd, _ops.varlen_fwd, _ops.varlen_bwd)
    for op in (packet.default, packet.out)
}
_DEFAULTS |= {
    op: {argument.name: argument.default_value for argument in op._schema.arguments}
    for op in (fwd_kvcache, attend_kvcache, combine)
}


def _accumulator(x: Tensor) -> torch.dtype:
    """dtype of log-sum-exps and row statistics: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def bind(op: Any, args: Sequence[Any], named: dict[str, Any] | None = None) -> dict[str, Any]:
    """The op's arguments by name, defaults filled in from its schema."""
    bound = dict(_DEFAULTS[op])
    bound.update(zip(bound, args, strict=False))
    bound.update(named or {})
    return bound


# --- fakes: shapes, dtypes and strides only ------------------------------------------------------


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


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Results:
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


def _varlen_fwd_fake(q: Tensor, *options: Any, **named: Any) -> Results:
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


def _bwd_fake(op: Any, *args: Any, **named: Any) -> Results:
    bound = bind(op, args, named)
    validate_ops.of_forward(bound)
    q, sink, lse = bound["q"], bound["sink"], bound["softmax_lse"]
    return (
        *(x.new_empty(x.shape) for x in (q, bound["k"], bound["v"])),
        None if sink is None else q.new_empty(sink.shape, dtype=torch.float32),
        lse.new_empty(lse.shape),
    )


def _kvcache_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any, **__: Any) -> Results:
    batch, (rows, heads) = q.shape[:-3], q.shape[-3:-1]
    return (
        q.new_empty((*q.shape[:-1], v_cache.shape[-1])),
        q.new_empty((*batch, heads, rows), dtype=_accumulator(q)),
    )


def _combine_fake(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype | None = None
) -> Results:
    return (
        out_partial.new_empty(out_partial.shape[1:], dtype=dtype or out_partial.dtype),
        lse_partial.new_empty(lse_partial.shape[1:]),
    )


# --- autograd ------------------------------------------------------------------------------------


def _differentiable(op: Any, formula: type[torch.autograd.Function]) -> Callable[..., Results]:
    """Autograd kernel of an op.

    torch.library.register_autograd would do the same, but not inside of torch.func's transforms,
    and take 100 us a call to read the schema.
    """

    def kernel(*args: Any) -> Results:
        if forward_ad._current_level >= 0:
            _refuse_tangents(args)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            bound = bind(op, args).values()
            if torch._C._functorch.maybe_current_level() is None:
                return formula.apply(*bound)
            with enable_single_level_autograd_function():  # each level has a call of its own
                return super(torch.autograd.Function, formula).apply(*bound)  # type: ignore[misc]
        return _below_autograd(op, args)

    return kernel


def _below_autograd(op: Any, args: Sequence[Any]) -> Results:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _forward(op: Any, args: Sequence[Any]) -> Results:
    """What a formula's forward returns; levels of torch.func below have gradients of their own."""
    if torch._C._functorch.maybe_current_level() is None:
        return _below_autograd(op, args)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _below_autograd(op, args)


def _formula(op: Any, bwd_op: Any) -> type[torch.autograd.Function]:
    """Of a forward op, whose gradient is one call of its backward op."""
    names = list(_DEFAULTS[op])

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Results:
            bound = dict(zip(names, args, strict=True))
            if bound.get("block_table") is not None:
                validate_ops.no_gradient_of_pages(bound)
            results = out, softmax_lse, row_max, softmax = _forward(op, args)
            ctx.mark_non_differentiable(*(x for x in (row_max, softmax) if x is not None))
            ctx.set_materialize_grads(False)
            ctx.tensors = [name for name, x in bound.items() if isinstance(x, Tensor)]
            ctx.options = {name: x for name, x in bound.items() if not isinstance(x, Tensor)}
            ctx.save_for_backward(out, softmax_lse, *(bound[name] for name in ctx.tensors))
            return results

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Results:
            out, softmax_lse, *saved = ctx.saved_tensors
            bound = ctx.options | dict(zip(ctx.tensors, saved, strict=True))
            dq, dk, dv, dsink, _ = bwd_op(
                *backward_arguments(bwd_op, bound, out, softmax_lse, dout, dlse)
            )
            gradients = {"q": dq, "k": dk, "v": dv}
            if bound["sink"] is not None:
                gradients["sink"] = dsink.to(bound["sink"].dtype)
            return tuple(gradients.get(name) for name in names)

    return Attention


def _no_formula(op: Any) -> type[torch.autograd.Function]:
    """Of a backward op, which has no gradient."""

    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Results:
            return _forward(op, args)

        @staticmethod
        def backward(ctx: Any, *_: Any) -> None:
            no_double_backward()

    return Gradients


def transformed() -> bool:
    """Whether derivatives may be asked for in a way that ``requires_grad`` does not show: in
    forward mode, or inside a transform of torch.func."""
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def _refuse_tangents(args: Sequence[Any]) -> None:
    tensors = (x for x in args if isinstance(x, Tensor))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "flash_cute: attention has no derivative in forward mode; use backward"
        )


def backward_arguments(
    bwd_op: Any,
    forward_arguments: dict[str, Any],
    out: Tensor,
    softmax_lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> list[Any]:
    """What a backward op takes before its keyword-only outputs, in order."""
    bound = forward_arguments | {
        "dout": torch.zeros_like(out) if dout is None else _contiguous_rows(dout),
        "out": out,
        "softmax_lse": softmax_lse,
        "dlse": None if dlse is None else dlse.contiguous(),
        "deterministic": deterministic(forward_arguments["deterministic"]),
    }
    return [bound[name] for name in _DEFAULTS[bwd_op] if name in bound]


def allow_tf32(x: Tensor) -> bool:
    """Whether products of ``x`` may be rounded to TF32: fp32 on CUDA where torch's own may be."""
    return x.dtype == torch.float32 and x.is_cuda and _matmuls_in_tf32()


@torch.compiler.assume_constant_result  # torch.compile guards torch's switch in any case
def _matmuls_in_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def deterministic(asked: bool) -> bool:
    """Whether backward must be bitwise repeatable: asked for here, or by torch's global switch."""
    return asked or torch.are_deterministic_algorithms_enabled()


def _contiguous_rows(x: Tensor) -> Tensor:
    """``x``, or a copy of it if its last dimension is not contiguous, as kernels need it."""
    return x if validate.has_rows(x) else x.contiguous()


def no_double_backward() -> None:
    raise NotImplementedError("flash_cute: the backward of attention is not differentiable again")


def _reject_gradients(op: Any, why: str, writes_with: str = "") -> Callable[..., Any]:
    """Autograd kernel of an op that has no gradient. What it writes, with the argument
    ``writes_with`` alone if one is named, gets another version, by which autograd knows that a
    tensor saved for backward has changed."""
    arguments = op._schema.arguments
    names = [a.name for a in arguments]
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    def kernel(*args: Any, **named: Any) -> Any:
        tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
        if forward_ad._current_level >= 0:
            _refuse_tangents(tensors)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise RuntimeError(f"{op}: an argument requires grad, and {why}")
        with torch._C._AutoDispatchBelowADInplaceOrView():
            results = op(*args, **named)
        given = dict(zip(names, args, strict=False)) | named if written else {}
        if not writes_with or given.get(writes_with) is not None:
            for x in map(given.get, written):
                if x is not None and not x.is_inference():
                    torch.autograd.graph.increment_version(x)
        return results

    return kernel


_OUT_OVERLOADS = (
    "out overloads are not differentiable; use the functional op or call it under torch.no_grad()"
)
_INFERENCE = "this op is for inference; call it under torch.no_grad()"


# --- CPU implementations -------------------------------------------------------------------------


def _cpu_kernel(op: Any, function: Callable[..., Results]) -> Callable[..., Results]:
    """The CPU kernel of a functional op: checks, as C++ does for CUDA, then computes."""

    def kernel(*args: Any) -> Results:
        validate_ops.arguments(bind(op, args))
        with torch.autocast("cpu", enabled=False):
            return function(*args)

    return kernel


def _into(op: Any, kernel: Callable[..., Results]) -> Callable[..., None]:
    """The CPU kernel of an out overload: computes, then copies into the tensors given."""
    names = [result.name for result in op._schema.returns]

    def out_kernel(*args: Any, **given: Tensor | None) -> None:
        bound = bind(op, args)
        outputs = {name: x for name, x in given.items() if x is not None}
        for name in ("row_max", "softmax"):
            if bound.get(f"return_{name}") and name not in outputs:
                raise ValueError(f"return_{name}: the out overload needs {name}, a buffer for it")
        asked = {f"return_{name}": True for name in ("row_max", "softmax") if name in outputs}
        results = dict(zip(names, kernel(*(bound | asked).values()), strict=True))
        for name in outputs.keys() | {"dsink"} & results.keys():  # dsink goes with sink
            validate_ops.output(name, outputs.get(name), results[name])
        validate_ops.apart(outputs, bound)
        for name, x in outputs.items():
            x.copy_(results[name])

    return out_kernel


def _cpu_kvcache(op: Any, *args: Any) -> Results:
    bound: dict[str, Any] = _DEFAULTS[fwd_kvcache] | bind(op, args)
    validate_kvcache.op_arguments(bound)
    with torch.autocast("cpu", enabled=False):
        return cpu.fwd_kvcache(**bound)


def _cpu_combine(*args: Any) -> Results:
    validate_kvcache.partials(*args)
    return cpu.combine(*args)


def _register() -> torch.library.Library:
    library = torch.library.Library("flash_cute", "IMPL")
    functions: dict[str, Callable[..., Results]] = {
        "fwd": cpu.fwd,
        "bwd": cpu.bwd,
        "varlen_fwd": cpu.varlen_fwd,
        "varlen_bwd": cpu.varlen_bwd,
    }
    for name, function in functions.items():
        op = getattr(_ops, name).default
        kernel = _cpu_kernel(op, function)
        library.impl(name, kernel, "CPU")
        out_overload = getattr(_ops, name).out
        library.impl(f"{name}.out", _into(op, kernel), "CPU")
        for key in ("Autograd", "ADInplaceOrView"):  # the second alone in inference mode
            library.impl(f"{name}.out", _reject_gradients(out_overload, _OUT_OVERLOADS), key)
        torch.library.register_fake(f"flash_cute::{name}.out", lambda *_, **__: None)
    for name, forward, backward in (("fwd", fwd, bwd), ("varlen_fwd", varlen_fwd, varlen_bwd)):
        library.impl(name, _differentiable(forward, _formula(forward, backward)), "Autograd")
    for name, op in (("bwd", bwd), ("varlen_bwd", varlen_bwd)):
        library.impl(name, _differentiable(op, _no_formula(op)), "Autograd")
        torch.library.register_fake(f"flash_cute::{name}", partial(_bwd_fake, op))
    for name, op in (("fwd_kvcache", fwd_kvcache), ("attend_kvcache", attend_kvcache)):
        library.impl(name, partial(_cpu_kvcache, op), "CPU")
        library.impl(name, _reject_gradients(op, _INFERENCE, "k"), "Autograd")
        torch.library.register_fake(f"flash_cute::{name}", _kvcache_fake)
    library.impl("combine", _cpu_combine, "CPU")
    library.impl("combine", _reject_gradients(combine, _INFERENCE), "Autograd")
    torch.library.register_fake("flash_cute::combine", _combine_fake)
    torch.library.register_fake("flash_cute::fwd", _fwd_fake)
    torch.library.register_fake("flash_cute::varlen_fwd", _varlen_fwd_fake)
    flops.register()
    return library


_library = _register()
