"""Plain attention by ATen's own flash kernel for the CPU: softmax of scaled scores, no mask, or a
causal one over as many queries as keys.

The kernel gets fp32 or fp64 alone: in half types its log-sum-exps are off by 6e-5, and its backward
rounds sums once a block. What numbers it may get is :mod:`flash_cute.cpu.odd`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.cpu.tiles import Options

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v

# The kernel hides scores before it scales them: -inf times a scale must stay -inf.
SCALES = (2.0**-40, 2.0**16)
MAX_HEAD_DIM = 2**10

_HALVES = (torch.float16, torch.bfloat16)


def causal_of(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool | None:
    """``is_causal`` of the kernel for q (batch, seqlen_q, heads, dim), k and v; None if it does not
    compute this."""
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


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse), new and contiguous."""
    dtype, shape, heads_k = q.dtype, q.shape, k.shape[2]
    group = shape[2] // heads_k
    if dtype in _HALVES:
        q, k, v = q.float(), k.float(), v.float()
    # ATen has (batch, heads, seqlen, dim).
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    one_query = shape[1] == 1
    if one_query:  # query heads of a group as queries of their kv head: no key is copied
        q = q[:, 0].unflatten(1, (heads_k, group))
    else:
        q = q.transpose(1, 2)
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out, lse = internals.flash_forward_on_cpu(q, k, v, 0.0, causal, scale=scale)
    if one_query:
        out, lse = out.reshape(shape), lse.reshape(shape[0], shape[2], 1)
    else:
        out = out.transpose(1, 2)
    return out.to(dtype) if dtype in _HALVES else out.contiguous(), lse.contiguous()


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
