"""Autograd's kernels of the ops: ``fwd`` and ``varlen_fwd`` have a gradient, the others refuse.

``deterministic`` of ``bwd`` and ``varlen_bwd`` is that argument alone: torch's global switch is
autograd's to take in, when backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import limits, validate, validate_ops, validate_options
from flash_cute.ops import schema, switches
from flash_cute.ops.schema import DEFAULTS, Results

_OUT_OVERLOAD = (
    "out overloads are not differentiable; use the functional op or call it under torch.no_grad()"
)
_INFERENCE = "this op is for inference; call it under torch.no_grad()"
_BACKWARD_OF = {schema.fwd: schema.bwd, schema.varlen_fwd: schema.varlen_bwd}
_OF_BACKWARD = ("dout", "out", "softmax_lse", "dlse", "deterministic")  # what its forward has not


def _sources(op: Any) -> tuple[int, ...]:
    """For each argument of a backward op its place among the forward op's, or ``~place`` among
    ``_OF_BACKWARD``."""
    names = list(DEFAULTS[op])
    return tuple(
        ~_OF_BACKWARD.index(name) if name in _OF_BACKWARD else names.index(name)
        for name in DEFAULTS[_BACKWARD_OF[op]]
    )


_SOURCES = {op: _sources(op) for op in _BACKWARD_OF}
_DETERMINISTIC = {op: list(DEFAULTS[op]).index("deterministic") for op in _BACKWARD_OF}
_SINK = {op: list(DEFAULTS[op]).index("sink") for op in _BACKWARD_OF}


def register(library: torch.library.Library) -> None:
    for name, op in (("fwd", schema.fwd), ("varlen_fwd", schema.varlen_fwd)):
        library.impl(name, _differentiable(op, FORMULAS[op]), "Autograd")
    for name, op in (("bwd", schema.bwd), ("varlen_bwd", schema.varlen_bwd)):
        library.impl(name, _differentiable(op, _no_formula(op)), "Autograd")
    for op in schema.OUT_OVERLOADS:
        for key in ("Autograd", "ADInplaceOrView"):  # the second alone in inference mode
            library.impl(op, _reject_gradients(op, _OUT_OVERLOAD), key)
    for op, writes_with in (
        (schema.fwd_kvcache, "k"),
        (schema.attend_kvcache, ""),
        (schema.combine, ""),
    ):
        library.impl(op, _reject_gradients(op, _INFERENCE, writes_with), "Autograd")


def _differentiable(op: Any, formula: type[torch.autograd.Function]) -> Callable[..., Results]:
    """Autograd's kernel of an op.

    torch.library.register_autograd would do the same, but not inside of torch.func's transforms,
    and take 100 us a call to read the schema.
    """
    defaults = tuple(DEFAULTS[op].values())
    slopes = list(DEFAULTS[op]).index("alibi_slopes")

    def kernel(*args: Any) -> Results:
        if internals.in_forward_mode():
            _refuse_tangents(args)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            if len(args) > slopes and args[slopes] is not None:
                validate_options.no_gradient_of_slopes(args[slopes])
            return internals.apply_formula(formula, (*args, *defaults[len(args) :]))
        return _below_autograd(op, args)

    return kernel


def _below_autograd(op: Any, args: Sequence[Any]) -> Any:
    with internals.below_autograd():
        return op(*args)


def _forward(op: Any, args: Sequence[Any]) -> Results:
    """What a formula's forward returns; levels of torch.func below have gradients of their own."""
    if not internals.in_transform():
        return _below_autograd(op, args)
    with internals.with_derivatives():
        return _below_autograd(op, args)


def _formula(op: Any) -> type[torch.autograd.Function]:
    """Of a forward op, whose gradient is one call of its backward op."""
    names, sink = list(DEFAULTS[op]), _SINK[op]
    table = names.index("block_table") if "block_table" in names else None
    of_q_k_v = (None,) * (len(names) - 3)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Results:
            if table is not None and args[table] is not None:
                validate_ops.no_gradient_of_pages(dict(zip(names, args, strict=True)))
            results = out, softmax_lse, row_max, softmax = _forward(op, args)
            if row_max is not None or softmax is not None:
                ctx.mark_non_differentiable(*[x for x in (row_max, softmax) if x is not None])
            ctx.set_materialize_grads(False)
            save_for_backward(ctx, (out, softmax_lse), args)
            return results

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Results:
            (out, softmax_lse), args = saved(ctx)
            given = backward_arguments(op, args, out, softmax_lse, dout, dlse)
            with limits.again(ctx.limit):
                dq, dk, dv, dsink, _ = call(_BACKWARD_OF[op], given)
            if args[sink] is None:
                return (dq, dk, dv, *of_q_k_v)
            gradients = [dq, dk, dv, *of_q_k_v]
            gradients[sink] = dsink.to(args[sink].dtype)
            return tuple(gradients)

    return Attention


