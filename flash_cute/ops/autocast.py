"""``torch.autocast``: q, k and v are cast to its dtype, as by torch's own attention.

Sinks, slopes and log-sum-exps are not cast, nor are key/value caches, which are written in place.
The public functions cast before they validate; the ops ``fwd`` and ``varlen_fwd`` cast in direct
calls. Backward ops are called with forward's cast inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.ops.schema import OPS


def cast(*tensors: Any) -> tuple[Any, ...]:
    """``tensors`` in autocast's dtype if it is on for the first one's device; else unchanged.

    Only floating-point tensors of that device are cast, except fp64.
    """
    device = _device(tensors[0])
    if not torch.is_autocast_enabled(device):
        return tensors
    return _to(torch.get_autocast_dtype(device), device, tensors)


def cast_as(cache: Any, *tensors: Any) -> tuple[Any, ...]:
    """:func:`cast` to the dtype of ``cache``, which is not cast."""
    device = _device(cache)
    if not torch.is_autocast_enabled(device) or not _is_cast(cache, device):
        return tensors
    return _to(cache.dtype, device, tensors)


def _device(x: Any) -> str:
    return "cuda" if isinstance(x, Tensor) and x.is_cuda else "cpu"


def _is_cast(x: Any, device: str) -> bool:
    if not isinstance(x, Tensor) or x.device.type != device:
        return False
    return x.is_floating_point() and x.dtype != torch.float64


def _to(dtype: torch.dtype, device: str, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to(dtype) if _is_cast(x, device) else x for x in tensors)


def _kernel(op: Any, key: str) -> Callable[..., Any]:
    def kernel(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        qkv = cast(q, k, v)
        with internals.below(key):
            return op(*qkv, *options)

    return kernel


def register(library: torch.library.Library) -> None:
    """Registers the cast of the forward ops."""
    for name in ("fwd", "varlen_fwd"):
        op = getattr(OPS, name).default
        for key in ("AutocastCPU", "AutocastCUDA"):
            library.impl(name, _kernel(op, key), key)
