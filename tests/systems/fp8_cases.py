"""What tests of fp8 share: how to measure rounding, and small models."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def decibels(value: Tensor, exact: Tensor) -> float:
    """Signal to noise of a rounded value."""
    value, exact = value.detach().double(), exact.detach().double()
    return float(10 * torch.log10(exact.square().sum() / (value - exact).square().sum()))


def mantissas(x: Tensor) -> int:
    """How many different mantissas the numbers have that are not zero, each rounded to 12 bits;
    those of least magnitude left out: fp8's subnormal numbers have fewer."""
    x = x.detach().double().abs().flatten()
    fractions, _ = torch.frexp(x[x > x.max() / 1000])
    # A common factor moves all mantissas round a circle: neighbours are told by their distance.
    places = torch.log2(fractions).remainder(1).sort().values
    steps = torch.cat([places[1:], places[:1] + 1]) - places
    return max(1, int((steps > 2**-12).sum()))


def mlp(*sizes: int, device: str = "cpu", dtype: torch.dtype | None = None) -> nn.Sequential:
    """Linear layers of these sizes with GELU between them, from seed 0."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, out in pairwise(sizes):
        layers += [nn.Linear(width, out, device=device, dtype=dtype), nn.GELU()]
    return nn.Sequential(*layers[:-1])
