"""The rotary kernels on CUDA, in Triton, and how a kernel is launched."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROTATED = 2048  # elements of a program


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *arguments: Any, **options: Any) -> None:
    """Runs a kernel on x's device: Triton uses the current one."""
    if 0 in grid:
        return
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            kernel[grid](x, *arguments, **options)
    else:
        kernel[grid](x, *arguments, **options)


@triton.jit
def _turn(
    source, cos, sin, out, heads, half, source_head, out_head,
    block, sign, ROTATE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A block of heads of one token: pairs (i, i + half) rotated by sign times the angle."""
    head = block * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    first = tl.load(source + head * source_head + pair, mask=inside, other=0.0)
    second = tl.load(source + head * source_head + half + pair, mask=inside, other=0.0)
    if ROTATE:
        valid = pair < half
        c0 = tl.load(cos + pair, mask=valid, other=0.0).to(tl.float32)
        c1 = tl.load(cos + half + pair, mask=valid, other=0.0).to(tl.float32)
        s0 = tl.load(sin + pair, mask=valid, other=0.0).to(tl.float32)
        s1 = tl.load(sin + half + pair, mask=valid, other=0.0).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        if sign > 0:
            first, second = a * c0 - b * s0, b * c1 + a * s1
        else:
            first, second = a * c0 + b * s1, b * c1 - a * s0
    place = out + head * out_head + pair
    tl.store(place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(place + half, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    qkv, cos, sin, out, seqlen, heads, all_heads, half, angle_batch,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    angle = (row // seqlen) * angle_batch + (row % seqlen) * 2 * half
    source, target = qkv + row * all_heads * 2 * half, out + row * heads * 2 * half
    _turn(
        source, cos + angle, sin + angle, target, heads, half, 2 * half, 2 * half,
        tl.program_id(1), 1, True, HEADS, HALF,
    )  # fmt: skip


@triton.jit
def _rotate_backward_kernel(
    dq, dk, dv, cos, sin, out, seqlen, heads, heads_k, half, angle_batch,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, token = row // seqlen, row % seqlen
    angle = batch * angle_batch + token * 2 * half
    target = out + row * (heads + 2 * heads_k) * 2 * half
    of_q, of_k = tl.cdiv(heads, HEADS), tl.cdiv(heads_k, HEADS)
    if block < of_q:
        _turn(
            dq + batch * q_batch + token * q_token, cos + angle, sin + angle, target,
            heads, half, q_head, 2 * half, block, -1, True, HEADS, HALF,
        )  # fmt: skip
    elif block < of_q + of_k:
        _turn(
            dk + batch * k_batch + token * k_token, cos + angle, sin + angle,
            target + heads * 2 * half,
            heads_k, half, k_head, 2 * half, block - of_q, -1, True, HEADS, HALF,
        )  # fmt: skip
    else:
        _turn(
            dv + batch * v_batch + token * v_token, cos, sin,
            target + (heads + heads_k) * 2 * half,
            heads_k, half, v_head, 2 * half, block - of_q - of_k, -1, False, HEADS, HALF,
        )  # fmt: skip


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """The first ``heads`` of qkv (batch, seqlen, all heads, dim), rotated."""
    batch, seqlen, all_heads, dim = qkv.shape
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    out = qkv.new_empty(batch, seqlen, heads, dim)
    sizes = _rotary_tile(dim, heads)
    grid = (batch * seqlen, triton.cdiv(heads, sizes["HEADS"]))
    launch(
        _rotate_kernel,
        grid,
        qkv,
        cos,
        sin,
        out,
        seqlen,
        heads,
        all_heads,
        dim // 2,
        _of_batch(cos),
        **sizes,
    )
    return out


def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv, from the gradients of the rotated heads and of v."""
    batch, seqlen, heads, dim = dq.shape
    heads_k, cos, sin = dk.shape[2], cos.contiguous(), sin.contiguous()
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    out = dq.new_empty(batch, seqlen, heads + 2 * heads_k, dim)
    sizes = _rotary_tile(dim, heads)
    blocks = triton.cdiv(heads, sizes["HEADS"]) + 2 * triton.cdiv(heads_k, sizes["HEADS"])
    strides = [stride for x in (dq, dk, dv) for stride in x.stride()[:3]]
    launch(
        _rotate_backward_kernel, (batch * seqlen, blocks),
        dq, dk, dv, cos, sin, out, seqlen, heads, heads_k, dim // 2, _of_batch(cos), *strides,
        **sizes,
    )  # fmt: skip
    return out


def _of_batch(angles: Tensor) -> int:
    return 0 if angles.shape[0] == 1 else angles.stride(0)


def _rotary_tile(dim: int, heads: int) -> dict[str, int]:
    half = max(16, triton.next_power_of_2(dim // 2))
    return {"HEADS": max(1, min(triton.next_power_of_2(heads), _ROTATED // half)), "HALF": half}
