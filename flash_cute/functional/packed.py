"""The attention functions of packed tensors: qkv, or q and kv, in one.

They are :mod:`flash_cute.functional`'s, but that backward fills one gradient of the packed tensor,
except in sparse calls, whose gradients autograd puts together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import check
from flash_cute.call import fp8, spellings, validate
from flash_cute.functional.dense_varlen import flash_attn_func, flash_attn_varlen_func
from flash_cute.functional.run import Result, run
from flash_cute.ops import autocast
from flash_cute.ops.typed import FwdCall, VarlenFwdCall
from flash_cute.sparse.value import Sparse


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
    return_max_logits: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    sparse: Sparse | None = None,
    **others: Any,
) -> Result:
    """:func:`flash_attn_func` of q and kv (batch, seqlen_k, 2, heads_k, dim).

    Backward fills one gradient of kv in place of stacking two.

    Example::

        import torch
        from flash_cute import flash_attn_kvpacked_func

        q = torch.randn(2, 100, 8, 64)
        kv = torch.randn(2, 300, 2, 4, 64)  # 4 heads of keys, each for 2 of queries
        out = flash_attn_kvpacked_func(q, kv)  # (2, 100, 8, 64)
    """
    sink = spellings.sink(sink, s_aux, learnable_sink)
    return_lse = spellings.check_extra_kwargs(flash_attn_kvpacked_func, others) or return_lse
    if fp8.has_fp8_arguments((q, kv), (q_descale, k_descale, v_descale), out_dtype):
        k, v = fp8.unpacked("kv", kv, 5, 2)
        return flash_attn_func(
            q, k, v,
            dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, sink=sink, generator=generator, rng=rng, return_lse=return_lse,
            return_rng=return_rng, return_max_logits=return_max_logits,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, out_dtype=out_dtype,
            sparse=sparse,
        )  # fmt: skip
    q, kv = spellings.copy_if_last_dim_strided(*autocast.cast(q, kv))
    validate.packed("kv", kv, 5, 2, q)
    k, v = kv.unbind(2)
    validate.dense(q, k, v)
    check.dense(q, k)
    call = FwdCall(
        q, k, v, softmax_scale, causal, *spellings.sides(window_size), softcap, alibi_slopes, sink,
        dropout_p, rng, deterministic, return_attn_probs, return_max_logits,
    )  # fmt: skip
    return run(
        call, return_lse=return_lse, return_rng=return_rng, generator=generator, packed=kv,
        sparse=sparse,
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
    return_max_logits: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    sparse: Sparse | None = None,
    **others: Any,
) -> Result:
    """:func:`flash_attn_func` of qkv (batch, seqlen, 3, heads, dim).

    Backward fills one gradient of qkv in place of stacking three.

    Example::

        import torch
        from flash_cute import flash_attn_qkvpacked_func

        qkv = torch.randn(2, 100, 3, 8, 64, requires_grad=True)
        out = flash_attn_qkvpacked_func(qkv, causal=True)  # (2, 100, 8, 64)
        out.sum().backward()
    """
    sink = spellings.sink(sink, s_aux, learnable_sink)
    return_lse = spellings.check_extra_kwargs(flash_attn_qkvpacked_func, others) or return_lse
    if fp8.has_fp8_arguments((qkv,), (q_descale, k_descale, v_descale), out_dtype):
        q, k, v = fp8.unpacked("qkv", qkv, 5, 3)
        return flash_attn_func(
            q, k, v,
            dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, sink=sink, generator=generator, rng=rng, return_lse=return_lse,
            return_rng=return_rng, return_max_logits=return_max_logits,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, out_dtype=out_dtype,
            sparse=sparse,
        )  # fmt: skip
    (qkv,) = spellings.copy_if_last_dim_strided(*autocast.cast(qkv))
    validate.packed("qkv", qkv, 5, 3)
    q, k, v = qkv.unbind(2)
    validate.dense(q, k, v)
    check.dense(q, k)
    call = FwdCall(
        q, k, v, softmax_scale, causal, *spellings.sides(window_size), softcap, alibi_slopes, sink,
        dropout_p, rng, deterministic, return_attn_probs, return_max_logits,
    )  # fmt: skip
    return run(
        call, return_lse=return_lse, return_rng=return_rng, generator=generator, packed=qkv,
        sparse=sparse,
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
    return_max_logits: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    sparse: Sparse | None = None,
    **others: Any,
) -> Result:
    """:func:`flash_attn_varlen_func` of q and kv (total_k, 2, heads_k, dim).

    Example::

        import torch
        from flash_cute import flash_attn_varlen_kvpacked_func

        q, kv = torch.randn(100, 8, 64), torch.randn(250, 2, 8, 64)
        cu_seqlens_q = torch.tensor([0, 60, 100], dtype=torch.int32)
        cu_seqlens_k = torch.tensor([0, 200, 250], dtype=torch.int32)
        out = flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, 60, 200)
    """
    sink = spellings.sink(sink, s_aux, learnable_sink)
    return_lse = spellings.check_extra_kwargs(flash_attn_varlen_kvpacked_func, others) or return_lse
    if fp8.has_fp8_arguments((q, kv), (q_descale, k_descale, v_descale), out_dtype):
        k, v = fp8.unpacked("kv", kv, 4, 2)
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, seqused_q=seqused_q, seqused_k=seqused_k,
            zero_tensors=zero_tensors, sink=sink, generator=generator, rng=rng,
            return_lse=return_lse, return_rng=return_rng, return_max_logits=return_max_logits,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, out_dtype=out_dtype,
            sparse=sparse,
        )  # fmt: skip
    q, kv = spellings.copy_if_last_dim_strided(*autocast.cast(q, kv))
    max_seqlen_q, max_seqlen_k = spellings.integer(max_seqlen_q), spellings.integer(max_seqlen_k)
    validate.packed("kv", kv, 4, 2, q)
    k, v = kv.unbind(1)
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    validate.varlen(q, k, v, *sequences)
    check.varlen(q, k, *sequences, None, zero_tensors)
    call = VarlenFwdCall(
        q, k, v, *sequences, zero_tensors, None, softmax_scale, causal,
        *spellings.sides(window_size), softcap, alibi_slopes, sink, dropout_p, rng, deterministic,
        return_attn_probs, return_max_logits,
    )  # fmt: skip
    return run(
        call, return_lse=return_lse, return_rng=return_rng, generator=generator, packed=kv,
        sparse=sparse,
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
    return_max_logits: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    sparse: Sparse | None = None,
    **others: Any,
) -> Result:
    """:func:`flash_attn_varlen_func` of qkv (total, 3, heads, dim), sequences shared by all.

    Example::

        import torch
        from flash_cute import flash_attn_varlen_qkvpacked_func

        qkv = torch.randn(100, 3, 8, 64)  # sequences of 60 and 40 tokens, end to end
        cu_seqlens = torch.tensor([0, 60, 100], dtype=torch.int32)
        out = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 60, causal=True)  # (100, 8, 64)
    """
    sink = spellings.sink(sink, s_aux, learnable_sink)
    return_lse = (
        spellings.check_extra_kwargs(flash_attn_varlen_qkvpacked_func, others) or return_lse
    )
    if fp8.has_fp8_arguments((qkv,), (q_descale, k_descale, v_descale), out_dtype):
        q, k, v = fp8.unpacked("qkv", qkv, 4, 3)
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, seqused_q=seqused, seqused_k=seqused,
            zero_tensors=zero_tensors, sink=sink, generator=generator, rng=rng,
            return_lse=return_lse, return_rng=return_rng, return_max_logits=return_max_logits,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, out_dtype=out_dtype,
            sparse=sparse,
        )  # fmt: skip
    (qkv,) = spellings.copy_if_last_dim_strided(*autocast.cast(qkv))
    max_seqlen = spellings.integer(max_seqlen)
    validate.packed("qkv", qkv, 4, 3)
    q, k, v = qkv.unbind(1)
    validate.varlen_packed(q, k, v, cu_seqlens, max_seqlen, seqused)
    sequences = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, seqused, seqused)
    check.varlen(q, k, *sequences, None, zero_tensors, packed=True)
    call = VarlenFwdCall(
        q, k, v, *sequences, zero_tensors, None, softmax_scale, causal,
        *spellings.sides(window_size), softcap, alibi_slopes, sink, dropout_p, rng, deterministic,
        return_attn_probs, return_max_logits,
    )  # fmt: skip
    return run(
        call, return_lse=return_lse, return_rng=return_rng, generator=generator, packed=qkv,
        sparse=sparse,
    )  # fmt: skip
