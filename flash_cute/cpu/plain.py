"""Plain attention by ATen's flash kernel for the CPU: softmax of scaled scores, without a mask, or
causal over as many queries as keys.

Inputs of 16 bits are cast to fp32: otherwise the kernel's log-sum-exps have errors of 6e-5, and its
backward rounds sums once per block. But out is accurate in bf16 too, and takes a third of the time
if the CPU multiplies bf16. :mod:`flash_cute.cpu.odd` keeps inf and NaN from the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.cpu.tiles import Options

Results = tuple[Tensor, Any]  # out and softmax_lse, which is optional
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v

# The kernel hides scores before it scales them: -inf times a scale must stay -inf.
SCALES = (2.0**-40, 2.0**16)
MAX_HEAD_DIM = 2**10

_HALVES = (torch.float16, torch.bfloat16)


def causal_of(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool | None:
    """``is_causal`` for a call of the kernel; None if it does not support q (batch, seqlen_q,
    heads, dim), k and v with these options."""
    if options.has_rules or not SCALES[0] <= options.scale <= SCALES[1]:
        return None
    (_, seqlen_q, _, dim), (_, seqlen_k, _, dim_v) = q.shape, v.shape
    if dim != dim_v or dim > MAX_HEAD_DIM or q.numel() == 0 or seqlen_k == 0:
        return None
    left, right = options.window
    if 0 <= left < seqlen_k - 1:
        return None
    if right < 0 or right >= seqlen_q - 1:  # hides nothing
        return False
    return True if right == 0 and seqlen_q == seqlen_k else None


def is_fast_in_bf16(q: Tensor) -> bool:
    """Whether out alone is faster by bf16 products."""
    return q.dtype == torch.bfloat16 and internals.has_bf16_products()


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, in_bf16: bool, with_lse: bool
) -> Results:
    """(out, softmax_lse), new and contiguous. ``in_bf16``: out of bf16 inputs by bf16 products. Its
    bits do not depend on ``with_lse``; without it softmax_lse is None if it takes another pass.
    """
    dtype, shape, heads_k = q.dtype, q.shape, k.shape[2]
    group = shape[2] // heads_k
    # ATen has (batch, heads, seqlen, dim).
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    one_query = shape[1] == 1
    if one_query:  # query heads of a group become queries of their kv head: no key is copied
        q = q[:, 0].unflatten(1, (heads_k, group))
    else:
        q = q.transpose(1, 2)
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = lse = None
    if in_bf16:
        out, _ = internals.flash_forward_on_cpu(q, k, v, 0.0, causal, scale=scale)
    if out is None or with_lse:
        if dtype in _HALVES:
            q, k, v = q.float(), k.float(), v.float()
        exact, lse = internals.flash_forward_on_cpu(q, k, v, 0.0, causal, scale=scale)
        out = exact if out is None else out
    out = out.reshape(shape) if one_query else out.transpose(1, 2)
    if lse is not None:
        lse = (lse.reshape(shape[0], shape[2], 1) if one_query else lse).contiguous()
    return out.to(dtype).contiguous(), lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    scale: float,
    causal: bool,
) -> Gradients:
    """(dq, dk, dv), new and contiguous."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    if dtype in _HALVES:
        dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    dq, dk, dv = internals.flash_backward_on_cpu(
        dout, q, k, v, out, softmax_lse, 0.0, causal, scale=scale
    )
    if group > 1:
        dk, dv = dk.unflatten(1, (-1, group)).sum(2), dv.unflatten(1, (-1, group)).sum(2)
    dq, dk, dv = (x.transpose(1, 2).to(dtype).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv
