"""The tolerances of a layer's numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flash_cute.attention.fp8 import FP8Attention
from flash_cute.precision.fp8_linear import FP8LinearLayer, FP8Scales

_OF_ELEMENTS = {  # relative to the largest compared element
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}
_OF_FP8 = 0.4  # E5M2 has two bits of mantissa, and projections follow each other
_OF_FACTOR = 0.2  # of an element's tolerance: rounding cancels in a sum over all
# Of the largest element of tensors computed with it.
_OF_RELATED = {torch.float16: 0.3, torch.bfloat16: 0.3}
_SMALL = 0.01
_FEW = 64  # with so few elements even the largest may be a sum that cancels
_DRAWS = 8


def largest_of(x: Tensor) -> float:
    """The largest magnitude, without a copy; nan if one is nan."""
    return float(torch.linalg.vector_norm(x.detach(), torch.inf))


def with_signs(x: Tensor, generator: torch.Generator) -> Tensor:
    """The same magnitudes with random signs."""
    signs = torch.randint(2, x.shape, generator=generator) * 2 - 1
    return x * signs.to(x.device, x.dtype)


@dataclass(frozen=True)
class Tolerance:
    """Equality up to the rounding of a dtype, at least ``least``, that of a layer's operands."""

    least: float = 0.0

    @staticmethod
    def of(layer: nn.Module) -> Tolerance:
        least = 0.0
        for module in layer.modules():
            if isinstance(module, (FP8LinearLayer, FP8Scales, FP8Attention)):
                least = _OF_FP8
            elif getattr(module, "optimization_level", None) == "aggressive":
                least = max(least, _OF_ELEMENTS[torch.bfloat16])
        return Tolerance(least)

    def typical(self, expected: Tensor, alike: Callable[[torch.Generator], Tensor]) -> float:
        """The largest element of results for inputs with other signs: a sum may cancel, but the
        rounding errors of its products do not. 0 if nothing is rounded, or if ``expected`` has many
        elements, whose largest is good enough."""
        if self.least == 0 or expected.numel() >= _FEW:
            return 0.0
        generator = torch.Generator().manual_seed(0)
        return max(largest_of(alike(generator)) for _ in range(_DRAWS))

    def equal(
        self, name: str, given: Tensor, expected: Tensor, related: float = 0.0, typical: float = 0.0
    ) -> None:
        """Raises AssertionError unless all elements are equal, without a common factor.

        Errors are relative to the largest element of ``expected``, to its ``typical`` size, or to a
        part of ``related``, the largest element of tensors computed together with it.
        """
        if given.shape != expected.shape:
            raise AssertionError(f"{tuple(given.shape)}, not {tuple(expected.shape)}")
        share = max(self.least, _OF_ELEMENTS.get(given.dtype, 0.0))
        part = max(_OF_RELATED.get(given.dtype, _SMALL), self.least)
        dtype, given, expected = given.dtype, given.detach().double(), expected.detach().double()
        largest = largest_of(expected)
        size = max(largest, part * related, typical)
        error = largest_of(given - expected)
        if not error <= share * size:
            raise AssertionError(f"{name} is off by {error:.3g}; {share * size:.3g} is allowed")
        given, expected = given.flatten(), expected.flatten()
        square = float(expected @ expected)
        if square <= 0 or (not typical and largest < size):
            return
        factor = float(given @ expected) / square
        allowed = max(_OF_FACTOR * _OF_ELEMENTS.get(dtype, 0.0), self.least / 2)
        if typical:  # with few elements errors may look like a factor
            allowed *= max(1.0, size / square**0.5)
        if not abs(factor - 1) <= allowed:
            raise AssertionError(f"{name} is {factor:.6g} times what it must be")
