"""FlashAttention-3's module of functions, over flash_cute.

Arguments, their order and the results are those of ``hopper/flash_attn_interface.py``.
``num_splits`` (except over a cache), ``pack_gqa`` and ``sm_margin`` schedule its kernels, and are
ignored here; ``qv``, ``attention_chunk``, and ``q_descale`` over a cache of 16 bits raise an error
that names them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute.call import validate
from flash_cute.compat import calls
from flash_cute.compat.flash_attn_3_raw import _flash_attn_backward, _flash_attn_forward  # noqa: F401
from flash_cute.functional import combine, kvcache
from flash_cute.functional import dense_varlen as functional
from flash_cute.functional import packed as functional_packed


def _options(
    softmax_scale: float | None, causal: bool, window_size: Any, softcap: float
) -> dict[str, Any]:
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": calls.window(window_size),
        "softcap": calls.softcap(softcap),
    }


@calls.raises_as_flash_attn
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_cute.flash_attn_func`; ``return_attn_probs`` returns (out, softmax_lse)."""
    validate.flag("return_attn_probs", return_attn_probs)
    return functional.flash_attn_func(
        q, k, v, **_options(softmax_scale, causal, window_size, softcap),
        deterministic=deterministic, return_lse=return_attn_probs, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
        num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin,
    )  # fmt: skip


@calls.raises_as_flash_attn
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of qkv (batch, seqlen, 3, heads, dim), or (batch, seqlen,
    num_heads_q + 2 heads_k, dim)."""
    validate.flag("return_attn_probs", return_attn_probs)
    more: dict[str, Any] = {
        "deterministic": deterministic, "return_lse": return_attn_probs, "q_descale": q_descale,
        "k_descale": k_descale, "v_descale": v_descale, "attention_chunk": attention_chunk,
        "sm_margin": sm_margin,
    }  # fmt: skip
    more |= _options(softmax_scale, causal, window_size, softcap)
    if qkv.dim() == 5:
        return functional_packed.flash_attn_qkvpacked_func(qkv, **more)
    heads_k = calls.kv_heads(qkv, num_heads_q)
    return functional.flash_attn_func(*qkv.split([num_heads_q, heads_k, heads_k], 2), **more)


@calls.raises_as_flash_attn
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_cute.flash_attn_varlen_func`; ``return_attn_probs`` returns (out, lse)."""
    validate.flag("return_attn_probs", return_attn_probs)
    return functional.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q,
        seqused_k=seqused_k, **_options(softmax_scale, causal, window_size, softcap),
        deterministic=deterministic, return_lse=return_attn_probs, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
        num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin,
    )  # fmt: skip


@calls.raises_as_flash_attn
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`flash_cute.flash_attn_combine`: (out, softmax_lse)."""
    return combine.flash_attn_combine(out_partial, lse_partial, out, out_dtype)


@calls.raises_as_flash_attn
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """:func:`flash_cute.flash_attn_with_kvcache`, without gradients. ``cache_batch_idx`` selects
    rows of ``page_table``; ``return_softmax_lse`` returns (out, softmax_lse, None, None).
    ``scheduler_metadata`` is what :func:`get_scheduler_metadata` returned. Over caches of 8 bits q
    may be e4m3; k and v, which are quantised here, are bf16 then."""
    calls.check_no_metadata(scheduler_metadata)
    cache_batch_idx, page_table = calls.select_cache_rows(cache_batch_idx, page_table)
    with torch.no_grad():
        results = kvcache.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
            cache_leftpad, **_options(softmax_scale, causal, window_size, softcap),
            rotary_interleaved=rotary_interleaved, num_splits=num_splits,
            return_softmax_lse=return_softmax_lse, page_table=page_table,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            rotary_seqlens=None if rotary_cos is None else rotary_seqlens, qv=qv,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            attention_chunk=attention_chunk, pack_gqa=pack_gqa, sm_margin=sm_margin,
        )  # fmt: skip
    return (*results, None, None) if return_softmax_lse else results


def get_scheduler_metadata(*_: Any, device: Any = None, **__: Any) -> Tensor:
    """An empty int32 tensor: calls over a cache make their own plan, and do not read it."""
    return torch.empty(0, dtype=torch.int32, device=device)
