"""Autograd of packed qkv and kv: backward writes straight into slices of one packed gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import ops

_OUT_OVERLOAD_OF_BACKWARD = {
    ops.fwd: torch.ops.flash_cute.bwd.out,
    ops.varlen_fwd: torch.ops.flash_cute.varlen_bwd.out,
}


class PackedAttention(torch.autograd.Function):
    """Attention of ``packed`` = qkv (..., 3, heads, dim), or of ``q`` and ``packed`` = kv (..., 2,
    heads_k, dim).

    Leaving the unpacking to autograd would cost a copy of all three gradients into one tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, q: Tensor | None, sink: Tensor | None, op: Any, args: tuple
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        *unpacked_q, k, v = packed.unbind(-3)
        out, softmax_lse, _, probs = op(*(unpacked_q or (q,)), k, v, *args)
        ctx.op = op
        ctx.options = [None if isinstance(x, Tensor) else x for x in args]
        ctx.places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        ctx.save_for_backward(packed, q, sink, out, softmax_lse, *(args[i] for i in ctx.places))
        if probs is not None:
            ctx.mark_non_differentiable(probs)
        ctx.set_materialize_grads(False)
        return out, softmax_lse, probs

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them a single time
        with torch.no_grad():
            grads = PackedAttention._gradients(ctx, saved, dout, dlse)
        if torch.is_grad_enabled():
            packed, q, sink, *_ = saved
            grads = _NotAgain.apply(packed, q, sink, dout, dlse, *grads)
        return (*grads, None, None)

    @staticmethod
    def _gradients(
        ctx: Any, saved: tuple[Any, ...], dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Any, ...]:
        packed, q, sink, out, softmax_lse, *given = saved
        args = list(ctx.options)
        for i, x in zip(ctx.places, given, strict=True):
            args[i] = x
        *unpacked_q, k, v = packed.unbind(-3)
        bound = ops.bind(ctx.op, (*(unpacked_q or (q,)), k, v, *args))
        if _mapped(dout) or _mapped(dlse):  # out overloads cannot be
            bwd = ops.bwd if ctx.op is ops.fwd else ops.varlen_bwd
            dq, dk, dv, dsink, _ = bwd(
                *ops.backward_arguments(bwd, bound, out, softmax_lse, dout, dlse)
            )
            dsink = None if sink is None else dsink.to(sink.dtype)
            if q is None:
                return torch.stack((dq, dk, dv), -3), None, dsink
            return torch.stack((dk, dv), -3), dq, dsink
        bwd_out = _OUT_OVERLOAD_OF_BACKWARD[ctx.op]
        dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
        dq = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dsink = None if sink is None else torch.empty_like(sink, dtype=torch.float32)
        *unpacked_dq, dk, dv = dpacked.unbind(-3)
        bwd_out(
            *ops.backward_arguments(bwd_out, bound, out, softmax_lse, dout, dlse),
            dq=unpacked_dq[0] if dq is None else dq,
            dk=dk,
            dv=dv,
            dsink=dsink,
        )
        return dpacked, dq, None if dsink is None else dsink.to(sink.dtype)


class _NotAgain(torch.autograd.Function):
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


def _mapped(x: Tensor | None) -> bool:
    """Whether autograd asks for several gradients at once (``is_grads_batched``)."""
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)