FORMULAS = {op: _formula(op) for op in _BACKWARD_OF}


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


def differentiable(op: Any, args: Sequence[Any], allow_tf32: bool) -> Results:
    """A forward op with its gradient, without the dispatcher's way to it: for plain tensors, with
    nothing around the call. Arguments between ``args`` and ``allow_tf32`` are defaults."""
    defaults = tuple(DEFAULTS[op].values())
    return FORMULAS[op].apply(*args, *defaults[len(args) : -1], allow_tf32)


def save_for_backward(ctx: Any, first: Sequence[Tensor | None], args: Sequence[Any]) -> None:
    """Keeps some tensors, and a call's arguments, for :func:`saved`; and the kernels that it may
    take, in ``ctx.limit``."""
    places, tensors, others = [], list(first), list(args)
    for i, x in enumerate(args):
        if isinstance(x, Tensor):
            places.append(i)
            tensors.append(x)
            others[i] = None
    ctx.save_for_backward(*tensors)
    ctx.first, ctx.places, ctx.others = len(first), places, others
    ctx.limit = limits.current()


def saved(ctx: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """The first tensors and the arguments. Once a backward: a checkpoint unpacks them one time."""
    tensors = ctx.saved_tensors
    args = list(ctx.others)
    for i, x in zip(ctx.places, tensors[ctx.first :], strict=True):
        args[i] = x
    return tensors[: ctx.first], args


def call(op: Any, args: Sequence[Any]) -> Any:
    """The op; straight below autograd where nobody can ask for derivatives of its results."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or internals.transformed():
        return op(*args)
    return _below_autograd(op, args)


def _refuse_tangents(args: Sequence[Any]) -> None:
    tensors = (x for x in args if isinstance(x, Tensor))
    if any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "flash_cute: attention has no derivative in forward mode; use backward"
        )


def backward_arguments(
    op: Any,
    args: Sequence[Any],
    out: Tensor,
    softmax_lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> list[Any]:
    """What the backward op of ``op`` takes, in order; ``args`` are all of the forward's."""
    of_backward = (
        torch.zeros_like(out) if dout is None else _contiguous_rows(dout),
        out,
        softmax_lse,
        None if dlse is None else dlse.contiguous(),
        switches.deterministic(args[_DETERMINISTIC[op]]),
    )
    return [args[i] if i >= 0 else of_backward[~i] for i in _SOURCES[op]]


def _contiguous_rows(x: Tensor) -> Tensor:
    """``x``, or a copy of it if its last dimension is not contiguous, as kernels need it."""
    return x if validate.has_rows(x) else x.contiguous()


def no_double_backward() -> None:
    raise NotImplementedError("flash_cute: the backward of attention is not differentiable again")


def _reject_gradients(op: Any, why: str, writes_with: str = "") -> Callable[..., Any]:
    """Autograd's kernel of an op that has no gradient. What it writes, with the argument
    ``writes_with`` alone if one is named, gets another version, by which autograd knows that a
    tensor saved for backward has changed."""
    names, written = list(DEFAULTS[op]), schema.written(op)

    def kernel(*args: Any, **named: Any) -> Any:
        tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
        if internals.in_forward_mode():
            _refuse_tangents(tensors)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise RuntimeError(f"{op}: an argument requires grad, and {why}")
        with internals.below_versions():
            results = op(*args, **named)
        given = dict(zip(names, args, strict=False)) | named if written else {}
        if not writes_with or given.get(writes_with) is not None:
            for x in map(given.get, written):
                if x is not None and not x.is_inference():
                    torch.autograd.graph.increment_version(x)
        return results

    return kernel
