"""fp8 inputs of the attention functions. Forward only, with descales.

q, k and v of e4m3 are computed as they are on the CPU and on Hopper. Scores are those of their
values, in fp32. Weights are rounded to e4m3, too: 2^8 times what they are relative to the largest
score so far, of each by 2^-4 at most, and by 2^-18 of the largest. They are divided by the sum of
what they were rounded to; the log-sum-exp is of weights before that. Out is bf16 or fp16. Hopper's
tensor cores keep about 14 bits of a sum of products: scores are off by about 2^-13 of the largest
partial sum, and of V's products each may lose 2^-13 of the sum of 128 keys, which then joins the
others in fp32.

Other calls are widened, and :func:`flash_cute.fp8.why_widened` says why: e5m2, v in 16 bits, out in
fp32, softcap, dropout, slopes, probabilities, lists of keys, DTensors, sinks with a gradient, and
devices without such kernels. q and k, and v if it is fp8 too, are cast to v's 16-bit dtype, or to
bf16, and the 16-bit kernels run. fp16 and bf16 hold every value of e4m3 and e5m2, so the cast is
exact, and the result is as accurate as that of the 16-bit kernels.

Descales are what fp8 values are multiplied by: a number, or a floating-point tensor of

* one element,
* (batch, heads_k), FlashAttention-3's: each entry holds for the query heads of its kv head,
* for q and k one of each row and head: the shape of q, or of k, with 1 for the head dim,
* for v one of each channel: (batch, heads_k, headdim_v).

They are positive and finite. Numbers are refused otherwise, tensors on the CPU; on CUDA
:func:`flash_cute.descale_status` tells, without waiting. Autocast has no part in such calls.

Numbers for q and k are multiplied into softmax_scale, and where nothing is widened tensors multiply
scores, in fp32. Of widened calls tensors, which the host does not read, multiply q, and those of
k's rows k; the product is rounded to bf16 once more. So powers of two are exact, and others change
a value by 2^-8 of it at most; rounding to e4m3 changed it by up to 2^-4. fp16 might overflow: with
v in fp16 attention is then computed in fp32. ``v_descale`` multiplies out, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_cute.call import spellings, validate

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE_DTYPES = (torch.float16, torch.bfloat16)
OUT_DTYPES = (*WIDE_DTYPES, torch.float32)
NAMES = ("q_descale", "k_descale", "v_descale")

Descale = Tensor | float | None


def has_fp8_arguments(
    tensors: tuple[Any, ...], descales: tuple[Descale, ...], out_dtype: Any
) -> bool:
    """Whether a call has fp8 inputs, or an argument that only such calls may have."""
    if out_dtype is not None or any(x is not None for x in descales):
        return True
    return any(isinstance(x, Tensor) and x.dtype in DTYPES for x in tensors)


def unpacked(name: str, x: Tensor, rank: int, parts: int) -> tuple[Tensor, ...]:
    """The parts of a packed tensor (..., parts, heads, dim) of the given rank, of any dtype."""
    validate.packed(name, x, rank, parts, dtypes=(*validate.DTYPES, *DTYPES))
    return x.unbind(-3)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: tuple[Descale, Descale, Descale],
    out_dtype: torch.dtype | None,
    out: Tensor | None = None,
) -> None:
    """Checks all but shapes of a call with fp8 inputs.

    Raises TypeError, ValueError, and NotImplementedError if an input requires grad or ``out`` is
    given.
    """
    if out is not None:
        raise NotImplementedError(
            "out is given; with fp8 q, k and v, descales or out_dtype leave it None, as the "
            "result is a new tensor"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        validate.tensor(name, x)
    if q.dtype not in DTYPES or k.dtype not in DTYPES:
        name, x = ("q", q) if q.dtype not in DTYPES else ("k", k)
        if not any(x.dtype in DTYPES for x in (q, k, v)):
            given = zip((*NAMES, "out_dtype"), (*descales, out_dtype), strict=True)
            raise ValueError(
                f"{', '.join(n for n, y in given if y is not None)} is given; descales and "
                f"out_dtype need fp8 q and k; {name} has dtype {x.dtype}"
            )
        raise TypeError(
            f"{name} has dtype {x.dtype}; with fp8, q and k are of {validate.listed(DTYPES)}, "
            "and v is of these or of 16 bits"
        )
    if v.dtype not in DTYPES and v.dtype not in WIDE_DTYPES:
        raise TypeError(
            f"v has dtype {v.dtype}; with fp8 q and k it is of "
            f"{validate.listed(DTYPES + WIDE_DTYPES)}"
        )
    if out_dtype is not None and out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; supported: {validate.listed(OUT_DTYPES)}")
    for name, given_descale in zip(NAMES, descales, strict=True):
        _check(name, given_descale, q)
    tensors = [x for x in (q, k, v, *descales) if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError(
            "backward through fp8 q and k is not supported: call under torch.no_grad(), or "
            "widen them first, q.to(torch.bfloat16)"
        )


@dataclass(frozen=True)
class Fp8Widening:
    """The casts and descales of a call with fp8 inputs, before and after 16-bit attention."""

    descales: tuple[Descale, Descale, Descale]  # of q, k and v
    k_rows: Tensor | None  # k's descale if each row has its own, and not in descales then
    dtype: torch.dtype  # of the attention that runs
    out_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        descales: tuple[Descale, Descale, Descale],
        out_dtype: torch.dtype | None,
    ) -> Fp8Widening:
        """That of arguments that :func:`check_arguments` has seen; out is bf16 without
        ``out_dtype``."""
        wide = next((x for x in (v.dtype, out_dtype) if x in WIDE_DTYPES), torch.bfloat16)
        if wide == torch.float16 and any(isinstance(x, Tensor) for x in descales[:2]):
            wide = torch.float32
        of_q, of_k, of_v = descales
        k_rows = of_k if isinstance(of_k, Tensor) and _has_shape(of_k, (*k.shape[:-1], 1)) else None
        kept = (of_q, of_k if k_rows is None else None, of_v)
        return cls(kept, k_rows, wide, out_dtype or torch.bfloat16)

    def widen(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """q, k and v in the dtype of the attention that runs, k times the descales of its rows."""
        k = k.to(self.dtype)
        if self.k_rows is not None:
            k = (k * self.k_rows.float()).to(self.dtype)
        return q.to(self.dtype), k, v.to(self.dtype)

    def descale(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: Any,
        cu_seqlens_q: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """q (batch, seqlen_q, heads, dim), or packed (total_q, heads, dim), and softmax_scale, one
        of them multiplied by the descales of q and k."""
        batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        heads = (batch, k.shape[-2])
        own = ((*q.shape[:-1], 1), (*k.shape[:-1], 1), (*heads, v.shape[-1]))
        for name, x, shape in zip(NAMES, self.descales, own, strict=True):
            check_shape(name, x, heads, shape)
        softmax_scale = scaled(softmax_scale, q.shape[-1], *self.descales[:2])
        factor: Tensor | None = None
        for x in self.descales[:2]:
            if isinstance(x, Tensor):
                x = x.float() if x.dim() > 2 else of_rows(x.float(), q, cu_seqlens_q)
                factor = x if factor is None else factor * x
        if factor is not None:
            q = (q * factor).to(q.dtype)
        return q, softmax_scale

    def finish(self, result: Any, cu_seqlens_q: Tensor | None = None) -> Any:
        """The function's result: out times the descale of v, in ``out_dtype``."""
        out, *rest = result if isinstance(result, tuple) else (result,)
        x = self.descales[2]
        if x is not None:
            out = out.float() * (
                of_rows(x.float(), out, cu_seqlens_q) if isinstance(x, Tensor) else x
            )
        out = out.to(self.out_dtype)
        return (out, *rest) if rest else out


