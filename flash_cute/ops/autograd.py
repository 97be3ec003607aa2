"""Autograd's kernels of the ops: ``fwd`` and ``varlen_fwd`` have a gradient, the others refuse.

``deterministic`` of ``bwd`` and ``varlen_bwd`` is that argument alone: torch's global switch is
autograd's to take in, when backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call import validate
from flash_cute.call.sizes import longest_keys
from flash_cute.call.validate import ops as validate_ops
from flash_cute.call.validate import options as validate_options
from flash_cute.native import limits
from flash_cute.ops import schema, switches
from flash_cute.ops.schema import CALLS, Results
from flash_cute.sparse.lists import tiles_of

_OUT_OVERLOAD = (
    "out overloads are not differentiable; use the functional op or call it under torch.no_grad()"
)
_INFERENCE = "this op is for inference; call it under torch.no_grad()"
_BACKWARD_OF = {schema.fwd: schema.bwd, schema.varlen_fwd: schema.varlen_bwd}
# Arguments behind v that may be tensors, and have no gradient.
_TENSORS = {
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table", "alibi_slopes", "rng",
    "tile_lists", "tile_bits",
}  # fmt: skip
# Inputs that have a gradient, "d" and their name among the backward op's results.
DIFFERENTIABLE = ("q", "k", "v", "sink")


class _Layout(NamedTuple):
    """Where a backward op's arguments come from. Functions pick some of the forward op's."""

    inputs: Callable[[Sequence[Any]], tuple[Any, ...]]  # DIFFERENTIABLE
    gradients: tuple[int, ...]  # theirs among the backward op's results
    tensors: Callable[[Sequence[Any]], tuple[Any, ...]]  # _TENSORS
    others: Callable[[Sequence[Any]], tuple[Any, ...]]  # the rest
    deterministic: int  # its place among others
    # The backward op's in (dout, dlse, deterministic, *saved, *others, None), where saved are
    # inputs, out, softmax_lse and tensors: places, which a compiled autograd can trace.
    given: tuple[int, ...]


def _layout(op: Any) -> _Layout:
    names = CALLS[op]._fields
    inputs = [name for name in names if name in DIFFERENTIABLE]
    tensors = [name for name in names if name in _TENSORS]
    others = [name for name in names if name not in (*inputs, *tensors)]
    saved = (*inputs, "out", "softmax_lse", *tensors)
    found = ["dout", "dlse", "deterministic", *saved, *others, "tile_ranks"]
    pick = [itemgetter(*map(names.index, wanted)) for wanted in (inputs, tensors, others)]
    backward = _BACKWARD_OF[op]
    results = internals.results(backward)
    gradients = tuple(results.index(f"d{name}") for name in inputs)
    given = tuple(map(found.index, CALLS[backward]._fields))
    return _Layout(pick[0], gradients, pick[1], pick[2], others.index("deterministic"), given)


_LAYOUTS = {op: _layout(op) for op in _BACKWARD_OF}


def register(library: torch.library.Library) -> None:
    for name, op in (("fwd", schema.fwd), ("varlen_fwd", schema.varlen_fwd)):
        library.impl(name, _differentiable(op, FORMULAS[op], inputs_of(op)), "Autograd")
    for name, op in (("bwd", schema.bwd), ("varlen_bwd", schema.varlen_bwd)):
        library.impl(name, _differentiable(op, refusal(op), tuple), "Autograd")
    for op in schema.OUT_OF.values():
        for key in ("Autograd", "ADInplaceOrView"):  # the second alone in inference mode
            library.impl(op, _reject_gradients(op, _OUT_OVERLOAD), key)
    for op, writes_with in (
        (schema.fwd_kvcache, "k"),
        (schema.attend_kvcache, ""),
        (schema.fp8_fwd, ""),
        (schema.fp8_varlen_fwd, ""),
        (schema.attend_quantized_kvcache, ""),
        (schema.combine, ""),
    ):
        library.impl(op, _reject_gradients(op, _INFERENCE, writes_with), "Autograd")


def _differentiable(
    op: Any, formula: type[internals.Formula], inputs: Callable[[Sequence[Any]], tuple[Any, ...]]
) -> Callable[..., Results]:
    """Autograd's kernel of an op; its formula takes the ``inputs`` of all of the op's arguments.

    torch.library.register_autograd would do the same, but not inside of torch.func's transforms,
    and take 100 us a call to read the schema.
    """
    call_of = CALLS[op]

    def completed(args: Sequence[Any]) -> tuple[Any, ...]:
        call = call_of(*args)
        if call.alibi_slopes is not None:
            validate_options.no_gradient_of_slopes(call.alibi_slopes)
        return inputs(call)

    return differentiable_kernel(op, formula, completed)


def differentiable_kernel(
    op: Any,
    formula: type[internals.Formula],
    inputs: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple,
) -> Callable[..., Results]:
    """Autograd's kernel of an op: the formula of ``inputs`` of the arguments that are given, if any
    of these requires grad."""

    def kernel(*args: Any) -> Results:
        if internals.in_forward_mode():
            refuse_tangents(args)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return internals.apply_formula(formula, inputs(args))
        return _below_autograd(op, args)

    return kernel


def _below_autograd(op: Any, args: Sequence[Any]) -> Any:
    with internals.below_autograd():
        return op(*args)


def forward_of(op: Any, args: Sequence[Any]) -> Results:
    """The op's results, for a formula's forward. Lower levels of torch.func record their
    gradients."""
    if not internals.in_transform():
        return _below_autograd(op, args)
    with internals.with_derivatives():
        return _below_autograd(op, args)


def inputs_of(op: Any) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A formula's inputs: the tensors with gradients, and the call as one object, since autograd
    takes time for each input."""
    own = _LAYOUTS[op].inputs
    return lambda call: (*own(call), call)


