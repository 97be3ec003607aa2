"""Gradients as an optimizer gets them, and whether its step moved anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def unscaled(gradients: list[Tensor], scale: float, max_norm: float | None) -> list[Tensor]:
    """Gradients divided by the loss scale, and clipped to a total norm if one is given.

    Those given are not written. Sums of squares are in fp64: finite gradients have a finite norm.
    """
    if max_norm is None:
        return gradients if scale == 1 else [gradient / scale for gradient in gradients]
    norms = [torch.linalg.vector_norm(values(x), dtype=torch.float64) for x in gradients]
    norm = torch.linalg.vector_norm(torch.stack([x.to(norms[0].device) for x in norms])) / scale
    factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1), torch.nan)
    return [_times(gradient, factor / scale) for gradient in gradients]


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """Their product in fp32 or wider: fp16 has no small factors."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return (gradient.to(wide) * factor.to(gradient.device, wide)).to(gradient.dtype)


def all_finite(gradients: list[Tensor]) -> bool:
    """Whether all numbers are finite; waits for the device."""
    held = [x for x in map(values, gradients) if x.numel()]
    if not held:
        return True
    return bool(nn.utils.get_total_norm(held, norm_type=torch.inf).isfinite())


def values(gradient: Tensor) -> Tensor:
    """The gradient, of a sparse one its values."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class Movement:
    """Copies of parameters, of those with sparse gradients the rows that these have, before a step;
    ``was_seen()`` after it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.places: list[Any] = [
            tuple(p.grad.coalesce().indices()) if p.grad is not None and p.grad.is_sparse else ...
            for p in parameters
        ]
        self.before = [x.clone() for x in self._present()]

    def _present(self) -> list[Tensor]:
        pairs = zip(self.parameters, self.places, strict=True)
        return [parameter.detach()[place] for parameter, place in pairs]

    def was_seen(self) -> Tensor:
        """Whether any number is another one, on the first parameter's device; waits for none."""
        pairs = zip(self._present(), self.before, strict=True)
        moved = [(now != then).any() for now, then in pairs]
        return torch.stack([x.to(moved[0].device, non_blocking=True) for x in moved]).any()
