"""A product followed by dropout, residual and norm in one kernel, in Triton.

A program holds whole rows of the product, so that it can normalise them in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_cute.attention.fusion.kernels_triton import block_of, dropped, drops, scale_of, sms
from flash_cute.attention.fusion.kernels_triton_rotary import launch

MAX_WIDTH = 512  # of a row: more columns of fp32 sums do not fit into a program's registers
FASTER_WIDTH = 256  # one kernel takes 10 us, two take 12; with 512 columns 22 and 18 (H100)
MAX_ROWS = 8192  # with more rows cuBLAS and a separate norm are faster
_DEPTH = 64  # of a step of the product
_STAGES = 2
_SHARED_BYTES = 2 * _STAGES * _DEPTH * (64 + MAX_WIDTH)


@triton.jit
def _linear_add_norm_kernel(
    x, a, w, b, weight, bias, total, out, mean, rstd, seed,
    rows, inner, width, depth, x_outer, x_inner, a_outer, a_inner, eps, p, scale,
    HAS_B: tl.constexpr, HAS_BIAS: tl.constexpr, RMS: tl.constexpr, DROP: tl.constexpr,
    SUM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    step = tl.arange(0, DEPTH)
    there, inside = row < rows, column < width
    both = there[:, None] & inside[None, :]
    outer = (row // inner).to(tl.int64)
    within = (row - row // inner * inner).to(tl.int64)
    a_at = a + (outer * a_outer + within * a_inner)[:, None] + step[None, :]
    w_at = w + column[None, :] * depth + step[:, None]
    value = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, depth, DEPTH):
        left = step < depth - first
        tile_a = tl.load(a_at + first, mask=there[:, None] & left[None, :], other=0.0)
        tile_w = tl.load(w_at + first, mask=inside[None, :] & left[:, None], other=0.0)
        value = tl.dot(tile_a, tile_w, value)
    if HAS_B:
        value += tl.load(b + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if DROP:
        value = dropped(value, seed, row[:, None], p, scale, BLOCK)
    x_at = x + (outer * x_outer + within * x_inner)[:, None] + column[None, :]
    value += tl.load(x_at, mask=both, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    if SUM:
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=both)
        value = rounded.to(tl.float32)
    middle = tl.zeros((ROWS,), tl.float32)
    if not RMS:
        middle = tl.sum(tl.where(both, value, 0.0), 1) / width
        tl.store(mean + row, middle, mask=there)
    centred = tl.where(both, value - middle[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    tl.store(rstd + row, factor, mask=there)
    value = centred * factor[:, None]
    value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value, mask=both)


def takes(x: Tensor, a: Tensor, w: Tensor) -> bool:
    """Whether one kernel supports it: 16-bit products of at most ``MAX_WIDTH`` columns and
    ``MAX_ROWS`` rows, on a GPU with enough shared memory a block (A100, H100). In a CUDA graph,
    whose launches cost nothing, only up to ``FASTER_WIDTH`` columns."""
    if a.dtype not in (torch.float16, torch.bfloat16) or a.dtype != w.dtype:
        return False
    width = FASTER_WIDTH if x.is_cuda and torch.cuda.is_current_stream_capturing() else MAX_WIDTH
    if w.shape[0] > width or a.numel() > MAX_ROWS * a.shape[-1] or x.shape[:-1] != a.shape[:-1]:
        return False
    if not x.is_cuda:
        return True
    properties: Any = torch.cuda.get_device_properties(x.device)
    optin = getattr(properties, "shared_memory_per_block_optin", 0)
    return properties.major >= 8 and optin >= _SHARED_BYTES


def linear_add_norm(
    x: Tensor,
    a: Tensor,
    w: Tensor,
    b: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    p: float,
    seed: Tensor | None,
    keep_sum: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """(sum or None, norm(sum) in ``dtype``, mean, rstd) of sum = x + dropout(a w^T + b).

    x (outer, inner, width) and a (outer, inner, depth) have any strides.
    """
    w = w.contiguous()
    x, a = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, a))
    rows, width = x.shape[0] * x.shape[1], x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = None
    if keep_sum:
        total = out.new_empty(x.shape, dtype=torch.promote_types(x.dtype, a.dtype))
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = rstd if rms else torch.empty_like(rstd)
    # The most rows per program that still give every SM a program.
    at_once = 16 if rows <= 16 * sms(x) else 32 if rows <= 32 * sms(x) else 64
    launch(
        _linear_add_norm_kernel, (triton.cdiv(rows, at_once),),
        x, a, w, b, weight, bias, total, out, mean, rstd, seed,
        rows, x.shape[1], width, w.shape[1], *x.stride()[:2], *a.stride()[:2], eps, p,
        scale_of(p),
        HAS_B=b is not None, HAS_BIAS=bias is not None, RMS=rms, DROP=drops(p, seed),
        SUM=keep_sum, ROWS=at_once, BLOCK=block_of(width), DEPTH=_DEPTH,
        num_warps=8, num_stages=_STAGES,
    )  # fmt: skip
    return total, out, mean, rstd