def formula_of(
    op: Any, compute: Callable[[Any], Results], differentiate: Callable[[Any], Results]
) -> type[internals.Formula]:
    """The formula of a forward op, of what computes its calls, and those of its backward op."""
    may_have_pages = "block_table" in CALLS[op]._fields

    class Attention(internals.Formula):
        @staticmethod
        def forward(ctx: Any, *inputs_and_call: Any) -> Results:
            inputs, attention = inputs_and_call[:-1], inputs_and_call[-1]
            if may_have_pages and attention.block_table is not None:
                validate_ops.no_gradient_of_pages(attention)
            results = out, softmax_lse, row_max, softmax = compute(attention)
            if row_max is not None or softmax is not None:
                ctx.mark_non_differentiable(*[x for x in (row_max, softmax) if x is not None])
            ctx.set_materialize_grads(False)
            save_for_backward(ctx, op, (*inputs, out, softmax_lse), attention)
            return results

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Results:
            saved = ctx.saved_tensors  # once: a checkpoint unpacks them one time
            given = backward_call(ctx, op, saved, dout, dlse)
            with limits.restore_limit(ctx.limit):
                results = differentiate(given)
            gradients = [results[i] for i in _LAYOUTS[op].gradients]
            return (*map(_in_dtype_of, saved[: len(gradients)], gradients), None)

    return Attention


def _in_dtype_of(x: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The gradient in the dtype of ``x``, which autograd requires; None if there is no ``x``."""
    if x is None or gradient is None or gradient.dtype == x.dtype:
        return gradient
    return gradient.to(x.dtype)


def refusal(op: Any) -> type[internals.Formula]:
    """The formula of a backward op, which has no gradient."""

    class Gradients(internals.Formula):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Results:
            return forward_of(op, args)

        @staticmethod
        def backward(ctx: Any, *_: Any) -> None:
            no_double_backward()

    return Gradients


def differentiable(op: Any, args: Sequence[Any], allow_tf32: bool) -> Results:
    """A forward op with its gradient, past the dispatcher: for plain tensors, outside of modes and
    transforms."""
    attention = CALLS[op](*args)
    if allow_tf32:
        attention = attention._replace(allow_tf32=True)
    return FORMULAS[op].apply(*_LAYOUTS[op].inputs(attention), attention)


def save_for_backward(
    ctx: Any, op: Any, first: Sequence[Tensor | None], args: Sequence[Any]
) -> None:
    """Saves the tensors ``first``, then those arguments of a forward op that
    :func:`backward_call` needs, and in ``ctx.limit`` the kernels that backward may run."""
    layout = _LAYOUTS[op]
    ctx.save_for_backward(*first, *layout.tensors(args))
    ctx.others, ctx.limit = layout.others(args), limits.current()


def call(op: Any, args: Sequence[Any]) -> Any:
    """Calls the op, below autograd if its results cannot require grad."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or internals.transformed():
        return op(*args)
    return _below_autograd(op, args)


FORMULAS = {
    op: formula_of(op, partial(forward_of, op), partial(call, backward))
    for op, backward in _BACKWARD_OF.items()
}


def refuse_tangents(args: Sequence[Any]) -> None:
    """Refuses forward-mode derivatives: tensors that carry tangents."""
    tensors = (x for x in args if isinstance(x, Tensor))
    if any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "flash_cute: attention has no derivative in forward mode; use backward"
        )


