"""The op that widens e4m3 to 16 bits: for tracing, and on the CPU. It has no gradient.

``dequantize_e4m3(values, descale, dtype)``: values (.., heads, dim) in e4m3, contiguous; descale
fp32 (n,), each of as many consecutive heads; fp16 or bf16. The result is values times descale in
fp32, rounded once: nothing is rounded if descales are powers of two within dtype's range. On CUDA a
kernel reads each number once (``csrc/kernels/passes/dequantize.cu``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call import validate
from flash_cute.ops.typed import OPS

NAME = "dequantize_e4m3"
DTYPES = (torch.float16, torch.bfloat16)


def register(library: torch.library.Library) -> None:
    torch.library.register_fake(f"flash_cute::{NAME}", _room, lib=library)
    library.impl(NAME, _dequantize, "CPU")
    if not internals.has_kernel(f"flash_cute::{NAME}", "CUDA"):
        library.impl(NAME, _dequantize, "CUDA")
    library.impl(NAME, _without_gradient, "Autograd")


def _without_gradient(values: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """Autograd's kernel. It also checks: errors of kernels in C++ have no types."""
    _check(values, descale, dtype)
    if torch.is_grad_enabled() and (values.requires_grad or descale.requires_grad):
        raise NotImplementedError(
            "values or descale requires grad, and widening e4m3 has no gradient here: call under "
            "torch.no_grad()"
        )
    with internals.below_autograd():
        return OPS.dequantize_e4m3(values, descale, dtype)


def _room(values: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    _check(values, descale, dtype)
    return values.new_empty(values.shape, dtype=dtype)


def _dequantize(values: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    _check(values, descale, dtype)
    of_heads = descale.repeat_interleave(values.shape[-2] // len(descale))
    return (values.float() * of_heads[:, None]).to(dtype)


def _check(values: Tensor, descale: Tensor, dtype: torch.dtype) -> None:
    validate.tensor("values", values)
    validate.tensor("descale", descale)
    if values.dtype != torch.float8_e4m3fn or values.dim() < 3:
        raise ValueError(
            f"values is {values.dtype} of shape {tuple(values.shape)}; expected "
            "torch.float8_e4m3fn (.., rows, heads, dim)"
        )
    heads = values.shape[-2]
    if descale.dtype != torch.float32 or descale.dim() != 1:
        raise ValueError(
            f"descale is {descale.dtype} of shape {tuple(descale.shape)}; expected torch.float32 "
            "of one dimension"
        )
    if len(descale) < 1 or heads % len(descale):
        raise ValueError(
            f"descale has {len(descale)} elements, and values {heads} heads; expected a divisor"
        )
    for name, x in (("values", values), ("descale", descale)):
        if not x.is_contiguous():
            raise ValueError(f"{name} is not contiguous: call contiguous()")
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}; supported: {validate.listed(DTYPES)}")
