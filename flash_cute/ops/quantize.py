"""The op that rounds a tensor to e4m3, with its descales: for tracing, and, made of torch's
operators, on the CPU, under vmap, and on CUDA if the library has no kernels. It has no gradient.

``quantize_e4m3(x, cu_seqlens, scaling, heads_k, power_of_two, hadamard, subtract_mean)``: x (batch,
seqlen, heads, dim), or packed (total, heads, dim) with ``cu_seqlens`` int32 (batch + 1); fp16, bf16
or fp32. All is done in fp32, and rounded once: x without the mean of each sequence, times a
Hadamard matrix with signs, divided by its descale. What shares a descale is said by ``scaling``:

* "head": a kv head of a sequence, (batch, heads_k); ``heads_k`` is the number of kv heads, if x is
  of query heads that share them;
* "tensor": all, (1,);
* "row": a row of a head, x's shape with 1 for the head dim;
* "channel": a dim of a head of a sequence, (batch, heads, dim).

The results are values, descale and mean, (batch, heads, dim) or None, all contiguous. inf and NaN
become NaN, and have no part in descales and means; other numbers never do. The descale of nothing
but zeros is 1.

CUDA's kernels (``csrc/kernels/passes/quantize.cu``) have the same bits, but for means. Those are
sums in fp32 of numbers times 1 / seqlen, in an order that depends on the sequence's length, the
heads and the head dim alone: of up to 32 rows, then of these sums in eight slices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call import validate
from flash_cute.call.fp8 import least_power_of_two, of_rows, sequence_of
from flash_cute.ops import autograd
from flash_cute.ops.typed import OPS

NAME = "quantize_e4m3"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SCALINGS = ("head", "tensor", "row", "channel")
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def register(library: torch.library.Library) -> None:
    torch.library.register_fake(f"flash_cute::{NAME}", _room, lib=library)
    library.impl(NAME, _computed, "CPU")
    if not internals.has_kernel(f"flash_cute::{NAME}", "CUDA"):
        library.impl(NAME, _computed, "CUDA")
    library.impl(NAME, _without_gradient, "Autograd")
    library.impl(NAME, _quantize, "FuncTorchBatched")


def _without_gradient(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    scaling: str = "head",
    heads_k: int | None = None,
    *flags: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Autograd's kernel. It also checks: errors of kernels in C++ have no types."""
    if internals.in_forward_mode():
        autograd.refuse_tangents((x,))
    _checked(x, cu_seqlens, scaling, heads_k, *flags[1:2])
    with internals.below_autograd():
        return OPS.quantize_e4m3(x, cu_seqlens, scaling, heads_k, *flags)


