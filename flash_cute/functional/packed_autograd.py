"""Autograd of packed qkv and kv: backward writes straight into slices of one packed gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import ops
from flash_cute.native import limits

BACKWARD_OF = {
    ops.fwd: torch.ops.flash_cute.bwd,
    ops.varlen_fwd: torch.ops.flash_cute.varlen_bwd,
}
Gradients = tuple[Tensor, Tensor | None, Tensor | None]  # of packed, q and sink


class PackedAttention(torch.autograd.Function):
    """Attention of ``packed`` = qkv (..., 3, heads, dim), or of ``q`` and ``packed`` = kv (..., 2,
    heads_k, dim).

    Leaving the unpacking to autograd would cost a copy of all three gradients into one tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, q: Tensor | None, sink: Tensor | None, call: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        *unpacked_q, k, v = packed.unbind(-3)
        ctx.op = op = ops.OP_OF[type(call)]
        call = call._replace(q=unpacked_q[0] if q is None else q, k=k, v=v)
        out, softmax_lse, _, probs = ops.call(op, call)
        ops.save_for_backward(ctx, op, (packed, q, sink, out, softmax_lse), call)
        if probs is not None:
            ctx.mark_non_differentiable(probs)
        ctx.set_materialize_grads(False)
        return out, softmax_lse, probs

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
        packed, q, *others = ctx.saved_tensors
        grads: tuple[Any, ...] = gradients_of_packed(ctx, packed, q, others, dout, dlse)
        if torch.is_grad_enabled():
            grads = NoDoubleBackward.apply(packed, q, others[0], dout, dlse, *grads)
        return (*grads, None)


def gradients_of_packed(
    ctx: Any,
    packed: Tensor,
    q: Tensor | None,
    others: Sequence[Any],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> Gradients:
    """``others``: sink, out, softmax_lse, and what :func:`ops.save_for_backward` saved after it."""
    is_plain = internals.are_plain([packed, q, *others, dout, dlse])
    gradients = _filled if is_plain else _stacked
    with torch.no_grad():
        *unpacked_q, k, v = packed.unbind(-3)
        saved = (*(unpacked_q or (q,)), k, v, *others)
        given = ops.backward_call(ctx, ctx.op, saved, dout, dlse)
        with limits.restore_limit(ctx.limit):
            return gradients(BACKWARD_OF[ctx.op], given, packed, q, others[0])


def _filled(
    bwd: Any, given: Any, packed: Tensor, q: Tensor | None, sink: Tensor | None
) -> Gradients:
    """Through the out overload, which fills the slices."""
    dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    dq = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dsink = None if sink is None else torch.empty_like(sink, dtype=torch.float32)
    *unpacked_dq, dk, dv = dpacked.unbind(-3)
    with internals.below_versions():  # nobody has seen what is written
        bwd.out(*given, dq=unpacked_dq[0] if dq is None else dq, dk=dk, dv=dv, dsink=dsink)
    return dpacked, dq, None if sink is None or dsink is None else dsink.to(sink.dtype)


def _stacked(
    bwd: Any, given: Any, packed: Tensor, q: Tensor | None, sink: Tensor | None
) -> Gradients:
    """From gradients of the parts, where memory that was allocated here may not be filled."""
    dq, dk, dv, dsink, _ = bwd.default(*given)
    dsink = None if sink is None else dsink.to(sink.dtype)
    if q is None:
        return torch.stack((dq, dk, dv), -3), None, dsink
    return torch.stack((dk, dv), -3), dq, dsink


class NoDoubleBackward(torch.autograd.Function):
    """Gradients, whose own derivatives by what they were computed from do not exist."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        q: Tensor | None,
        sink: Tensor | None,
        dout: Tensor | None,
        dlse: Tensor | None,
        *grads: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        ops.no_double_backward()
