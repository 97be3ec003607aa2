"""FlashAttention-3's two functions that ring attention and Transformer Engine wrap.

Arguments, their order and the results are those of ``hopper/flash_attn_interface.py``, where one
function of forward serves dense, packed and cached calls.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

import flash_cute
from flash_cute import check
from flash_cute.call import spellings, validate
from flash_cute.compat import calls
from flash_cute.mha import call as mha_call
from flash_cute.ops.typed import BwdCall, VarlenBwdCall


@calls.raises_as_flash_attn
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of dense tensors, of packed ones (``cu_seqlens_q`` and ``cu_seqlens_k``), or over a
    cache (``page_table``, ``kv_batch_idx``, ``leftpad_k``, ``k_new`` or ``seqused_k`` alone).

    Returns:
        (out, softmax_lse, out_accum, softmax_lse_accum), the last two empty: partial results of
        splits are not returned. ``out_`` is written and returned.

    Raises:
        NotImplementedError: packed keys with dense queries, ``seqused_q`` with dense queries or
            over a cache.
    """
    calls.check_no_metadata(scheduler_metadata)
    validate.flag("rotary_interleaved", rotary_interleaved)
    _check_lengths(max_seqlen_q, max_seqlen_k)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": calls.sides(window_size_left, window_size_right),
        "softcap": calls.softcap(softcap),
        "qv": qv,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "attention_chunk": attention_chunk,
        "num_splits": num_splits,
        "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
    }
    cached = any(x is not None for x in (page_table, kv_batch_idx, leftpad_k, k_new, rotary_cos))
    cached = cached or (seqused_k is not None and cu_seqlens_k is None)
    packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    if (cu_seqlens_k is not None and cu_seqlens_q is None) or (cached and cu_seqlens_k is not None):
        raise NotImplementedError(
            "cu_seqlens_k is given without cu_seqlens_q, or with a cache; give both offsets, or "
            "neither and seqused_k"
        )
    if seqused_q is not None and not (packed and not cached):
        raise NotImplementedError(
            "seqused_q is given for dense queries or with a cache; give cu_seqlens_q and "
            "cu_seqlens_k of packed tensors"
        )
    if cached:
        rows, page_table = calls.select_cache_rows(kv_batch_idx, page_table)
        with torch.no_grad():
            result, softmax_lse = flash_cute.flash_attn_with_kvcache(
                q, k, v, k_new, v_new, rotary_cos, rotary_sin, seqused_k, rows,
                leftpad_k, page_table, rotary_interleaved=rotary_interleaved,
                return_softmax_lse=True, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
                cu_seqlens_k_new=cu_seqlens_k_new,
                rotary_seqlens=None if rotary_cos is None else seqlens_rotary, **options,
            )  # fmt: skip
            out = calls.store("out_", out_, result)
    elif packed:
        sequences: Any = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, softmax_lse = flash_cute.flash_attn_varlen_func(
            q, k, v, *sequences, seqused_q=seqused_q, seqused_k=seqused_k, return_lse=True,
            out=out_, **options,
        )  # fmt: skip
    else:
        out, softmax_lse = flash_cute.flash_attn_func(q, k, v, return_lse=True, out=out_, **options)
    return out, softmax_lse, out.new_empty(0), softmax_lse.new_empty(0)


@calls.raises_as_flash_attn
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes the gradients of a dense or packed call into ``dq``, ``dk`` and ``dv``.

    Returns:
        softmax_d = rowsum(dout * out), shape and dtype of ``softmax_lse``.

    Raises:
        ValueError: one of ``dq``, ``dk`` and ``dv`` is None, or one of the offsets.
    """
    _check_lengths(max_seqlen_q, max_seqlen_k)
    validate.count("sm_margin", sm_margin)
    written = {"dq_": dq, "dk_": dk, "dv_": dv}
    for name, x in written.items():
        if x is None:
            raise ValueError(f"{name[:2]} is None; give a tensor like {name[1]} for the result")
    dout, q, k, v, out = spellings.copy_if_last_dim_strided(dout, q, k, v, out)
    left, right = calls.sides(window_size_left, window_size_right)
    score: Any = {
        "softmax_scale": softmax_scale, "is_causal": is_causal, "window_size_left": left,
        "window_size_right": right, "softcap": calls.softcap(softcap),
        "deterministic": deterministic,
    }  # fmt: skip
    call: BwdCall | VarlenBwdCall
    if cu_seqlens_q is cu_seqlens_k is sequed_q is sequed_k is None:
        validate.dense(q, k, v)
        check.dense(q, k)
        call = BwdCall(dout, q, k, v, out, softmax_lse, **score)
    else:
        longest = [spellings.integer(x) for x in (max_seqlen_q, max_seqlen_k)]
        given = (cu_seqlens_q, cu_seqlens_k, *longest, sequed_q, sequed_k)
        rows = cast("tuple[Tensor, Tensor, int, int, Any, Any]", given)
        validate.varlen(q, k, v, *rows)
        check.varlen(q, k, *rows, None, False)
        call = VarlenBwdCall(dout, q, k, v, out, softmax_lse, *rows, **score)
    return mha_call.backward(mha_call.validated(call), written, (None, None))[3]


def _check_lengths(max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    """Also where nothing reads them."""
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None:
            validate.length(name, spellings.integer(longest))
