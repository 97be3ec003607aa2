"""The kernels of the fused steps on CUDA, in Triton: kernels_torch.py says what each computes.

Every kernel reads its inputs and writes its outputs once, and computes in fp32. Dropout of element
(row, column) is Philox of (seed, row, column): backward recomputes it, nothing is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_cute.attention.fusion.kernels_triton_rotary import launch, rotate, rotate_backward

__all__ = [
    "activate",
    "activate_backward",
    "add_norm",
    "add_norm_backward",
    "gate",
    "gate_backward",
    "rotate",
    "rotate_backward",
]
_FLAT = 1024  # elements per program of elementwise kernels


# --- device functions ----------------------------------------------------------------------------


@triton.jit
def dropped(x, seed, row, p, scale, BLOCK: tl.constexpr):
    """Dropout of x: (BLOCK,) of one row, or (rows, BLOCK) with ``row`` (rows, 1)."""
    zero = tl.arange(0, BLOCK // 4) * 0 + row * 0
    group = tl.arange(0, BLOCK // 4) + zero
    r0, r1, r2, r3 = tl.philox(tl.load(seed), group, zero + row, zero, zero)
    random = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    return tl.where(tl.uint_to_uniform_float(random) >= p, x * scale, 0.0)


@triton.jit
def _activation(x, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(x < 0, 0.0, x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "silu":
        return x * tl.sigmoid(x)
    else:
        return x


@triton.jit
def _derivative(x, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif ACT == "gelu":
        normal = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * normal
    elif ACT == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    else:
        return x * 0.0 + 1.0


# --- activation, dropout, residual ---------------------------------------------------------------


@triton.jit
def _activate_kernel(
    x, residual, out, seed, size, p, scale,
    ACT: tl.constexpr, RESIDUAL: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = _activation(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), ACT)
    if DROP:
        value = dropped(value, seed, block, p, scale, BLOCK)
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value, mask=inside)


@triton.jit
def _activate_backward_kernel(
    grad, x, dx, seed, size, p, scale,
    ACT: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        value = dropped(value, seed, block, p, scale, BLOCK)
    if ACT != "identity":
        value *= _derivative(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), ACT)
    tl.store(dx + at, value, mask=inside)


def activate(x: Tensor, residual: Tensor | None, name: str, p: float, seed: Tensor | None):
    """residual + dropout(activation(x))."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out = torch.empty_like(x, dtype=dtype)
    launch(
        _activate_kernel, (triton.cdiv(x.numel(), _FLAT),),
        x, residual, out, seed, x.numel(), p, scale_of(p),
        ACT=name, RESIDUAL=residual is not None, DROP=drops(p, seed), BLOCK=_FLAT,
    )  # fmt: skip
    return out


def activate_backward(grad: Tensor, x: Tensor, name: str, p: float, seed: Tensor | None) -> Tensor:
    """The gradient of x; for "identity" only x's dtype is used."""
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(grad, dtype=x.dtype)
    launch(
        _activate_backward_kernel, (triton.cdiv(grad.numel(), _FLAT),),
        grad, x, dx, seed, grad.numel(), p, scale_of(p),
        ACT=name, DROP=drops(p, seed), BLOCK=_FLAT,
    )  # fmt: skip
    return dx


# --- gate ----------------------------------------------------------------------------------------


@triton.jit
def _gate_kernel(x, out, width, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    first = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + (row * 2 + 1) * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, _activation(first, ACT) * second, mask=inside)


@triton.jit
def _gate_backward_kernel(grad, x, dx, width, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + (row * 2 + 1) * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + row * 2 * width + at, g * second * _derivative(first, ACT), mask=inside)
    tl.store(dx + (row * 2 + 1) * width + at, g * _activation(first, ACT), mask=inside)


