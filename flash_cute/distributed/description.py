"""Texts of all that ranks must agree on, which they compare.

A call of :func:`flash_cute.distributed.cp_attention` is described in two steps, since a graph knows
its options when it is made, and its tensors when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_cute.distributed.plan import Plan

OF_ONE_VALUE = ("alibi_slopes", "sink")  # options that are tensors, or None

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_options(options: Mapping[str, Any], return_lse: bool, qkv: tuple[Any, ...]) -> str:
    """The options that are not tensors, and the names of tensors that require grad."""
    # Formatting makes a graph's numbers constants, so it must come before they are read otherwise.
    listed = ", ".join(f"{name} {x}" for name, x in options.items() if name not in OF_ONE_VALUE)
    tensors = dict(zip("qkv", qkv, strict=True)) | {
        name: options.get(name) for name in OF_ONE_VALUE
    }
    differentiable = [name for name, x in tensors.items() if wants_gradient(x)]
    gradients = ", ".join(differentiable) or "nothing"
    return f"{listed}, return_lse {bool(return_lse)}, with gradients of {gradients}"


def of_attention(
    options: str, plan: Plan, qkv: tuple[Any, ...], same: Mapping[str, Tensor | None]
) -> str:
    """The whole call: ``options`` by :func:`of_options`, and ``same`` tensors of one value."""
    tensors = ", ".join(f"{n} {_kind(x, True)}" for n, x in zip("qkv", qkv, strict=True))
    rest = ", ".join(f"{n} {kind_and_value(x)}" for n, x in same.items())
    return f"cp_attention of {tensors}, {rest}, {options}, plan {plan.digest}"


def of_masked(plan: Plan, tensors: tuple[Tensor, ...], options: Mapping[str, Any]) -> str:
    """Attention of a layer whose tokens have a mask: q, k, v and the mask."""
    *qkv, mask = tensors
    kinds = ", ".join(f"{n} {_kind(x, True)}" for n, x in zip("qkv", qkv, strict=True))
    rest = of_options(options, False, tuple(qkv))
    return f"attention of {kinds}, attention_mask {mask.dtype}, {rest}, plan {plan.digest}"


def of_gradient(op: str, plan: Plan, *tensors: Tensor | None) -> str:
    """Backward of an op that communicates."""
    kinds = ", ".join(_kind(x, True) for x in tensors)
    return f"backward of cp_attention ({op}) of {kinds}, plan {plan.digest}"


def of_decoding(tensors: Mapping[str, Any], rest: Mapping[str, Any]) -> str:
    """A call of :func:`flash_cute.distributed.cp_decode`; of ``rest`` tensors have one value."""
    kinds = [f"{name} {_kind(x, False)}" for name, x in tensors.items()]
    kinds += [f"{name} {kind_and_value(x)}" for name, x in rest.items()]
    named = {**tensors, **rest}
    differentiable = [name for name, x in named.items() if wants_gradient(x)]
    gradients = f", with gradients of {', '.join(differentiable)}" if differentiable else ""
    return f"cp_decode of {', '.join(kinds)}{gradients}"


def wants_gradient(x: Any) -> bool:
    """Whether autograd will go through a tensor."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def kind_and_value(x: Any) -> str:
    """Shape, dtype and device; for a tensor on the CPU also a digest of its values. Those on GPUs
    are compared there."""
    if not isinstance(x, Tensor) or x.device.type != "cpu":
        return _kind(x, False)
    return f"{_kind(x, False)} of values {digest(x).item() % 2**64:016x}"


def _kind(x: Any, is_shared: bool) -> str:
    """Shape, dtype and device; with ``is_shared`` without the number of tokens."""
    if not isinstance(x, Tensor):
        return str(x)
    shape = list(x.shape)
    if is_shared and x.dim() >= 3:
        shape[-3] = -1
    return f"{shape} {x.dtype} {x.device.type}"


def digest(x: Tensor) -> Tensor:
    """int64 (): a hash of a tensor's bits, computed on its device."""
    bits = x.detach().contiguous().view(_BITS[x.dtype.itemsize]).flatten()
    return (bits.to(torch.int64) * _weights(len(bits), x.device)).sum()


@lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> Tensor:
    """Random odd weights, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu") * 2 + 1
    return weights.to(device)
