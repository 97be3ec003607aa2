"""The attention functions that models call, under the field's own names.

Arguments are a superset of flash-attn 2.8's, in its order and with its layout: (batch, seqlen,
heads, dim), or (total, heads, dim) for sequences of different lengths laid end to end. Each call
validates once and runs one op of ``torch.ops.flash_cute``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import check, ops, validate
from flash_cute.ops import autocast
from flash_cute.packed import PackedAttention
from flash_cute.rng import rng_of_call

# Defaults of numbers are the int 0: under torch.compile(dynamic=True) a float would become an input
# of the graph, which is compiled again when that turns out to be a constant.
_PLAIN = (0.0, (-1, -1), 0.0, None, False, False)  # defaults of the options that change the result
Result = Any  # out, or the tuple that return_lse or return_attn_probs asks for


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
) -> Result:
    """softmax(scale q k^T) v without the seqlen_q x seqlen_k matrix in memory (FlashAttention,
    arXiv 2205.14135).

    Args:
        q: (batch, seqlen_q, heads, dim), fp16, bf16, fp32 or fp64; any strides, last dimension
            contiguous. fp32 on CUDA is as accurate as fp32 products are, unless torch's matmuls
            are in TF32 at the time of the call (``torch.backends.cuda.matmul``). Under
            ``torch.autocast`` q, k and v are cast to its dtype, unless they are fp64.
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

    Returns:
        out (batch, seqlen_q, heads, dim_v) in q's dtype. With ``return_lse``: (out, softmax_lse),
        softmax_lse fp32 (fp64 for fp64 inputs) (batch, heads, seqlen_q), natural log,
        differentiable. With ``return_attn_probs``: (out, softmax_lse, probs), probs (batch, heads,
        seqlen_q, seqlen_k) in q's dtype, negative where dropout drops. With ``return_rng`` the
        state comes last, None where ``dropout_p`` is 0. A row that sees no key has out 0 and lse
        -inf, or ``sink``'s logit if there is one.

    Raises:
        TypeError, ValueError, NotImplementedError: see :mod:`flash_cute.validate`.

    Example::

        q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
        out, rng = flash_cute.flash_attn_func(q, k, v, dropout_p=0.1, return_rng=True)
        same = flash_cute.flash_attn_func(q, k, v, dropout_p=0.1, rng=rng)
    """
    options = (dropout_p, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    usual = type(causal) is type(return_lse) is bool and rng is None and return_rng is False
    usual = usual and (softmax_scale is None or type(softmax_scale) is float)
    usual = usual and not check.is_on()
    if usual and sink is None and generator is None and _on_cuda_without_grad(q, k, v):
        # Inference at its shortest: the op's own checks come first, and only a call that they
        # refuse goes on to the validation below, which says what is wrong with it.
        try:
            if options == _PLAIN:
                with internals.below_autograd():
                    precision = {"allow_tf32": True} if ops.allow_tf32(q) else {}
                    out, softmax_lse, _, _ = ops.fwd(q, k, v, softmax_scale, causal, **precision)
                return (out, softmax_lse) if return_lse else out
        except (RuntimeError, TypeError, ValueError):
            pass
    q, k, v = autocast.cast(q, k, v)
    validate.dense(q, k, v)
    check.dense(q, k)
    return _attend(
        ops.fwd, (q, k, v), (), q.shape[0],
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, sink, (generator, rng), return_lse, return_rng,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
) -> Result:
    """:func:`flash_attn_func` of q and kv (batch, seqlen_k, 2, heads_k, dim).

    Backward fills one gradient of kv in place of stacking two.
    """
    q, kv = autocast.cast(q, kv)
    validate.packed("kv", kv, 5, 2, q)
    k, v = kv.unbind(2)
    validate.dense(q, k, v)
    check.dense(q, k)
    return _attend(
        ops.fwd, (q, k, v), (), q.shape[0],
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, sink, (generator, rng), return_lse, return_rng, kv,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
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
) -> Result:
    """:func:`flash_attn_func` of qkv (batch, seqlen, 3, heads, dim).

    Backward fills one gradient of qkv in place of stacking three.
    """
    (qkv,) = autocast.cast(qkv)
    validate.packed("qkv", qkv, 5, 3)
    q, k, v = qkv.unbind(2)
    validate.dense(q, k, v)
    check.dense(q, k)
    return _attend(
        ops.fwd, (q, k, v), (), q.shape[0],
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, sink, (generator, rng), return_lse, return_rng, qkv,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
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
) -> Result:
    """Attention over sequences of different lengths laid end to end.

    Args:
        q: (total_q, heads, dim).
        k: (total_k, heads_k, dim), or (num_blocks, page_size, heads_k, dim) with ``block_table``.
        v: as k, with its own head dim.
        cu_seqlens_q: int32 (batch + 1): sequence b is rows ``[cu_seqlens_q[b], cu_seqlens_q[b +
            1])`` of q.
        cu_seqlens_k: int32 (batch + 1), likewise for k and v.
        max_seqlen_q: the longest sequence of q; longer ones are cut to it.
        max_seqlen_k: the longest sequence of k; longer ones are cut to it.
        block_table: int32 (batch, max_blocks), the page ids of each sequence's keys and values.
            Forward only.
        seqused_q: int32 (batch): only that many rows of each sequence take part.
        seqused_k: int32 (batch), likewise for k and v.
        zero_tensors: rows that belong to no sequence come back 0 (lse: -inf). They do in any case.

    The other arguments are :func:`flash_attn_func`'s. Offsets and lengths that leave their tensors
    are clamped on the device, without a host synchronisation; ``FLASH_CUTE_CHECK=1`` refuses them
    (:mod:`flash_cute.check`).

    Returns:
        out (total_q, heads, dim_v), and as asked softmax_lse (heads, total_q) and the signed
        probabilities (batch, heads, max_seqlen_q, max_seqlen_k).

    Raises:
        TypeError, ValueError, NotImplementedError: see :mod:`flash_cute.validate`.
    """
    q, k, v = autocast.cast(q, k, v)
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    validate.varlen(q, k, v, *sequences, block_table)
    check.varlen(q, k, *sequences, block_table, zero_tensors)
    return _attend(
        ops.varlen_fwd, (q, k, v), (*sequences, zero_tensors, block_table),
        cu_seqlens_q.shape[0] - 1,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, sink, (generator, rng), return_lse, return_rng,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
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
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    sink: Tensor | None = None,
    generator: torch.Generator | None = None,
    rng: Tensor | None = None,
    return_lse: bool = False,
    return_rng: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` of q and kv (total_k, 2, heads_k, dim)."""
    q, kv = autocast.cast(q, kv)
    validate.packed("kv", kv, 4, 2, q)
    k, v = kv.unbind(1)
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    validate.varlen(q, k, v, *sequences)
    check.varlen(q, k, *sequences, None, zero_tensors)
    return _attend(
        ops.varlen_fwd, (q, k, v), (*sequences, zero_tensors, None), cu_seqlens_q.shape[0] - 1,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, sink, (generator, rng), return_lse, return_rng, kv,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused: Tensor | None = None,
    zero_tensors: bool = False,
    sink: Tensor | None = None,
    generator: torch.Generator | None = None,
    rng: Tensor | None = None,
    return_lse: bool = False,
    return_rng: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` of qkv (total, 3, heads, dim), sequences shared by all."""
    (qkv,) = autocast.cast(qkv)
    validate.packed("qkv", qkv, 4, 3)
    q, k, v = qkv.unbind(1)
    validate.varlen_packed(q, k, v, cu_seqlens, max_seqlen, seqused)
    sequences = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, seqused, seqused)
    check.varlen(q, k, *sequences, None, zero_tensors, packed=True)
    return _attend(
        ops.varlen_fwd, (q, k, v), (*sequences, zero_tensors, None), cu_seqlens.shape[0] - 1,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, sink, (generator, rng), return_lse, return_rng, qkv,
    )  # fmt: skip


def _on_cuda_without_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not (type(q) is type(k) is type(v) is Tensor):  # fakes and other kinds are validated
        return False
    grad = q.requires_grad or k.requires_grad or v.requires_grad
    return (
        (q.is_cuda and k.is_cuda and v.is_cuda)
        and not (grad and torch.is_grad_enabled())
        and not torch.compiler.is_compiling()
        and not ops.transformed()
        and not internals.in_context_parallel()
    )


def _attend(
    op: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    sequences: tuple,
    batch: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    sink: Tensor | None,
    randomness: tuple[torch.Generator | None, Tensor | None],
    return_lse: bool,
    return_rng: bool,
    packed: Tensor | None = None,
) -> Result:
    """The one way from every public function to its op.

    ``sequences`` is what varlen ops take after q, k and v; ``packed`` the tensor they are views of.
    """
    q, k, v = qkv
    validate.whole_sequences()
    validate.flag("return_attn_probs", return_attn_probs)
    validate.flag("return_lse", return_lse)
    validate.flag("return_rng", return_rng)
    if sequences:
        validate.flag("zero_tensors", sequences[-2])
    validate.options(
        q, batch, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, sink,
    )  # fmt: skip
    grad = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sink is not None and sink.requires_grad)
    )
    if q.is_cuda:
        validate.cuda(q, v, sink)
    rng = rng_of_call(q, dropout_p, *randomness)
    args = (
        *sequences, softmax_scale, causal, *window_size, softcap, alibi_slopes, sink, dropout_p,
        rng, deterministic, return_attn_probs, False, ops.allow_tf32(q),
    )  # fmt: skip
    is_eager = not torch.compiler.is_compiling() and not ops.transformed()
    if not grad and is_eager:
        # Straight to the kernel: without gradients the Python autograd formula is only a detour.
        with internals.below_autograd():
            out, softmax_lse, _, probs = op(q, k, v, *args)
    elif packed is not None and packed.requires_grad and is_eager:
        separate_q = q if packed.shape[-3] == 2 else None
        out, softmax_lse, probs = PackedAttention.apply(packed, separate_q, sink, op, args)
    else:
        out, softmax_lse, _, probs = op(q, k, v, *args)
    results = [out]
    if return_lse or return_attn_probs:
        results.append(softmax_lse)
    if return_attn_probs:
        results.append(probs)
    if return_rng:
        results.append(rng)
    return tuple(results) if len(results) > 1 else out
