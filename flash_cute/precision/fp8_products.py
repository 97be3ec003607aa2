"""Rounding to fp8 with one scale a tensor, and the product of two rounded matrices."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute._torch_internals import constant_in_graphs, scaled_mm

TENSOR_CORE_MULTIPLE = 16  # of both dimensions of a factor, except the rows of the first


class Rounded(NamedTuple):
    """A tensor in fp8: its values are ``data * inverse_scale``."""

    data: Tensor  # fp8
    scale: Tensor  # fp32, no dimensions
    inverse_scale: Tensor  # fp32, no dimensions; NaN if the tensor held NaN or Inf

    def t(self) -> Rounded:
        """The transposed matrix, in rows again."""
        return Rounded(self.data.t().contiguous(), self.scale, self.inverse_scale)


def scale_and_round(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in fp8, contiguous and clamped to fp8's range."""
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype, memory_format=torch.contiguous_format)


def round_to_fp8(
    x: Tensor,
    dtype: torch.dtype,
    margin: int = 0,
    history: Tensor | None = None,
    past: Tensor | None = None,
    clamp: bool = True,
) -> Rounded:
    """Rounds a tensor to fp8, scaled so that its largest absolute value becomes the format's.

    Args:
        x: any floating dtype and shape.
        dtype: the fp8 format to round to.
        margin: spare powers of two.
        history: largest absolute values of earlier uses, the last one first, 0 for missing ones.
            The largest of them gives the scale, or ``x`` itself if all are 0. x's own is written
            into it, if it is finite.
        past: the largest of the history, if it is known.
        clamp: whether x may be clamped by its history. Otherwise the scale also covers x.
    """
    amax = x.abs().max().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    bound = amax
    if history is not None:
        past = history.max() if past is None else past
        bound = torch.where(past > 0, past, amax) if clamp else torch.maximum(past, amax)
        finite = torch.where(amax.isfinite(), amax, 0.0)
        history.copy_(torch.cat([finite.view(1), history[:-1]]))
    least = 1e-30  # keeps scales of tiny tensors finite; a global would be an input of graphs
    bound = (bound.clamp(min=least) * 2.0**margin).clamp(max=torch.finfo(torch.float32).max)
    most = torch.finfo(dtype).max
    scale = most / bound
    inverse_scale = torch.where(amax.isfinite(), bound / most, torch.nan)
    return Rounded(scale_and_round(x, scale, dtype), scale, inverse_scale)


@constant_in_graphs
def on_tensor_cores(device: torch.device, a: torch.dtype, b: torch.dtype) -> bool:
    """Whether the GPU's tensor cores multiply these formats: compute capability 8.9 or newer, and
    not E5M2 by E5M2."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    both_e5m2 = a == b == torch.float8_e5m2
    return torch.cuda.get_device_capability(device) >= (8, 9) and not both_e5m2


def multiply_rows(
    a: Rounded, b: Rounded, out_dtype: torch.dtype, tensor_cores: bool, fast: bool = False
) -> Tensor:
    """The products of a's rows with b's rows, (m, k) and (n, k) to (m, n): ``a @ b.T``.

    Args:
        a, b: contiguous matrices in fp8.
        out_dtype: dtype of the result.
        tensor_cores: multiply in fp8 on the GPU. Otherwise fp8 values are cast, which is exact, and
            multiplied in bf16 on CUDA for 16-bit results, else in fp32.
        fast: on tensor cores, whether to sum in their accumulators, which have about 14 bits.
    """
    if tensor_cores and a.data.numel():
        half = out_dtype in (torch.float16, torch.bfloat16)
        result = scaled_mm(
            padded(a.data, rows=False),
            padded(b.data, rows=True).t(),
            a.inverse_scale,
            b.inverse_scale,
            out_dtype if half else torch.float32,
            fast,
        )
        return _in_dtype(result[:, : b.data.shape[0]], out_dtype)
    halves = a.data.is_cuda and out_dtype in (torch.float16, torch.bfloat16)
    exact = torch.bfloat16 if halves else torch.float32
    device = a.data.device.type
    with torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext():
        product = a.data.to(exact) @ b.data.to(exact).t()
    first, then = _factors(a.inverse_scale, b.inverse_scale)
    return _in_dtype(product.float() * first * then, out_dtype)


def _factors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(x * y, 1); or, if the product might leave fp32's range, (the smaller, the larger), to be
    multiplied one after the other."""
    both = x * y
    inside = (both > 1e-30) & (both < 1e30)
    first = torch.where(inside, both, torch.minimum(x, y))
    return first, torch.where(inside, 1.0, torch.maximum(x, y))


def has_autocast(device: str) -> bool:
    """Whether torch has autocast for this device; torch's own check breaks graphs in torch 2.11."""
    return device != "meta"


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, which must not be a no-op: in torch 2.11 a compiled autograd.Function whose
    result is one has zeros for gradients."""
    return x if x.dtype == dtype else x.to(dtype)


def padded(x: Tensor, rows: bool) -> Tensor:
    """An fp8 matrix padded with zeros to multiples that tensor cores need: its columns, and with
    ``rows`` also its rows."""
    missing = [-size % TENSOR_CORE_MULTIPLE for size in x.shape]
    below = missing[0] if rows else 0
    if not below and not missing[1]:
        return x
    return F.pad(x.view(torch.uint8), (0, missing[1], 0, below)).view(x.dtype)
