"""q, k and v rounded to e4m3 with descales, as the attention functions take them.

All of it is done in fp32 and rounded once: rotary embedding, then the op ``quantize_e4m3``
(:mod:`flash_cute.ops.quantize`) of each: k without its mean, one rotation of q and k, the cast. All
of it runs on the device, and nothing waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute import check
from flash_cute.call import spellings, validate
from flash_cute.call.fp8 import of_rows, sequence_of
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.cpu.kvcache import Rotary
from flash_cute.ops.quantize import DTYPES
from flash_cute.ops.typed import OPS

QK_SCALINGS, V_SCALINGS = ("head", "tensor", "row"), ("head", "tensor", "channel")


class Descales(TypedDict):
    """Arguments of the attention functions."""

    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor


class Fp8Inputs(NamedTuple):
    """What :func:`quantize_fp8` returns.

    Attributes:
        q, k, v: e4m3, in the shapes that were given.
        q_descale, k_descale, v_descale: fp32, what q, k and v are to be multiplied by: (1,),
            (batch, heads_k), or as "row" and "channel" say.
        k_mean: fp32 (batch, heads_k, dim), which was taken from k after its rotary embedding; None
            without ``smooth_k``.
        mean_scores: fp32 (batch, heads, seqlen_q), or (heads, total_q): q k_mean^T of each query,
            of q before it was rounded; None without ``smooth_k``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    k_mean: Tensor | None
    mean_scores: Tensor | None

    def descales(self) -> Descales:
        """The descales as arguments of the attention functions. No property: graphs of torch 2.10
        read none of a tuple."""
        return Descales(
            q_descale=self.q_descale, k_descale=self.k_descale, v_descale=self.v_descale
        )

    def corrected_lse(self, softmax_lse: Tensor, softmax_scale: float | None = None) -> Tensor:
        """The log-sum-exp of the scores of k with its mean: what partial results are merged by.

        Args:
            softmax_lse: (batch, heads, seqlen_q), or (heads, total_q): the attention's.
            softmax_scale: the attention's; None means ``dim ** -0.5``.

        Returns:
            softmax_lse plus ``softmax_scale * mean_scores``; without ``smooth_k`` itself.

        Example::

            import torch
            from flash_cute import flash_attn_func, quantize_fp8

            x = quantize_fp8(*torch.randn(3, 2, 100, 8, 64).unbind(), smooth_k=True)
            out, softmax_lse = flash_attn_func(x.q, x.k, x.v, **x.descales(), return_lse=True)
            softmax_lse = x.corrected_lse(softmax_lse)
        """
        if self.mean_scores is None:
            return softmax_lse
        scale = self.q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return softmax_lse + scale * self.mean_scores


def quantize_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qk_scaling: str = "head",
    v_scaling: str = "head",
    smooth_k: bool = False,
    hadamard: bool = False,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    power_of_two: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Fp8Inputs:
    """q, k and v in e4m3, each divided by descales, with which its largest value becomes 448, or
    with ``power_of_two`` more than 224.

    Args:
        q: (batch, seqlen_q, heads, dim), or (total_q, heads, dim) with ``cu_seqlens_q``; fp16, bf16
            or fp32.
        k: (batch, seqlen_k, heads_k, dim), or (total_k, heads_k, dim).
        v: as k, with its own head dim.
        qk_scaling: what shares a descale of q, and of k. "head": a kv head of a sequence, for q
            with all query heads that read it: (batch, heads_k). "tensor": all: (1,). "row": a row
            of a head: the shape of q, or k, with 1 for the head dim.
        v_scaling: likewise for v: "head", "tensor", or "channel": a dim of a kv head of a sequence:
            (batch, heads_k, dim_v).
        smooth_k: take k's mean over each sequence from it. The softmax and out stay as they are;
            the LSE does not: :meth:`Fp8Inputs.corrected_lse`. Not for calls with ``softcap`` or
            ``sink``, which depend on more than differences of scores.
        hadamard: multiply q and k by one orthonormal matrix, a Hadamard matrix with signs, which
            spreads outliers over the head dim, a power of two. Scores stay as they are.
        rotary_cos: (positions, rotary_dim / 2) in q's dtype: rotary embedding of q and k, key i of
            a sequence at position i, query i at ``i + seqlen_k - seqlen_q``, as causal masks have
            it. Of packed sequences, positions outside of the table take its first or last one.
        rotary_sin: as rotary_cos.
        rotary_interleaved: pairs are dims (2i, 2i + 1), else (i, i + rotary_dim / 2).
        power_of_two: the least descales that are powers of two: they change only exponents, so
            what the result stands for is exact in bf16.
        cu_seqlens_q: int32 (batch + 1): sequence b is rows ``[cu_seqlens_q[b], cu_seqlens_q[b +
            1])`` of q. Rows of no sequence have no part in descales and means.
        cu_seqlens_k: int32 (batch + 1), likewise for k and v.

    Values up to 1e37 are never cut off. e4m3 has no inf: inf and NaN become NaN, and have no part
    in descales and means. Descales of nothing but zeros are 1. Rows that a sequence does not use
    (``seqused``) take part. On CUDA means are sums in another order than on the CPU, the same one
    in each call; under ``torch.vmap`` those of packed sequences are in any order, unless
    ``torch.use_deterministic_algorithms(True)``.

    Returns:
        An :class:`Fp8Inputs`: pass its ``q``, ``k``, ``v`` and ``**descales()`` to
        :func:`flash_attn_func`, or with ``cu_seqlens_q`` to :func:`flash_attn_varlen_func`.

    Raises:
        TypeError, ValueError: names the argument, what was given and what is supported.
        NotImplementedError: q, k, v or a rotary table requires grad.

    Example::

        import torch
        from flash_cute import flash_attn_func, quantize_fp8

        q = torch.randn(2, 100, 8, 64, dtype=torch.bfloat16)
        k, v = torch.randn(2, 2, 300, 4, 64, dtype=torch.bfloat16).unbind()
        x = quantize_fp8(q, k, v, smooth_k=True, hadamard=True)
        out = flash_attn_func(x.q, x.k, x.v, **x.descales())  # (2, 100, 8, 64), bf16
    """
    _check_tensors(q, k, v, rotary_cos, rotary_sin)
    q, k, v = spellings.copy_if_last_dim_strided(q, k, v)
    _check_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k)
    for name, given in (
        ("smooth_k", smooth_k), ("hadamard", hadamard), ("power_of_two", power_of_two),
        ("rotary_interleaved", rotary_interleaved),
    ):  # fmt: skip
        validate.flag(name, given)
    _check_options(q, qk_scaling, v_scaling, hadamard)
    validate_kvcache.rotary(q, k, rotary_cos, rotary_sin, None)
    x, y, heads_k = q, k, k.shape[-2]
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, bool(rotary_interleaved))
        if cu_seqlens_k is None:
            _check_positions(len(rotary_cos), q.shape[1], k.shape[1])
        x = _rotated(q.float(), rotary, k.shape[1], cu_seqlens_q, cu_seqlens_k)
        y = _rotated(k.float(), rotary, k.shape[1], cu_seqlens_k, cu_seqlens_k)
    flags = bool(power_of_two), bool(hadamard)
    q8, q_descale, _ = OPS.quantize_e4m3(x, cu_seqlens_q, qk_scaling, heads_k, *flags)
    k8, k_descale, k_mean = OPS.quantize_e4m3(
        y, cu_seqlens_k, qk_scaling, heads_k, *flags, bool(smooth_k)
    )
    v8, v_descale, _ = OPS.quantize_e4m3(v, cu_seqlens_k, v_scaling, heads_k, flags[0])
    mean_scores = None
    if k_mean is not None:
        mean_scores = (x.float() * of_rows(k_mean, x, cu_seqlens_q)).sum(-1).transpose(-1, -2)
    return Fp8Inputs(q8, k8, v8, q_descale, k_descale, v_descale, k_mean, mean_scores)