def backward_call(
    ctx: Any, op: Any, saved: Sequence[Any], dout: Tensor | None, dlse: Tensor | None
) -> Any:
    """The call of the backward op of ``op``. ``saved``: inputs with gradients, out and softmax_lse,
    and tensors that :func:`save_for_backward` saved after those."""
    layout = _LAYOUTS[op]
    deterministic = switches.deterministic(ctx.others[layout.deterministic])
    out = saved[len(layout.gradients)]
    dout = torch.zeros_like(out) if dout is None else _contiguous_rows(dout)
    dlse = None if dlse is None else dlse.contiguous()
    found = (dout, dlse, deterministic, *saved, *ctx.others, None)
    given = [found[i] for i in layout.given]
    return _with_lists_of_keys(CALLS[_BACKWARD_OF[op]](*given))


def _with_lists_of_keys(call: Any) -> Any:
    """A call of backward, whose lists are transposed: forward has a list for each tile of queries,
    backward one for each tile of keys."""
    if call.tile_lists is not None:
        lists, ranks = torch.ops.flash_cute.transposed_tile_lists(
            call.tile_lists, tiles_of(longest_keys(call))
        )
        dout = call.dout.contiguous()  # no kernel over lists reads other strides
        call = call._replace(dout=dout, tile_lists=lists, tile_ranks=ranks)
    return call


def _contiguous_rows(x: Tensor) -> Tensor:
    """``x``, or a copy of it if its last dimension is not contiguous, as kernels need it."""
    return x if validate.has_rows(x) else x.contiguous()


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the backward of an autograd.Function as not differentiable: ``create_graph=True`` is an
    error. torch's own decorator raises none if the incoming gradients do not require grad."""

    @wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "flash_cute: this backward is once_differentiable, and create_graph=True asks for "
                "the gradient of a gradient"
            )
        return backward(ctx, *grads)

    return once


def no_double_backward() -> None:
    raise NotImplementedError("flash_cute: the backward of attention is not differentiable again")


def _reject_gradients(op: Any, why: str, writes_with: str = "") -> Callable[..., Any]:
    """Autograd's kernel of an op without a gradient. It increments the version of tensors that the
    op writes (if ``writes_with`` is named, only with that argument): autograd then notices
    changes of tensors that were saved for backward."""
    names, written = CALLS[op]._fields, schema.written_arguments(op)

    def kernel(*args: Any, **named: Any) -> Any:
        tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
        if internals.in_forward_mode():
            refuse_tangents(tensors)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            told = dict(zip(names, args, strict=False)) | named
            leaves = [n for n, x in told.items() if isinstance(x, Tensor) and x.requires_grad]
            each = "s" if len(leaves) == 1 else ""
            raise RuntimeError(f"{op}: {', '.join(leaves)} require{each} grad, and {why}")
        with internals.below_versions():
            results = op(*args, **named)
        given = dict(zip(names, args, strict=False)) | named if written else {}
        if not writes_with or given.get(writes_with) is not None:
            for x in map(given.get, written):
                if x is not None and not x.is_inference():
                    torch.autograd.graph.increment_version(x)
        return results

    return kernel
