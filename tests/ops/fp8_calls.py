"""Calls of the ops of e4m3 inputs, and what they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute.testing.e4m3 import E4M3, check, meant

__all__ = [
    "KINDS", "MASKS", "check", "descales_of", "meant", "on", "options_of", "scales", "values",
]  # fmt: skip

KINDS = ["none", "head", "tensor", "row", "row q", "row k", "channel", "all"]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (20, 7)},
    "left": {"window": (30, -1), "causal": True},
    "right": {"window": (-1, 3)},
}


def values(*shape: int, size: float = 1.0) -> Tensor:
    return (torch.randn(shape) * size).to(E4M3)


def scales(*shape: int) -> Tensor:
    return torch.exp(torch.randn(shape) / 3)


def descales_of(
    kind: str, q: Tensor, k: Tensor, v: Tensor, batch: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Random descales as the ops take them."""
    heads = (batch, k.shape[-2])
    rows_q, rows_k = (scales(*(1,) * (x.dim() == 3), *x.shape[:-1]) for x in (q, k))
    channels = scales(*heads, v.shape[-1])
    of_q, of_k, of_v = (x.expand(heads) for x in scales(3, 1, 1).unbind())
    return {
        "none": (None, None, None),
        "head": (scales(*heads), scales(*heads), scales(*heads)),
        "tensor": (of_q, of_k, of_v),
        "row": (rows_q, rows_k, None),
        "row q": (rows_q, scales(*heads), None),
        "row k": (None, rows_k, scales(*heads)),
        "channel": (None, None, channels),
        "all": (rows_q, rows_k, channels),
    }[kind]


def options_of(mask: dict[str, Any]) -> dict[str, Any]:
    """The ops' arguments for a mask."""
    left, right = mask.get("window", (-1, -1))
    causal = mask.get("causal", False)
    return {"is_causal": causal, "window_size_left": left, "window_size_right": right}


def on(device: str, *tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.to(device) for x in tensors]