def _check_tensors(q: Any, k: Any, v: Any, *rotary: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        validate.tensor(name, x)
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; supported: {validate.listed(DTYPES)}")
    given = [x for x in (q, k, v, *rotary) if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise NotImplementedError(
            "q, k, v or a rotary table requires grad, and rounding to fp8 has no gradient here: "
            "call under torch.no_grad(), or train with flash_cute.attention.FP8Attention"
        )


def _check_sequences(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    if cu_seqlens_q is None and cu_seqlens_k is None:
        if q.dim() == 3:
            raise ValueError(
                f"q has 3 dimensions, shape {tuple(q.shape)}, and cu_seqlens_q is None; packed "
                "sequences need cu_seqlens_q and cu_seqlens_k"
            )
        return validate.dense(q, k, v)
    validate.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0)
    if check.wanted(q):
        check.offsets("cu_seqlens_q", cu_seqlens_q.tolist(), len(q), None)
        check.offsets("cu_seqlens_k", cu_seqlens_k.tolist(), len(k), None)


def _check_options(q: Tensor, qk_scaling: Any, v_scaling: Any, hadamard: bool) -> None:
    for name, given, supported in (
        ("qk_scaling", qk_scaling, QK_SCALINGS), ("v_scaling", v_scaling, V_SCALINGS),
    ):  # fmt: skip
        if given not in supported:
            raise ValueError(f"{name} is {given!r}; supported: {', '.join(supported)}")
    dim = q.shape[-1]
    if hadamard and dim & (dim - 1):
        raise ValueError(f"hadamard is given, and q's head dim is {dim}; supported: powers of two")


def _check_positions(positions: int, seqlen_q: int, seqlen_k: int) -> None:
    if not validate.allowed(seqlen_q <= seqlen_k):
        raise ValueError(
            f"rotary_cos is given, and q has {seqlen_q} rows, k {seqlen_k}; q may have no more, as "
            "the last row of both is at one position"
        )
    if not validate.allowed(seqlen_k <= positions):
        raise ValueError(
            f"rotary_cos has {positions} positions, and k {seqlen_k} rows; it needs one for each"
        )


def _rotated(
    x: Tensor,
    rotary: Rotary,
    seqlen_k: int,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Tensor:
    """x, q or k, with the last row of each sequence at the position of the last key."""
    if cu_seqlens is None or cu_seqlens_k is None:
        row = torch.arange(x.shape[1], device=x.device) + (seqlen_k - x.shape[1])
        return rotary.rotate(x.flatten(0, 1), row.repeat(len(x))).view(x.shape)
    first = F.pad(cu_seqlens_k.diff() - cu_seqlens[1:], (0, 1))  # less the row of position 0
    row = torch.arange(len(x), device=x.device)
    return rotary.rotate(x, row + first[sequence_of(x, cu_seqlens)])
