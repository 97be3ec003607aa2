"""The fused steps with their gradients, and what each saves for backward.

Double backward is refused.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.attention.fusion import kernels_torch
from flash_cute.ops.autograd import once_differentiable


@cache
def _triton_kernels() -> ModuleType | None:
    try:
        from flash_cute.attention.fusion import kernels_triton
    except ImportError:
        return None
    return kernels_triton


def kernels_for(x: Tensor) -> ModuleType | None:
    """The module with the kernels of the fused steps; None if torch's ops should run instead:
    inside of torch.compile, which fuses them itself, and of torch.func, for fake tensors, and on
    CUDA without Triton."""
    if torch.compiler.is_compiling() or internals.in_transform() or internals.is_fake(x):
        return None
    if x.device.type == "cpu":
        return kernels_torch
    small = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return _triton_kernels() if x.is_cuda and small else None


@cache
def linear_kernels() -> Any:
    """The module with ``linear_add_norm``, if :func:`kernels_for` returned Triton's kernels."""
    from flash_cute.attention.fusion import kernels_triton_linear

    return kernels_triton_linear


def in_memory_order(x: Tensor) -> Tensor:
    """x (outer, inner, width), the outer two dimensions transposed if memory has that order."""
    return x.transpose(0, 1) if x.stride(0) < x.stride(1) else x


class Activate(torch.autograd.Function):
    """residual + dropout(activation(x)). Saved: x, unless there is no activation; the seed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, name: str, p: float, seed: Any):
        ctx.kernels, ctx.name, ctx.p = kernels_for(x), name, p
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.save_for_backward(x.new_empty(0) if name == "identity" else x, seed)
        return ctx.kernels.activate(x, residual, name, p, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, seed) = grads, ctx.saved_tensors
        dx = ctx.kernels.activate_backward(grad, x, ctx.name, ctx.p, seed)
        residual = None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype)
        return dx, residual, None, None, None


class Gate(torch.autograd.Function):
    """activation(first half of x) * second half. Saved: x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.kernels, ctx.name = kernels_for(x), name
        ctx.save_for_backward(x)
        return ctx.kernels.gate(x, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.kernels.gate_backward(grads[0], x, ctx.name), None


class AddNorm(torch.autograd.Function):
    """(sum, norm(sum)) of sum = x + dropout(y); the sum is None unless ``keep_sum``. Saved: x and
    y, or the sum; mean and rstd of each row; the seed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: tuple[float, bool, float, bool],
        seed: Tensor | None,
    ) -> Any:
        eps, ctx.rms, ctx.p, keep_sum = options
        ctx.set_materialize_grads(False)
        ctx.kernels, ctx.dtypes = kernels_for(x), (x.dtype, y.dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        dtype = torch.promote_types(x.dtype, y.dtype)
        if torch.is_autocast_enabled(x.device.type):  # norms then return their weight's dtype
            dtype = torch.promote_types(dtype, weight.dtype)
        total, out, mean, rstd = ctx.kernels.add_norm(
            x, y, weight, bias, eps, ctx.rms, ctx.p, seed, keep_sum, dtype
        )
        ctx.y_layout = (y.shape, y.stride())
        ctx.save_for_backward(
            total if keep_sum else x, None if keep_sum else y, weight, mean, rstd, seed
        )
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        d_sum, d_out = grads
        x, y, weight, mean, rstd, seed = ctx.saved_tensors
        if d_out is None:
            d_out = torch.zeros_like(x)
        shape, strides = ctx.y_layout
        y_like = torch.empty_strided(shape, strides, dtype=ctx.dtypes[1], device="meta")
        dx, dy, dw, db = ctx.kernels.add_norm_backward(
            d_out, d_sum, x, y, weight, mean, rstd, ctx.rms, ctx.p, seed, y_like
        )
        db = None if ctx.bias_dtype is None else db.to(ctx.bias_dtype)
        return dx.to(ctx.dtypes[0]), dy, dw.to(weight.dtype), db, None, None


class LinearAddNorm(torch.autograd.Function):
    """:class:`AddNorm` of x and linear(a), x (outer, inner, width), a (outer, inner, depth), by one
    kernel. Saved: the sum, a and the weights; mean and rstd of each row; the seed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        w: Tensor,
        b: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        options: tuple[float, bool, float, bool, bool],
        seed: Tensor | None,
    ) -> Any:
        eps, ctx.rms, ctx.p, keep_sum, with_grad = options
        ctx.set_materialize_grads(False)
        ctx.kernels = kernels_for(x)
        dtype = torch.promote_types(x.dtype, a.dtype)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.promote_types(dtype, weight.dtype)
        total, out, mean, rstd = linear_kernels().linear_add_norm(
            x, a, w, b, weight, bias, eps, ctx.rms, ctx.p, seed, keep_sum or with_grad, dtype
        )
        ctx.dtypes = (x.dtype, None if b is None else b.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(total, a, w, weight, mean, rstd, seed)
        return total if keep_sum else None, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        d_sum, d_out = grads
        total, a, w, weight, mean, rstd, seed = ctx.saved_tensors
        d_out = torch.zeros_like(total) if d_out is None else d_out
        x_dtype, b_dtype, bias_dtype = ctx.dtypes
        # The gradient of the product has a's memory order: both are matrices without a copy.
        rows = in_memory_order(a)
        y_like = torch.empty(*rows.shape[:-1], w.shape[0], dtype=a.dtype, device="meta")
        y_like = y_like.transpose(0, 1) if rows is not a else y_like
        dx, dy, d_weight, d_bias = ctx.kernels.add_norm_backward(
            d_out, d_sum, total, None, weight, mean, rstd, ctx.rms, ctx.p, seed, y_like
        )
        dy = (dy.transpose(0, 1) if rows is not a else dy).reshape(-1, w.shape[0])
        needs = ctx.needs_input_grad
        da = (dy @ w).view(rows.shape) if needs[1] else None
        da = da.transpose(0, 1) if rows is not a and da is not None else da
        dw = dy.t() @ rows.reshape(-1, w.shape[1]) if needs[2] else None
        db = None if b_dtype is None or not needs[3] else dy.sum(0).to(b_dtype)
        d_bias = None if bias_dtype is None else d_bias.to(bias_dtype)
        return dx.to(x_dtype), da, dw, db, d_weight.to(weight.dtype), d_bias, None, None


class FeedForward(torch.autograd.Function):
    """linear(dropout(activation(linear(x)))).

    Saved: x, the weights, the seed, and one hidden tensor: the activation's input, for relu its
    output. Backward recomputes the rest.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        options: tuple[str, float],
        seed: Tensor | None,
    ) -> Tensor:
        ctx.kernels, ctx.options = kernels_for(x), options
        ctx.has_bias = (b1 is not None, b2 is not None)
        name, p = options
        rows = x.reshape(-1, x.shape[-1])
        if name == "relu" and p == 0 and b1 is not None:
            hidden = kept = internals.linear_relu(rows, w1, b1)
        else:
            kept = F.linear(rows, w1, b1)
            hidden = ctx.kernels.activate(kept, None, name, p, seed)
            kept = hidden if name == "relu" else kept
        ctx.save_for_backward(x, kept, w1, w2, seed)
        return F.linear(hidden, w2, b2).view(*x.shape[:-1], w2.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, kept, w1, w2, seed = ctx.saved_tensors
        (name, p), needs = ctx.options, ctx.needs_input_grad
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        dw2 = None
        if needs[3]:
            hidden = kept if name == "relu" else ctx.kernels.activate(kept, None, name, p, seed)
            dw2 = grad.t() @ hidden
        db2 = grad.sum(0) if ctx.has_bias[1] and needs[4] else None
        # relu's output is above 0 exactly if its input is.
        dh = ctx.kernels.activate_backward(grad @ w2, kept, name, p, seed)
        dw1 = dh.t() @ rows if needs[1] else None
        db1 = dh.sum(0) if ctx.has_bias[0] and needs[2] else None
        dx = (dh @ w1).view(x.shape) if needs[0] else None
        return dx, dw1, db1, dw2, db2, None, None


class GateLinear(torch.autograd.Function):
    """linear(gate(x)). Saved: x and the weight; backward recomputes the gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, name: str) -> Tensor:
        ctx.kernels, ctx.name, ctx.has_bias = kernels_for(x), name, b is not None
        ctx.save_for_backward(x, w)
        return F.linear(ctx.kernels.gate(x, name), w, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, w), needs = ctx.saved_tensors, ctx.needs_input_grad
        grad = grads[0].reshape(-1, w.shape[0])
        dw = None
        if needs[1]:
            dw = grad.t() @ ctx.kernels.gate(x, ctx.name).reshape(-1, w.shape[1])
        db = grad.sum(0) if ctx.has_bias and needs[2] else None
        dx = None
        if needs[0]:
            dx = ctx.kernels.gate_backward((grad @ w).view(*x.shape[:-1], w.shape[1]), x, ctx.name)
        return dx, dw, db, None