def gate(x: Tensor, name: str) -> Tensor:
    """activation(first half) * second half, of the last dimension."""
    x, width = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    grid = (x.numel() // (2 * width), triton.cdiv(width, _FLAT))
    launch(_gate_kernel, grid, x, out, width, ACT=name, BLOCK=_FLAT)
    return out


def gate_backward(grad: Tensor, x: Tensor, name: str) -> Tensor:
    """The gradient of x."""
    grad, x, width = grad.contiguous(), x.contiguous(), x.shape[-1] // 2
    dx = torch.empty_like(x)
    grid = (x.numel() // (2 * width), triton.cdiv(width, _FLAT))
    launch(_gate_backward_kernel, grid, grad, x, dx, width, ACT=name, BLOCK=_FLAT)
    return dx


# --- dropout, residual, norm ---------------------------------------------------------------------


@triton.jit
def _place(row, inner, outer_stride, inner_stride):
    """The offset of a row; rows are (outer, inner)."""
    outer = row // inner
    return outer.to(tl.int64) * outer_stride + (row - outer * inner).to(tl.int64) * inner_stride


@triton.jit
def _add_norm_kernel(
    x, y, weight, bias, total, out, mean, rstd, seed,
    inner, width, x_outer, x_inner, y_outer, y_inner, eps, p, scale,
    RMS: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(y + _place(row, inner, y_outer, y_inner) + column, mask=inside, other=0.0)
    value = value.to(tl.float32)
    if DROP:
        value = dropped(value, seed, row, p, scale, BLOCK)
    start = x + _place(row, inner, x_outer, x_inner)
    value += tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    at = row.to(tl.int64) * width + column
    if SUM:
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    middle = 0.0
    if not RMS:
        middle = tl.sum(value, 0) / width
    centred = tl.where(inside, value - middle, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    value = centred * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value, mask=inside)
    tl.store(rstd + row, factor)
    if not RMS:
        tl.store(mean + row, middle)


@triton.jit
def _add_norm_backward_kernel(
    grad, grad_sum, x, y, weight, mean, rstd, seed, dx, dy, partial,
    rows, inner, width, x_outer, x_inner, y_outer, y_inner, dy_outer, dy_inner, p, scale,
    RMS: tl.constexpr, DROP: tl.constexpr, SUM: tl.constexpr, GRAD_SUM: tl.constexpr,
    DY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        start = x + _place(row, inner, x_outer, x_inner)
        value = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
        if not SUM:
            start = y + _place(row, inner, y_outer, y_inner)
            other = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
            if DROP:
                other = dropped(other, seed, row, p, scale, BLOCK)
            value += other
        if not RMS:
            value -= tl.load(mean + row)
        inverse = tl.load(rstd + row)
        normal = tl.where(inside, value * inverse, 0.0)
        at = (column * 0 + row).to(tl.int64) * width + column
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        dw += g * normal
        db += g
        g *= factor
        result = g - normal * (tl.sum(g * normal, 0) / width)
        if not RMS:
            result -= tl.sum(g, 0) / width
        result *= inverse
        if GRAD_SUM:
            result += tl.load(grad_sum + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, result, mask=inside)
        if DY:
            if DROP:
                result = dropped(result, seed, row, p, scale, BLOCK)
            tl.store(dy + _place(row, inner, dy_outer, dy_inner) + column, result, mask=inside)
    at = tl.program_id(0) * width + column
    tl.store(partial + at, dw, mask=inside)
    tl.store(partial + tl.num_programs(0) * width + at, db, mask=inside)


def add_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    p: float,
    seed: Tensor | None,
    keep_sum: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """(sum or None, norm(sum) in ``dtype``, mean, rstd) of sum = x + dropout(y)."""
    shape, width = x.shape, x.shape[-1]
    x, y = _in_rows(x), _in_rows(y)
    rows = x.shape[0] * x.shape[1]
    out = torch.empty(shape, dtype=dtype, device=x.device)
    total = None
    if keep_sum:
        total = out.new_empty(shape, dtype=torch.promote_types(x.dtype, y.dtype))
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = rstd if rms else torch.empty_like(rstd)
    block = block_of(width)
    launch(
        _add_norm_kernel, (rows,),
        x, y, weight, bias, total, out, mean, rstd, seed,
        x.shape[1], width, *x.stride()[:2], *y.stride()[:2], eps, p, scale_of(p),
        RMS=rms, BIAS=bias is not None, DROP=drops(p, seed), SUM=keep_sum,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return total, out, mean, rstd


def add_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    rms: bool,
    p: float,
    seed: Tensor | None,
    y_like: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, y, weight and bias; dy has the strides of ``y_like``."""
    width, block = x.shape[-1], block_of(x.shape[-1])
    grad = grad.contiguous()
    grad_sum = None if grad_sum is None else grad_sum.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dy = torch.empty_like(y_like, device=x.device)  # keeps the strides unless they overlap
    if dy.dim() != 3 or dy.stride(-1) != 1:
        dy = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    same = not drops(p, seed) and dy.dtype == dx.dtype and dy.stride() == dx.stride()
    dy = dx if same else dy
    x, y, dy_rows = _in_rows(x), None if y is None else _in_rows(y), _in_rows(dy)
    rows = x.shape[0] * x.shape[1]
    programs = max(1, min(rows, _programs(x)))
    partial = torch.empty(2, programs, width, dtype=torch.float32, device=x.device)
    launch(
        _add_norm_backward_kernel, (programs,),
        grad, grad_sum, x, y, weight, mean, rstd, seed, dx, dy, partial,
        rows, x.shape[1], width, *x.stride()[:2], *(x if y is None else y).stride()[:2],
        *dy_rows.stride()[:2], p, scale_of(p),
        RMS=rms, DROP=drops(p, seed), SUM=y is None, GRAD_SUM=grad_sum is not None,
        DY=not same, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    dw, db = partial.sum(1)
    return dx, dy, dw, db


# --- sizes ---------------------------------------------------------------------------------------


def drops(p: float, seed: Tensor | None) -> bool:
    return p > 0 and seed is not None


def scale_of(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def block_of(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _warps(block: int) -> int:
    return min(16, max(1, block // 256))


def sms(x: Tensor) -> int:
    """SMs of x's GPU; 1 if kernels are interpreted."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


def _programs(x: Tensor) -> int:
    """Programs of the backward of a norm; each sums the weights' gradients over its rows."""
    return 4 * sms(x)


def _in_rows(x: Tensor) -> Tensor:
    """x as (outer, inner, width) with contiguous rows; 3 dimensions keep their strides."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1])
