"""Autograd of q, k and v that are fp8 values times powers of two: backward keeps these, and forward
attends to them by the ops of e4m3 inputs where those compute the call."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_cute import ops
from flash_cute.call.fp8 import power_of_two_scale
from flash_cute.call.sizes import batch_of
from flash_cute.functional.e4m3 import E4M3, OpDescales, attend, why_widened
from flash_cute.functional.packed_autograd import (
    BACKWARD_OF,
    NoDoubleBackward,
    gradients_of_packed,
)
from flash_cute.native import limits
from flash_cute.ops.typed import OPS, VarlenFwdCall


class Fp8Form(NamedTuple):
    """How numbers are kept: the fp8 dtype, and the dims along which each index has its scale."""

    dtype: torch.dtype
    separate: tuple[int, ...]  # negative

    def shared(self, x: Tensor) -> tuple[int, ...]:
        """The dims of x that share a scale."""
        return tuple(dim for dim in range(-x.dim(), 0) if dim not in self.separate)

    def is_computed(self, x: Tensor) -> bool:
        """Whether the ops of e4m3 inputs compute attention of x, if options do not forbid it."""
        is_sixteen_bits = x.dtype in (torch.float16, torch.bfloat16)
        return self.dtype == E4M3 and is_sixteen_bits and ops.has_fp8_attention(x.device)

    def keep(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x in fp8, and its scales. Exact but for inf in e4m3, which has NaN in its place."""
        if self.is_computed(x):
            heads = self._with_scaled_heads(x).flatten(0, -3)[None]
            scales = [x.shape[dim] if dim in self.separate else 1 for dim in range(-x.dim(), 0)]
            values, scale, _ = OPS.quantize_e4m3(heads, None, "head", math.prod(scales), True)
            return values.view(x.shape), scale.view(scales)
        scale = power_of_two_scale(x, self.shared(x), torch.finfo(self.dtype).max)
        return (x.to(scale.dtype) / scale).to(self.dtype), scale

    def widen(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers that values stand for, which ``dtype`` holds."""
        if self.dtype == E4M3 and dtype in (torch.float16, torch.bfloat16):
            heads = self._with_scaled_heads(values)
            return OPS.dequantize_e4m3(heads, scale.flatten(), dtype).view(values.shape)
        return (values.to(scale.dtype) * scale).to(dtype)

    def _with_scaled_heads(self, x: Tensor) -> Tensor:
        """x with q, k and v as heads if each has a scale: then scales are those of heads."""
        return x.flatten(-3, -2) if -3 in self.separate else x


class KeptAttention(torch.autograd.Function):
    """Attention of a call whose q, k and v are ``wide``, or views of it, (..., 3, heads, dim)."""

    @staticmethod
    def forward(ctx: Any, call: Any, form: Fp8Form, *wide: Tensor) -> Tensor:
        ctx.op = op = ops.OP_OF[type(call)]
        ctx.form, ctx.dtypes = form, [x.dtype for x in wide]
        kept = [y for x in wide for y in form.keep(x)]
        out, softmax_lse = _forward(call, form, kept)
        ops.save_for_backward(ctx, op, (*kept, None, out, softmax_lse), call)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        saved, parts = ctx.saved_tensors, 2 * len(ctx.dtypes)
        kept, others = saved[:parts], saved[parts:]
        wide = [
            ctx.form.widen(x, scale, dtype)
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


class TracedAttention(torch.autograd.Function):
    """:class:`KeptAttention` of separate q, k and v for graphs, which trace into it: of calls that
    the ops of e4m3 inputs compute."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, form: Fp8Form, call: Any) -> Tensor:
        with torch.no_grad():  # torch.export traces into this as if it were no Function
            kept = [*form.keep(q), *form.keep(k), *form.keep(v)]
            out, softmax_lse = _forward(call._replace(q=q, k=k, v=v), form, kept)
        sequences = _sequences(call)
        ctx.save_for_backward(*kept, out, softmax_lse, *sequences[:2], *sequences[4:6])
        ctx.form, ctx.longest, ctx.dtype = form, sequences[2:4], q.dtype
        right = 0 if call.is_causal else call.window_size_right
        ctx.score = call.softmax_scale, False, call.window_size_left, right
        ctx.deterministic = call.deterministic
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        *kept, out, softmax_lse, cu_q, cu_k, used_q, used_k = ctx.saved_tensors
        q, k, v = (
            ctx.form.widen(x, scale, ctx.dtype)
            for x, scale in zip(kept[::2], kept[1::2], strict=True)
        )
        score = (*ctx.score, 0.0, None, None, 0.0, None)
        given = (dout.contiguous(), q, k, v, out, softmax_lse)
        deterministic = ops.switches.deterministic(ctx.deterministic)
        if cu_q is None:
            grads = ops.bwd(*given, None, *score, deterministic)[:3]
        else:
            sequences = (cu_q, cu_k, *ctx.longest, used_q, used_k, False)
            grads = ops.varlen_bwd(*given, *sequences, None, *score, deterministic)[:3]
        return (*grads, None, None)


def _sequences(call: Any) -> tuple[Any, ...]:
    """cu_seqlens, max_seqlen and seqused of q and k; None for those of a dense call."""
    return tuple(call[3:9]) if isinstance(call, VarlenFwdCall) else (None,) * 6


def _forward(call: Any, form: Fp8Form, kept: list[Tensor]) -> tuple[Tensor, Tensor]:
    """out and softmax_lse. In 16 bits of the kept values, if the ops of e4m3 inputs compute that:
    backward's copies of them are exact, and its weights those before they are rounded."""
    if len(kept) == 2:  # qkv
        values, scales = (x.unbind(-3) for x in kept)
    else:
        values, scales = tuple(kept[::2]), tuple(kept[1::2])
    q, k, v = values
    rounded = call._replace(q=q, k=k, v=v)
    if form.is_computed(call.q) and not why_widened(rounded):
        return attend(rounded, _descales(rounded, scales), call.q.dtype)
    out, softmax_lse, _, _ = ops.call(ops.OP_OF[type(call)], call)
    return out, softmax_lse


def _descales(call: Any, scales: tuple[Tensor, ...]) -> OpDescales:
    """Scales of one element, or of each head, as descales of a call of the ops."""
    batch, heads_k = batch_of(call), call.k.shape[-2]
    found: list[Tensor] = []
    for scale in scales:
        scale = scale.float().reshape(1, -1)
        if scale.shape[1] in (1, heads_k):
            found.append(scale.expand(batch, heads_k))
        else:  # of query heads that share a kv head
            lead = call.q.shape[:-1]
            rows = scale.expand(lead) if len(lead) == 3 else scale.expand(lead)[None]
            found.append(rows.contiguous())
    return found[0], found[1], found[2]


class Kept(NamedTuple):
    """What a call's q, k and v are views of, and how backward keeps that."""

    tensors: tuple[Tensor, ...]  # q, k and v, or qkv alone
    form: Fp8Form

    def attend(self, call: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            return KeptAttention.apply(call, self.form, *self.tensors)
        options = call._replace(q=None, k=None, v=None)
        form = self.form
        if len(self.tensors) == 1:  # qkv, whose parts have scales of their own
            form = form._replace(separate=tuple(dim for dim in form.separate if dim != -3))
        return TracedAttention.apply(call.q, call.k, call.v, form, options)

    def is_traced(self, call: Any) -> bool:
        """Whether graphs keep q, k and v of the call in this form, too."""
        rounded = (x.to(E4M3) for x in (call.q, call.k, call.v))
        names = zip("qkv", rounded, strict=True)
        return self.form.is_computed(call.q) and not why_widened(call._replace(**dict(names)))
