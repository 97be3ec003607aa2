"""flash-attn 2.8's C++ functions over :mod:`flash_cute.mha`, as xFormers and others bind them.

Names, arguments and their order are those of ``csrc/flash_attn/flash_api.cpp``; lse is +inf for
rows without keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute import mha
from flash_cute.call import spellings, validate
from flash_cute.call.validate import options as validate_options
from flash_cute.compat import calls
from flash_cute.functional import kvcache


@calls.raises_as_flash_attn
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, softmax_lse, S_dmask, rng_state); S_dmask is empty without return_softmax."""
    q, k, v = spellings.copy_if_last_dim_strided(q, k, v)
    return _results(
        mha.mha_fwd(
            q, k, v, out, calls.detached(alibi_slopes), p_dropout, softmax_scale,
            is_causal, window_size_left, window_size_right, calls.softcap(softcap), return_softmax,
            gen,
        )
    )  # fmt: skip


@calls.raises_as_flash_attn
def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: torch.Generator | None = None,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of sequences laid end to end.

    ``num_splits`` splits the keys of a call with ``seqused_k``; 0 chooses as many splits as keep
    the GPU busy. Paged calls allow 0 and 1, as in flash-attn 2.8.4; other calls ignore it. With
    ``seqused_k`` and no pages, sequence b has the ``seqused_k[b]`` keys from ``cu_seqlens_k[b]``
    on, even beyond ``cu_seqlens_k[b + 1]``: xFormers' masks with gaps need it.
    """
    q, k, v = spellings.copy_if_last_dim_strided(q, k, v)
    max_seqlen_q, max_seqlen_k = spellings.integer(max_seqlen_q), spellings.integer(max_seqlen_k)
    if leftpad_k is not None:
        raise NotImplementedError(
            "leftpad_k is given, which varlen functions of flash_cute do not take; use "
            "flash_attn_with_kvcache(cache_leftpad=...)"
        )
    softcap = calls.softcap(softcap)
    validate.flag("is_causal", is_causal)
    validate.flag("zero_tensors", zero_tensors)
    validate.flag("return_softmax", return_softmax)
    validate.length("max_seqlen_k", max_seqlen_k)
    validate.count("num_splits", num_splits)
    if block_table is not None and num_splits > 1:
        raise NotImplementedError(
            f"num_splits is {num_splits}, and a block_table is given; give 0 or 1, or call "
            "flash_attn_with_kvcache, which takes any"
        )
    validate_options.number("p_dropout", p_dropout)
    if seqused_k is not None and block_table is None:
        if p_dropout != 0 or return_softmax:
            raise NotImplementedError(
                "seqused_k is given with p_dropout or return_softmax; give offsets without gaps"
            )
        rows = torch.arange(max_seqlen_k, dtype=torch.int32, device=k.device)
        pages = (cu_seqlens_k[:-1, None] + rows).clamp(max=max(len(k) - 1, 0))
        with torch.no_grad():
            result, lse = kvcache.flash_attn_with_kvcache(
                q, k[:, None], v[:, None], cache_seqlens=seqused_k, block_table=pages,
                cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale,
                causal=is_causal, window_size=calls.sides(window_size_left, window_size_right),
                softcap=softcap, alibi_slopes=alibi_slopes, num_splits=num_splits,
                return_softmax_lse=True,
            )  # fmt: skip
            state = q.new_zeros(2, dtype=torch.int64)
            out = calls.store("out", out, result)
            return out, calls.flash_attn_lse(lse), q.new_empty(0), state
    return _results(
        mha.mha_varlen_fwd(
            q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table,
            calls.detached(alibi_slopes), max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale,
            zero_tensors, is_causal, window_size_left, window_size_right, softcap, return_softmax,
            gen,
        )
    )  # fmt: skip


@calls.raises_as_flash_attn
def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: torch.Generator | None = None,
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv, softmax_d); writes to dq, dk and dv if they are given."""
    dout, q, k, v, out = spellings.copy_if_last_dim_strided(dout, q, k, v, out)
    seed, offset = (None, None) if rng_state is None else rng_state.unbind()
    return mha.mha_bwd(
        dout, q, k, v, out, calls.flash_cute_lse(softmax_lse), dq, dk, dv,
        calls.detached(alibi_slopes),
        p_dropout, softmax_scale, is_causal, window_size_left, window_size_right,
        calls.softcap(softcap), deterministic, seed, offset,
    )  # fmt: skip


@calls.raises_as_flash_attn
def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: torch.Generator | None = None,
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of sequences laid end to end."""
    dout, q, k, v, out = spellings.copy_if_last_dim_strided(dout, q, k, v, out)
    seed, offset = (None, None) if rng_state is None else rng_state.unbind()
    return mha.mha_varlen_bwd(
        dout, q, k, v, out, calls.flash_cute_lse(softmax_lse), dq, dk, dv, cu_seqlens_q,
        cu_seqlens_k, calls.detached(alibi_slopes), spellings.integer(max_seqlen_q),
        spellings.integer(max_seqlen_k), p_dropout, softmax_scale, zero_tensors, is_causal,
        window_size_left, window_size_right, calls.softcap(softcap), deterministic, seed, offset,
    )  # fmt: skip


@calls.raises_as_flash_attn
def fwd_kvcache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    seqlens_k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Attention over a cache, to which k and v are appended; returns (out, softmax_lse)."""
    validate.flag("is_causal", is_causal)
    validate.flag("is_rotary_interleaved", is_rotary_interleaved)
    calls.check_page_bounds(kcache, k, seqlens_k, block_table)
    with torch.no_grad():
        result, lse = kvcache.flash_attn_with_kvcache(
            q, kcache, vcache, k, v, rotary_cos, rotary_sin, seqlens_k, cache_batch_idx, leftpad_k,
            calls.contiguous(block_table), softmax_scale, is_causal,
            calls.sides(window_size_left, window_size_right), calls.softcap(softcap),
            is_rotary_interleaved, alibi_slopes, num_splits, True,
        )  # fmt: skip
        return calls.store("out", out, result), calls.flash_attn_lse(lse)


def _results(forward: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, _, _, _, softmax_lse, seed, offset, softmax = forward
    return out, calls.flash_attn_lse(softmax_lse), softmax, torch.stack((seed, offset))