class Rotate(torch.autograd.Function):
    """(q, k, v) of qkv (batch, seqlen, heads + 2 heads_k, dim), q and k rotated. Saved: cos and
    sin."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, heads_k: int) -> Any:
        ctx.kernels = kernels_for(qkv)
        ctx.save_for_backward(cos, sin)
        qk = ctx.kernels.rotate(qkv, cos, sin, heads + heads_k)
        return qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, heads + heads_k :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dqkv = ctx.kernels.rotate_backward(*grads, *ctx.saved_tensors)
        return dqkv, None, None, None, None


class Products(torch.autograd.Function):
    """Several linear(x) of one x, concatenated; arguments are the weights, then the biases, each a
    tensor or None. Saved: x and the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Any) -> Tensor:
        number = len(parameters) // 2
        weights, biases = parameters[:number], parameters[number:]
        ctx.sizes = [len(weight) for weight in weights]
        ctx.save_for_backward(x, *weights)
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), sum(ctx.sizes))
        for part, w, b in zip(out.split(ctx.sizes, dim=1), weights, biases, strict=True):
            if b is None:
                torch.mm(rows, w.t(), out=part)
            else:
                torch.addmm(b, rows, w.t(), out=part)
        return out.view(*x.shape[:-1], sum(ctx.sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, *weights), needs = ctx.saved_tensors, ctx.needs_input_grad
        number = len(weights)
        grad = grads[0].reshape(-1, sum(ctx.sizes))
        parts = grad.split(ctx.sizes, dim=1)
        rows, dx = x.reshape(-1, x.shape[-1]), None
        if needs[0]:
            dx = parts[0] @ weights[0]
            for part, w in zip(parts[1:], weights[1:], strict=True):
                dx.addmm_(part, w)
            dx = dx.view(x.shape)
        dw = [part.t() @ rows if needs[1 + i] else None for i, part in enumerate(parts)]
        db = [part.sum(0) if needs[1 + number + i] else None for i, part in enumerate(parts)]
        return dx, *dw, *db
