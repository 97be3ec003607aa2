"""Attention over all keys from attention over parts of them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import ops
from flash_cute.call import validate
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.call.validate import ops as validate_ops


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = True,
) -> Any:
    """The attention over all keys, from those over parts of them.

    Args:
        out_partial: fp32 (parts, .., dim), e.g. (parts, batch, seqlen, heads, dim); any strides.
        lse_partial: fp32 (parts, ..), natural log. A part whose lse is -inf weighs nothing,
            whatever its out holds.
        out: tensor for the result; None allocates it.
        out_dtype: fp16, bf16 or fp32; None is that of ``out``, else fp32.
        return_lse: also return the log-sum-exp over all parts.

    Returns:
        out (.., dim), and as asked lse fp32 (..).

    Raises:
        TypeError, ValueError: see :func:`flash_cute.call.validate.kvcache.partials`.
        RuntimeError: an argument requires gradients, in grad mode.

    Example::

        import torch
        from flash_cute import flash_attn_combine, flash_attn_func

        q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
        halves = zip(k.chunk(2, dim=1), v.chunk(2, dim=1))
        parts = [flash_attn_func(q, *half, return_lse=True) for half in halves]
        outs, lses = (torch.stack(tensors) for tensors in zip(*parts))
        out, lse = flash_attn_combine(outs, lses.transpose(2, 3))
        torch.testing.assert_close(out, flash_attn_func(q, k, v))
    """
    if out is not None:
        validate.tensor("out", out)
        out_dtype = out.dtype if out_dtype is None else out_dtype
    validate.flag("return_lse", return_lse)
    validate_kvcache.partials(out_partial, lse_partial, out_dtype)
    parts, *lead, dim = out_partial.shape
    rows = math.prod(lead)
    partial_rows = (out_partial.reshape(parts, rows, dim), lse_partial.reshape(parts, rows))
    result, lse = ops.combine(*(x.contiguous() for x in partial_rows), out_dtype)
    with nullcontext() if torch.compiler.is_compiling() else internals.below_versions():
        result, lse = result.view(*lead, dim), lse.view(lead)  # as no views, which may be written
    if out is not None:
        validate_ops.output("out", out, result)
        result = out.copy_(result)
    return (result, lse) if return_lse else result
