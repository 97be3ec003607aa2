"""Calls any layer with one tensor, and finds the device and dtype of its weights."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn


def device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Of the first floating point parameter or buffer; the CPU and fp32 if there is none."""
    for x in chain(model.parameters(), model.buffers()):
        if x.is_floating_point():
            return x.device, x.dtype
    return torch.device("cpu"), torch.float32


def call(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's output for x: ``layer(x)``, or ``layer(x, x, x)`` of nn.MultiheadAttention.

    Of several outputs the first.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return layer(x, x, x, need_weights=False)[0]
    out = layer(x)
    return out[0] if isinstance(out, tuple) else out
