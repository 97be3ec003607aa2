"""Attention of separate q, k and v: dense, and of sequences laid end to end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import check, ops
from flash_cute.call import spellings, validate
from flash_cute.call.fp8 import has_fp8_arguments
from flash_cute.call.refusal import is_refusal
from flash_cute.functional import fp8
from flash_cute.functional.run import (
    Result,
    are_counts,
    is_direct,
    is_plain,
    needs_grad,
    run,
)
from flash_cute.ops import autocast
from flash_cute.ops.typed import FwdCall, VarlenFwdCall
from flash_cute.sparse.value import Sparse

# Defaults of numbers are the int 0: under torch.compile(dynamic=True) a float would become an input
# of the graph, which is compiled again when that turns out to be a constant.


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
    generator: torch.Generator | None = None,
    rng: Tensor | None = None,
    return_lse: bool = False,
    return_rng: bool = False,
    return_max_logits: bool = False,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    sparse: Sparse | None = None,
    **others: Any,
) -> Result:
    """softmax(scale q k^T) v without the seqlen_q x seqlen_k matrix in memory (FlashAttention,
    arXiv 2205.14135).

    Args:
        q: (batch, seqlen_q, heads, dim), fp16, bf16, fp32 or fp64; any strides, last dimension
            contiguous. fp32 on CUDA is as accurate as fp32 products are, unless torch's matmuls
            are in TF32 at the time of the call (``torch.backends.cuda.matmul``). Under
            ``torch.autocast`` q, k and v are cast to its dtype, unless they are fp64. q and k may
            be fp8 (e4m3fn or e5m2), and v fp8 or 16 bits, forward only
            (:mod:`flash_cute.call.fp8`).
        k: (batch, seqlen_k, heads_k, dim). ``heads`` is a multiple of ``heads_k``: query head h
            reads kv head ``h // (heads / heads_k)`` (grouped-query attention).
        v: (batch, seqlen_k, heads_k, dim_v).
        dropout_p: probability in [0, 1] that an attention weight is dropped.
        softmax_scale: factor of q k^T; None means ``dim ** -0.5``.
        causal: query i sees key j only if ``j <= i + seqlen_k - seqlen_q`` (aligned to the bottom
            right).
        window_size: (left, right): query i sees keys ``[i + shift - left, i + shift + right]`` with
            ``shift = seqlen_k - seqlen_q``; -1 is unbounded. ``causal`` makes right 0.
        softcap: c > 0 replaces scores s by ``c * tanh(s / c)`` (Gemma 2); 0 is off.
        alibi_slopes: fp32 (heads,) or (batch, heads): adds ``-slope * |i + shift - j|`` (arXiv
            2108.12409). Has no gradient: refused if it requires one.
        deterministic: backward is bitwise repeatable. Forward always is.
        return_attn_probs: also return the signed probabilities, for tests and study; O(seqlen_q *
            seqlen_k) memory.
        sink: (heads,), a learnable logit a head in the softmax's denominator (arXiv 2309.17453);
            any floating point on the CPU, fp16, bf16 or fp32 on CUDA. Its gradient has fp32's
            accuracy.
        generator: source of dropout's random state; None is the device's default, the only one
            that activation checkpointing replays. Cannot be traced by torch.compile.
        rng: that state itself, int64 (2,) on q's device, in place of a generator: the same one
            drops the same, compiled or not. See :func:`flash_cute.rng_state`.
        return_lse: also return the log-sum-exp.
        return_rng: also return the state that dropout used.
        return_max_logits: also return the largest score of each head, for QK-clip.
        out: tensor for the result, which is returned; without gradients, and not of fp8.
        s_aux, learnable_sink: other names of ``sink``.
        q_descale: what fp8 q is to be multiplied by: a finite number > 0, or fp32 of one element,
            (batch, heads_k), or q's shape with 1 for the head dim. None is 1.
        k_descale: likewise for k, whose own shape it may have with 1 for the head dim.
        v_descale: what fp8 v is to be multiplied by: a number, or fp32 of one element, (batch,
            heads_k), or (batch, heads_k, dim_v), one for each channel.
        out_dtype: dtype of out of fp8 q and k: bf16, which None stands for, fp16 or fp32.
        sparse: which keys each query sees, as a :class:`flash_cute.Sparse`; the causal mask and the
            window hide more. Only tiles of 128 queries and keys that have a visible pair are
            computed, forward and backward.
        others: ``return_softmax_lse``, another name of ``return_lse``; FlashAttention-3's
            ``num_splits``, ``pack_gqa`` and ``sm_margin``, which say how its kernels are scheduled
            and nothing here; features that do not exist, with values that ask for none.

    Where the last dimension of q, k or v is not contiguous it is copied. ``window_size`` may be any
    pair, None unbounded.

    Returns:
        out (batch, seqlen_q, heads, dim_v) in q's dtype. With ``return_lse``: (out, softmax_lse),
        softmax_lse fp32 (fp64 for fp64 inputs) (batch, heads, seqlen_q), natural log,
        differentiable. With ``return_attn_probs``: (out, softmax_lse, probs), probs (batch, heads,
        seqlen_q, seqlen_k) in q's dtype, negative where dropout drops. Behind these, as asked: the
        state of dropout, None where ``dropout_p`` is 0; max_logits (heads,), dtype as softmax_lse,
        of scores after scale, softcap and slopes, without a gradient. A row that sees no key has
        out 0 and lse -inf, or ``sink``'s logit if there is one.

    Raises:
        TypeError, ValueError, NotImplementedError: see :mod:`flash_cute.call.validate`.

    Example::

        import torch
        from flash_cute import flash_attn_func

        q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
        q.requires_grad_()
        out = flash_attn_func(q, k, v, causal=True)  # (2, 100, 8, 64)
        out.sum().backward()  # fills q.grad

        out, rng = flash_attn_func(q, k, v, dropout_p=0.1, return_rng=True)
        same = flash_attn_func(q, k, v, dropout_p=0.1, rng=rng)
    """
    refused: list[Exception] = []
    sink = spellings.sink(sink, s_aux, learnable_sink)
    is_default = (
        sink is rng is generator is out is out_dtype is None
        and q_descale is k_descale is v_descale is sparse is None
        and deterministic is return_attn_probs is return_rng is return_max_logits is False
        and type(return_lse) is bool
        and not others
        and is_plain(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    )
    if is_default and is_direct(q, k, v):
        # A call at its shortest: the op's own checks come first. One that they refuse goes on to
        # the validation below, which says what is wrong with it, and no further.
        try:
            out_alone = q.is_cpu and q.dtype == torch.bfloat16 and not return_lse
            if out_alone and not needs_grad(q, k, v) and internals.are_plain((q, k, v)):
                return _out_alone(q, k, v, softmax_scale, causal)
            return _call_op_unchecked(ops.fwd, q, k, v, softmax_scale, causal, return_lse)
        except (RuntimeError, TypeError, ValueError) as error:
            if not is_refusal(error):
                raise
            refused.append(error.with_traceback(None))
    return_lse = spellings.check_extra_kwargs(flash_attn_func, others) or return_lse
    score: Any = (
        softmax_scale, causal, *spellings.sides(window_size), softcap, alibi_slopes, sink,
        dropout_p, rng, deterministic, return_attn_probs, return_max_logits,
    )  # fmt: skip
    descales = (q_descale, k_descale, v_descale)
    if has_fp8_arguments((q, k, v), descales, out_dtype):
        return fp8.attention(
            FwdCall(q, k, v, *score), descales, out_dtype, out, return_lse=return_lse,
            return_rng=return_rng, generator=generator, sparse=sparse,
        )  # fmt: skip
    q, k, v = spellings.copy_if_last_dim_strided(*autocast.cast(q, k, v))
    validate.dense(q, k, v)
    check.dense(q, k)
    return run(
        FwdCall(q, k, v, *score), return_lse=return_lse, return_rng=return_rng,
        generator=generator, out=out, refused=refused, sparse=sparse,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    sink: Tensor | None = None,
    generator: torch.Generator | None = None,
    rng: Tensor | None = None,
    return_lse: bool = False,
    return_rng: bool = False,
    return_max_logits: bool = False,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    sparse: Sparse | None = None,
    **others: Any,
) -> Result:
    """Attention over sequences of different lengths laid end to end.

    Args:
        q: (total_q, heads, dim).
        k: (total_k, heads_k, dim), or (num_blocks, page_size, heads_k, dim) with ``block_table``.
        v: as k, with its own head dim.
        cu_seqlens_q: int32 (batch + 1): sequence b is rows ``[cu_seqlens_q[b], cu_seqlens_q[b +
            1])`` of q.
        cu_seqlens_k: int32 (batch + 1), likewise for k and v. None with ``seqused_k`` and pages, or
            k of (batch, seqlen, heads_k, dim).
        max_seqlen_q: the longest sequence of q; longer ones are cut to it. An int, or a numpy
            integer or tensor without dimensions.
        max_seqlen_k: the longest sequence of k; longer ones are cut to it.
        block_table: int32 (batch, max_blocks), the page ids of each sequence's keys and values.
            Forward only.
        seqused_q: int32 (batch): only that many rows of each sequence take part.
        seqused_k: int32 (batch), likewise for k and v.
        zero_tensors: rows that belong to no sequence come back 0 (lse: -inf). They do in any case.

    The other arguments are :func:`flash_attn_func`'s; a descale of q's or k's rows has the shape of
    this q or k, pages too, with 1 for the head dim. Offsets and lengths that leave their tensors
    are clamped on the device, without a host synchronisation; ``FLASH_CUTE_CHECK=1`` refuses them
    (:mod:`flash_cute.check`).

    Returns:
        out (total_q, heads, dim_v), and as asked softmax_lse (heads, total_q) and the signed
        probabilities (batch, heads, max_seqlen_q, max_seqlen_k).

    Raises:
        TypeError, ValueError, NotImplementedError: see :mod:`flash_cute.call.validate`.

    Example::

        import torch
        from flash_cute import flash_attn_varlen_func

        q, k, v = torch.randn(3, 100, 8, 64).unbind()  # sequences of 60 and 40 tokens, end to end
        cu_seqlens = torch.tensor([0, 60, 100], dtype=torch.int32)
        out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 60, 60, causal=True)
    """
    refused: list[Exception] = []
    sink = spellings.sink(sink, s_aux, learnable_sink)
    is_default = (
        sink is rng is generator is out is out_dtype is None
        and q_descale is k_descale is v_descale is sparse is None
        and deterministic is return_attn_probs is return_rng is return_max_logits is False
        and type(return_lse) is type(zero_tensors) is bool
        and not others
        and cu_seqlens_q is not None
        and cu_seqlens_k is not None
        and is_plain(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
        and are_counts(max_seqlen_q, max_seqlen_k)
    )
    told: tuple[Any, Any, int, int, Any, Any] = (
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
    )  # fmt: skip
    indices = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table)
    if is_default and is_direct(q, k, v, *indices):
        try:  # as in flash_attn_func
            result = _call_op_unchecked(
                ops.varlen_fwd, q, k, v, softmax_scale, causal, return_lse, *told, zero_tensors,
                block_table,
            )  # fmt: skip
            if q.is_cpu:
                check.varlen(q, k, *told, block_table, zero_tensors)
            return result
        except (RuntimeError, TypeError, ValueError) as error:
            if not is_refusal(error):
                raise
            refused.append(error.with_traceback(None))
    return_lse = spellings.check_extra_kwargs(flash_attn_varlen_func, others) or return_lse
    score: Any = (
        softmax_scale, causal, *spellings.sides(window_size), softcap, alibi_slopes, sink,
        dropout_p, rng, deterministic, return_attn_probs, return_max_logits,
    )  # fmt: skip
    descales = (q_descale, k_descale, v_descale)
    if has_fp8_arguments((q, k, v), descales, out_dtype):
        return fp8.attention(
            VarlenFwdCall(q, k, v, *told, zero_tensors, block_table, *score), descales, out_dtype,
            out, return_lse=return_lse, return_rng=return_rng, generator=generator, sparse=sparse,
        )  # fmt: skip
    q, k, v = spellings.copy_if_last_dim_strided(*autocast.cast(q, k, v))
    max_seqlen_q, max_seqlen_k = spellings.integer(max_seqlen_q), spellings.integer(max_seqlen_k)
    if cu_seqlens_k is None:
        k, v, cu_seqlens_k = spellings.pack_keys(k, v, seqused_k, block_table)
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    validate.varlen(q, k, v, *sequences, block_table)
    check.varlen(q, k, *sequences, block_table, zero_tensors)
    return run(
        VarlenFwdCall(q, k, v, *sequences, zero_tensors, block_table, *score),
        return_lse=return_lse, return_rng=return_rng, generator=generator, out=out,
        refused=refused, sparse=sparse,
    )  # fmt: skip


def _call_op_unchecked(
    op: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    return_lse: bool,
    *sequences: Any,
) -> Result:
    """The op without anything around it."""
    args = (q, k, v, *sequences, softmax_scale, causal)
    allow_tf32 = ops.allow_tf32(q)
    if needs_grad(q, k, v):
        out, softmax_lse, _, _ = ops.differentiable(op, args, allow_tf32)
    else:
        precision = {"allow_tf32": True} if allow_tf32 else {}
        with internals.below_autograd():
            out, softmax_lse, _, _ = op(*args, **precision)
    return (out, softmax_lse) if return_lse else out


def _out_alone(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool
) -> Tensor:
    """out of the op ``fwd``; on the CPU the LSE of bf16 takes longer, and is left out here."""
    out = q.new_empty((*q.shape[:-1], *v.shape[-1:]))
    with internals.below_versions():
        ops.OUT_OF[ops.fwd](q, k, v, softmax_scale, causal, out=out)
    return out