def scaled(softmax_scale: Any, dim: int, *descales: Descale) -> Any:
    """softmax_scale, None for ``dim ** -0.5``, times the descales that are numbers."""
    softmax_scale = spellings.real(softmax_scale)
    for x in descales:
        if x is None or isinstance(x, Tensor):
            continue
        if softmax_scale is None or _is_number(softmax_scale):  # others are refused later
            softmax_scale = x * (dim**-0.5 if softmax_scale is None else softmax_scale)
    return softmax_scale


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _check(name: str, x: Descale, q: Tensor) -> None:
    if x is None or not validate.is_descale_tensor(x, name, q):
        return
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}; expected torch.float32")


def check_shape(name: str, x: Descale, heads: tuple[int, int], own: tuple[int, ...]) -> None:
    """``own``: the shape of descales of rows, or for v of channels, besides those of all."""
    if not isinstance(x, Tensor) or (x.dim() < 2 and x.numel() == 1):
        return
    if not (_has_shape(x, heads) or _has_shape(x, own)):
        what = "channel" if name == "v_descale" else "row and head"
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; expected one element, (batch, heads_k), {heads}, "
            f"or one for each {what}, {own}"
        )


def _has_shape(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Sizes are compared only if there are as many: of a graph they are not known."""
    return x.dim() == len(shape) and tuple(x.shape) == shape


def of_rows(x: Tensor, rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A descale of one element, (batch, heads_k) or (batch, heads_k, dim) as an fp32 tensor that
    broadcasts to ``rows``, (batch, seqlen, heads, dim) or (total, heads, dim)."""
    if x.dim() < 2:
        return x.reshape(1)  # without dimensions it would be rounded to the dtype of ``rows`` first
    x = x[..., None] if x.dim() == 2 else x
    x = x.repeat_interleave(rows.shape[-2] // x.shape[1], dim=1)  # (batch, heads, 1 or dim)
    if cu_seqlens is None:
        return x[:, None]
    if len(x) == 0:
        return x.new_ones(())
    return x[sequence_of(rows, cu_seqlens).clamp_(max=len(x) - 1)]


def sequence_of(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64 (total,): the sequence that each of ``rows`` (total, ..) belongs to; their number for
    rows before the first one and behind the last one."""
    row = torch.arange(len(rows), device=rows.device, dtype=cu_seqlens.dtype)
    sequence = torch.bucketize(row, cu_seqlens[1:], right=True)
    return sequence.masked_fill_(row < cu_seqlens[0], len(cu_seqlens) - 1)


def least_power_of_two(x: Tensor) -> Tensor:
    """The least powers of two that are not less than x > 0."""
    mantissa, _ = torch.frexp(x)  # in [0.5, 1): the quotient is a power of two, and exact
    return x / torch.where(mantissa == 0.5, 1.0, mantissa)


def power_of_two_scale(x: Tensor, dims: tuple[int, ...], largest: float) -> Tensor:
    """The least power of two s >= 2^-126 with ``max |x| <= s * largest``, in fp32 or wider.

    The maximum is over ``dims``, which are kept as 1, and over finite values. Such a scale changes
    only exponents: fp8 values times s are exact in any dtype that holds them.
    """
    amax = torch.where(x.isfinite(), x.abs(), 0).amax(dims, keepdim=True)
    ratio = amax.to(torch.promote_types(x.dtype, torch.float32)) / largest
    return least_power_of_two(ratio.clamp(min=2.0**-126))
