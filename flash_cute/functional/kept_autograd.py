"""Autograd of q, k and v that are fp8 values times powers of two: backward keeps these."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_cute import ops
from flash_cute.call.fp8 import power_of_two_scale
from flash_cute.functional.packed_autograd import (
    BACKWARD_OF,
    NoDoubleBackward,
    gradients_of_packed,
)
from flash_cute.native import limits


class Fp8Form(NamedTuple):
    """How numbers are kept: the fp8 dtype, and the dims along which each index has its scale."""

    dtype: torch.dtype
    separate: tuple[int, ...]  # negative

    def shared(self, x: Tensor) -> tuple[int, ...]:
        """The dims of x that share a scale."""
        return tuple(dim for dim in range(-x.dim(), 0) if dim not in self.separate)

    def keep(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x in fp8, and its scales. Exact but for inf in e4m3, which has NaN in its place."""
        scale = power_of_two_scale(x, self.shared(x), torch.finfo(self.dtype).max)
        return (x.to(scale.dtype) / scale).to(self.dtype), scale


class KeptAttention(torch.autograd.Function):
    """Attention of a call whose q, k and v are ``wide``, or views of it, (..., 3, heads, dim)."""

    @staticmethod
    def forward(ctx: Any, call: Any, form: Fp8Form, *wide: Tensor) -> Tensor:
        ctx.op = op = ops.OP_OF[type(call)]
        ctx.dtypes = [x.dtype for x in wide]
        out, softmax_lse, _, _ = ops.call(op, call)
        kept = [y for x in wide for y in form.keep(x)]
        ops.save_for_backward(ctx, op, (*kept, None, out, softmax_lse), call)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        saved, parts = ctx.saved_tensors, 2 * len(ctx.dtypes)
        kept, others = saved[:parts], saved[parts:]
        wide = [
            (x.to(scale.dtype) * scale).to(dtype)
            for x, scale, dtype in zip(kept[::2], kept[1::2], ctx.dtypes, strict=True)
        ]
        if len(wide) == 1:
            grads = gradients_of_packed(ctx, wide[0], None, others, dout, None)[:1]
        else:
            with torch.no_grad(), limits.restore_limit(ctx.limit):
                given = ops.backward_call(ctx, ctx.op, (*wide, *others), dout, None)
                grads = BACKWARD_OF[ctx.op](*given)[:3]
        if torch.is_grad_enabled():
            out = others[1]  # requires grad
            grads = NoDoubleBackward.apply(out, None, None, dout, None, *grads)
        return (None, None, *grads)


class Kept(NamedTuple):
    """What a call's q, k and v are views of, and how backward keeps that."""

    tensors: tuple[Tensor, ...]  # q, k and v, or qkv alone
    form: Fp8Form

    def attend(self, call: Any) -> Tensor:
        return KeptAttention.apply(call, self.form, *self.tensors)
