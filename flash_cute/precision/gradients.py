"""Finds, unscales and clips gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The leaf tensors that get gradients in a backward pass of the loss. Those inside of a
    checkpoint or of the caller's autograd.Function are not found."""
    if loss.grad_fn is None:
        yield loss
    left, seen = [loss.grad_fn], set[Node]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor) and leaf.is_leaf:
            yield leaf
        left += [other for other, _ in node.next_functions]


def unscaled(gradients: list[Tensor], scale: float, max_norm: float | None) -> list[Tensor]:
    """Gradients divided by the loss scale, and clipped to a total norm if one is given.

    The given ones are not written. Sums of squares are in fp64: finite gradients have a finite
    norm.
    """
    if max_norm is None:
        return gradients if scale == 1 else [gradient / scale for gradient in gradients]
    norms = [torch.linalg.vector_norm(values(x), dtype=torch.float64) for x in gradients]
    norm = torch.linalg.vector_norm(torch.stack([x.to(norms[0].device) for x in norms])) / scale
    factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1), torch.nan)
    return [_times(gradient, factor / scale) for gradient in gradients]


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """Their product in fp32 or wider: fp16 cannot hold small factors."""
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
