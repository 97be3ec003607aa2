"""The four functions: forward and backward, dense and packed."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute import check
from flash_cute.call import validate
from flash_cute.mha.call import Backward, Forward, backward, forward, unbounded, validated
from flash_cute.ops.typed import BwdCall, FwdCall, VarlenBwdCall, VarlenFwdCall


def mha_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_: Tensor | None = None,
    alibi_slopes_: Tensor | None = None,
    p_dropout: float = 0.0,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    return_softmax: bool = False,
    gen_: torch.Generator | None = None,
) -> Forward:
    """Attention of a dense batch.

    Args:
        q: (batch, seqlen_q, heads, dim), fp16, bf16, fp32 or fp64.
        k: (batch, seqlen_k, heads_k, dim), of which ``heads`` is a multiple.
        v: (batch, seqlen_k, heads_k, dim_v).
        out_: is written and returned; None allocates it.
        alibi_slopes_: fp32 (heads,) or (batch, heads).
        p_dropout: probability in [0, 1] that a weight is dropped.
        softmax_scale: factor of q k^T; None means ``dim ** -0.5``.
        is_causal: aligned to the bottom right, as the window is.
        window_size_left: keys before a query's own that it sees; negative: all.
        window_size_right: keys behind it, likewise.
        softcap: c > 0 replaces scores s by ``c * tanh(s / c)``; 0 is off.
        return_softmax: also return the probabilities; O(seqlen_q * seqlen_k) memory.
        gen_: what draws dropout's seed and offset; None is the device's default generator.

    Returns:
        (out, q, k, v, softmax_lse, philox_seed, philox_offset, softmax): out (batch, seqlen_q,
        heads, dim_v); softmax_lse fp32 (fp64 for fp64 inputs) (batch, heads, seqlen_q); seed and
        offset for :func:`mha_bwd`; softmax (batch, heads, seqlen_q, seqlen_k) in q's dtype,
        negative where dropout drops, or empty.

    Raises:
        TypeError, ValueError, NotImplementedError: see :mod:`flash_cute.call.validate`.

    Example::

        import torch
        from flash_cute.mha import mha_fwd

        q, k, v = torch.randn(3, 2, 100, 4, 32).unbind()
        out, *_ = mha_fwd(q, k, v, None, None, 0.0, 32**-0.5, True, -1, -1, 0.0, False, None)
    """
    validate.dense(q, k, v)
    check.dense(q, k)
    call = FwdCall(
        q, k, v, softmax_scale, is_causal, unbounded(window_size_left),
        unbounded(window_size_right), softcap, alibi_slopes_, None, p_dropout,
        return_softmax=return_softmax,
    )  # fmt: skip
    return forward(validated(call), out_, gen_)


def mha_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    block_table_: Tensor | None,
    alibi_slopes_: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float = 0.0,
    softmax_scale: float | None = None,
    zero_tensors: bool = False,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    return_softmax: bool = False,
    gen_: torch.Generator | None = None,
) -> Forward:
    """Attention of sequences of different lengths laid end to end.

    Args:
        q: (total_q, heads, dim).
        k: (total_k, heads_k, dim), or (num_blocks, page_size, heads_k, dim) with ``block_table_``.
        v: as k, with its own head dim dim_v.
        out_: is written and returned; None allocates it.
        cu_seqlens_q: int32 (batch + 1), where sequences of q begin and end.
        cu_seqlens_k: int32 (batch + 1), likewise for k and v.
        seqused_k: int32 (batch,): only that many keys of each sequence take part.
        block_table_: int32 (batch, max_blocks), the page ids of each sequence.
        max_seqlen_q: the longest sequence of q; longer ones are cut to it.
        max_seqlen_k: the longest sequence of k, likewise.
        zero_tensors: rows of no sequence are 0 (lse: -inf), which they are in any case.

    The other arguments are :func:`mha_fwd`'s.

    Returns:
        As :func:`mha_fwd`: out (total_q, heads, dim_v), softmax_lse (heads, total_q), softmax
        (batch, heads, max_seqlen_q, max_seqlen_k) or empty.

    Raises:
        TypeError, ValueError, NotImplementedError: see :mod:`flash_cute.call.validate`.

    Example::

        import torch
        from flash_cute.mha import mha_varlen_fwd

        q, k, v = torch.randn(3, 100, 4, 32).unbind()
        cu = torch.tensor([0, 60, 100], dtype=torch.int32)
        out, *_ = mha_varlen_fwd(
            q, k, v, None, cu, cu, None, None, None, 60, 60, is_causal=True
        )
    """
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, seqused_k)
    validate.varlen(q, k, v, *sequences, block_table_, "block_table_")
    validate.flag("zero_tensors", zero_tensors)
    check.varlen(q, k, *sequences, block_table_, zero_tensors)
    call = VarlenFwdCall(
        q, k, v, *sequences, zero_tensors, block_table_, softmax_scale, is_causal,
        unbounded(window_size_left), unbounded(window_size_right), softcap, alibi_slopes_, None,
        p_dropout, return_softmax=return_softmax,
    )  # fmt: skip
    return forward(validated(call), out_, gen_)


def mha_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq_: Tensor | None = None,
    dk_: Tensor | None = None,
    dv_: Tensor | None = None,
    alibi_slopes_: Tensor | None = None,
    p_dropout: float = 0.0,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    philox_seed: Tensor | None = None,
    philox_offset: Tensor | None = None,
) -> Backward:
    """The gradients of a call of :func:`mha_fwd`.

    Args:
        dout: the gradient of out, its shape and dtype.
        q, k, v: those of the call.
        out, softmax_lse: its results.
        dq_, dk_, dv_: each is written and returned; None allocates it.
        deterministic: bitwise repeatable.
        philox_seed, philox_offset: the call's results, int64 of one element; needed with dropout.

    The other arguments are those of the call.

    Returns:
        (dq, dk, dv, softmax_d): shapes and dtypes of q, k and v; softmax_d = rowsum(dout * out),
        shape and dtype of softmax_lse.

    Raises:
        TypeError, ValueError, NotImplementedError: see :mod:`flash_cute.call.validate`.

    Example::

        import torch
        from flash_cute.mha import mha_bwd, mha_fwd

        q, k, v = torch.randn(3, 2, 100, 4, 32).unbind()
        out, _, _, _, softmax_lse, seed, offset, _ = mha_fwd(q, k, v, p_dropout=0.1)
        dq, dk, dv, softmax_d = mha_bwd(
            torch.ones_like(out), q, k, v, out, softmax_lse,
            p_dropout=0.1, philox_seed=seed, philox_offset=offset,
        )
    """
    validate.dense(q, k, v)
    check.dense(q, k)
    call = BwdCall(
        dout, q, k, v, out, softmax_lse, None, softmax_scale, is_causal,
        unbounded(window_size_left), unbounded(window_size_right), softcap, alibi_slopes_, None,
        p_dropout, deterministic=deterministic,
    )  # fmt: skip
    return backward(
        validated(call), {"dq_": dq_, "dk_": dk_, "dv_": dv_}, (philox_seed, philox_offset)
    )


def mha_varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq_: Tensor | None,
    dk_: Tensor | None,
    dv_: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes_: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float = 0.0,
    softmax_scale: float | None = None,
    zero_tensors: bool = False,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    philox_seed: Tensor | None = None,
    philox_offset: Tensor | None = None,
) -> Backward:
    """The gradients of a call of :func:`mha_varlen_fwd` without pages and ``seqused_k``.

    Args:
        zero_tensors: gradients of rows of no sequence are 0, which they are in any case.

    The other arguments are :func:`mha_bwd`'s and those of the call.

    Returns:
        As :func:`mha_bwd`: dq (total_q, heads, dim), dk and dv likewise, softmax_d (heads,
        total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: see :mod:`flash_cute.call.validate`.

    Example::

        import torch
        from flash_cute.mha import mha_varlen_bwd, mha_varlen_fwd

        q, k, v = torch.randn(3, 100, 4, 32).unbind()
        cu = torch.tensor([0, 60, 100], dtype=torch.int32)
        forward = mha_varlen_fwd(q, k, v, None, cu, cu, None, None, None, 60, 60)
        out, softmax_lse = forward[0], forward[4]
        dq, dk, dv, softmax_d = mha_varlen_bwd(
            torch.ones_like(out), q, k, v, out, softmax_lse, None, None, None, cu, cu, None, 60, 60
        )
    """
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, None)
    validate.varlen(q, k, v, *sequences)
    validate.flag("zero_tensors", zero_tensors)
    check.varlen(q, k, *sequences, None, zero_tensors)
    call = VarlenBwdCall(
        dout, q, k, v, out, softmax_lse, *sequences, zero_tensors, None, softmax_scale, is_causal,
        unbounded(window_size_left), unbounded(window_size_right), softcap, alibi_slopes_, None,
        p_dropout, deterministic=deterministic,
    )  # fmt: skip
    return backward(
        validated(call), {"dq_": dq_, "dk_": dk_, "dv_": dv_}, (philox_seed, philox_offset)
    )