def _room(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    scaling: str = "head",
    heads_k: int | None = None,
    power_of_two: bool = False,
    hadamard: bool = False,
    subtract_mean: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    heads_k = _checked(x, cu_seqlens, scaling, heads_k, hadamard)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    of_dims = (batch, *x.shape[-2:])
    shapes = {"head": (batch, heads_k), "tensor": (1,), "row": (*x.shape[:-1], 1)}
    return (
        x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
        x.new_empty(shapes.get(scaling, of_dims), dtype=torch.float32),
        x.new_empty(of_dims, dtype=torch.float32) if subtract_mean else None,
    )


def _computed(*args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """By torch's operators, where there is no kernel."""
    values, descale, mean = _quantize(*args)
    return values.contiguous(), descale.contiguous(), mean


def _quantize(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    scaling: str = "head",
    heads_k: int | None = None,
    power_of_two: bool = False,
    hadamard: bool = False,
    subtract_mean: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    heads_k = _checked(x, cu_seqlens, scaling, heads_k, hadamard)
    x, mean = x.float(), None
    if subtract_mean:
        mean = _mean(x, cu_seqlens)
        if len(mean) > 0:  # else all rows are of no sequence
            x = x - of_rows(mean, x, cu_seqlens)
    if hadamard:
        x = _spread(x)
    largest = _largest(torch.where(x.isfinite(), x.abs(), 0), scaling, heads_k, cu_seqlens)
    descale = largest / largest.new_full((), LARGEST)  # a number would be inverted on CUDA
    descale = descale.clamp(min=torch.finfo(torch.float32).tiny)
    if power_of_two:
        descale = least_power_of_two(descale)
    descale = descale.masked_fill(largest == 0, 1.0)
    factor = descale if scaling == "row" else of_rows(descale, x, cu_seqlens)
    values = (x / factor).clamp(-LARGEST, LARGEST)  # rows of no sequence may be larger
    values = torch.where(x.isfinite(), values, torch.nan).to(torch.float8_e4m3fn)
    return values, descale, mean


def _checked(
    x: Tensor, cu_seqlens: Tensor | None, scaling: str, heads_k: int | None, hadamard: bool = False
) -> int:
    """The number of kv heads of valid arguments."""
    validate.tensor("x", x)
    if x.dtype not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype}; supported: {validate.listed(DTYPES)}")
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "x requires grad, and rounding to e4m3 has no gradient here: call under torch.no_grad()"
        )
    layout = "(batch, seqlen, heads, dim)" if cu_seqlens is None else "(total, heads, dim)"
    if x.dim() != (4 if cu_seqlens is None else 3):
        given = "None" if cu_seqlens is None else "given"
        raise ValueError(
            f"x has shape {tuple(x.shape)}, and cu_seqlens is {given}; expected {layout}"
        )
    if cu_seqlens is not None and validate.index_tensor("cu_seqlens", cu_seqlens, x) < 1:
        raise ValueError("cu_seqlens is empty; it holds batch + 1 offsets")
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}; supported: {', '.join(SCALINGS)}")
    heads, dim = x.shape[-2:]
    if dim < 1:
        raise ValueError("x has head dim 0; expected 1 or more")
    heads_k = heads if heads_k is None else heads_k
    if heads_k < 1 or heads % heads_k or (scaling == "channel" and heads_k != heads):
        raise ValueError(
            f"heads_k is {heads_k}, and x has {heads} heads; expected a divisor of these, or with "
            'scaling "channel" their number'
        )
    if hadamard and dim & (dim - 1):
        raise ValueError(f"hadamard is given, and x's head dim is {dim}; supported: powers of two")
    return heads_k


def _mean(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The mean over each sequence of x's finite values and zeros, (batch, heads, dim)."""
    x = torch.where(x.isfinite(), x, 0)
    if cu_seqlens is None:
        return (x / max(x.shape[1], 1)).sum(1)
    sequence = sequence_of(x, cu_seqlens)
    counts = F.pad(cu_seqlens.diff().clamp(min=1), (0, 1), value=1)  # the last: of no sequence
    sums = x.new_zeros((len(cu_seqlens), *x.shape[1:]))
    return sums.index_add(0, sequence, x / counts[sequence][:, None, None])[:-1]


def _spread(x: Tensor) -> Tensor:
    """x (.., dim) times an orthonormal matrix: the signs of Rudin and Shapiro, then a Hadamard
    matrix. The signs keep what all dims have in common from becoming one large value."""
    dim = x.shape[-1]
    signs = others = x.new_ones(1)
    while len(signs) < dim:
        signs, others = torch.cat((signs, others)), torch.cat((signs, -others))
    x = x * (signs * dim**-0.5)
    for _ in range(dim.bit_length() - 1):
        first, second = x.chunk(2, -1)
        x = torch.stack((first + second, first - second), -1).flatten(-2)
    return x


def _largest(sizes: Tensor, scaling: str, heads_k: int, cu_seqlens: Tensor | None) -> Tensor:
    """The largest of the magnitudes that share a descale, in the descales' shape."""
    if scaling == "row":
        return sizes.amax(-1, keepdim=True)
    if scaling != "channel":  # by kv heads
        sizes = sizes.amax(-1).unflatten(-1, (heads_k, -1)).amax(-1)
    if cu_seqlens is not None:
        sequence = sequence_of(sizes, cu_seqlens).view(-1, *(1,) * (sizes.dim() - 1))
        largest = sizes.new_zeros((len(cu_seqlens), *sizes.shape[1:]))
        largest = largest.scatter_reduce(0, sequence.expand(sizes.shape), sizes, "amax")[:-1]
    else:
        rows = sizes.shape[1]
        largest = sizes.amax(1) if rows else sizes.new_zeros((len(sizes), *sizes.shape[2:]))
    if scaling == "tensor":
        return F.pad(largest.flatten(), (0, 1)).amax(0, keepdim=True)  # with a 0, if there is none
    return largest
