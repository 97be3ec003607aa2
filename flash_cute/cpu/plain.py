"""Plain attention by ATen's own flash kernel for the CPU: softmax of scaled scores, no mask, or a
causal one over as many queries as keys.

The kernel gets fp32 or fp64 alone: in half types its log-sum-exps are off by 6e-5, and its backward
rounds sums once a block. What depends on numbers that are not finite, or may overflow, is not its
to compute: it multiplies hidden values by 0, and its exponential may lose a NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.cpu.tiles import Options

Gradients = tuple[Tensor, Tensor, Tensor]

# Sums of MAX_HEAD_DIM products of two numbers up to LARGEST, times a scale, are finite in fp32.
# The kernel hides scores before it scales them: -inf times a scale must stay -inf.
LARGEST = 2.0**50
SCALES = (2.0**-40, 2.0**16)
MAX_HEAD_DIM = 2**10

_HALVES = (torch.float16, torch.bfloat16)


class Odd(NamedTuple):
    """Rows of tensors that hold a number that is too large or none, and what depends on them."""

    row: Tensor  # bool (batch, seqlen_q, heads): of q, and of what has its shape
    key: Tensor  # bool (batch, seqlen_k, heads_k): of k or v
    of_rows: Tensor  # as row: results that the kernel may get wrong
    of_keys: Tensor  # as key: gradients of k and v that it may get wrong

    @classmethod
    def of(cls, causal: bool, like_q: tuple[Tensor, ...], k: Tensor, v: Tensor) -> Odd | None:
        """None as a rule. ``like_q`` are tensors (batch, seqlen_q, heads, any)."""
        if all(_is_usual(x) for x in (*like_q, k, v)):
            return None
        row, key = _unusual(like_q), _unusual((k, v))
        group = row.shape[2] // key.shape[2]
        of_rows = row | _any_before(key, causal).repeat_interleave(group, 2)
        by_group = of_rows.unflatten(2, (-1, group)).any(-1)
        of_keys = key | _any_before(by_group.flip(1), causal).flip(1)
        return cls(row, key, of_rows, of_keys)

    def replaced(self, results: Gradients, exact: Gradients) -> Gradients:
        """Gradients of q, k and v: those that are ``exact`` where the kernel's may be wrong."""
        places = (self.of_rows, self.of_keys, self.of_keys)
        dq, dk, dv = (
            torch.where(where[..., None], right, x)
            for where, right, x in zip(places, exact, results, strict=True)
        )
        return dq, dk, dv


def _is_usual(x: Tensor) -> bool:
    low, high = torch.aminmax(x)
    return low.item() >= -LARGEST and high.item() <= LARGEST  # not for NaN


def _unusual(tensors: tuple[Tensor, ...]) -> Tensor:
    """Which rows, the last dimension, hold an unusual number in any of the tensors."""
    return torch.stack([(x.abs() <= LARGEST).all(-1).logical_not_() for x in tensors]).any(0)


def _any_before(x: Tensor, causal: bool) -> Tensor:
    """Whether any position of dim 1 up to each one is True; with ``causal`` False, any at all."""
    return x.int().cummax(1).values.bool() if causal else x.any(1, keepdim=True)


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


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, odd: Odd | None
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse), new and contiguous; nothing is promised where ``odd.of_rows`` is True."""
    if odd is not None:
        q, k, v = _cleared(q, odd.row), _cleared(k, odd.key), _cleared(v, odd.key)
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
    odd: Odd | None,
) -> Gradients:
    """(dq, dk, dv), new and contiguous; nothing is promised where ``odd`` says so."""
    if odd is not None:
        dout, q, out = (_cleared(x, odd.row) for x in (dout, q, out))
        k, v = _cleared(k, odd.key), _cleared(v, odd.key)
        softmax_lse = softmax_lse.masked_fill(odd.row.transpose(1, 2), 0)
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


def _cleared(x: Tensor, where: Tensor) -> Tensor:
    return x.masked_fill(where[..., None], 0)
