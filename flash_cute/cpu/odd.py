"""Numbers that are not finite, or may overflow, in a call that ATen's flash kernel computes.

The kernel multiplies hidden values by 0, and its maximum and its exponential may lose a NaN. So
such numbers are kept from it, and what depends on them is computed by tiles: the rest has the bits
that it has without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Sums of up to 2^10 products of two such numbers, times a scale of up to 2^16, are finite in fp32.
LARGEST = 2.0**50
# Torch's threads share what has as many elements. On a busy machine they wait for each other, for
# longer than one of them takes for a few times as many.
_GRAIN = 2**15


class Odd(NamedTuple):
    """Rows, the last dimension, of tensors that hold such a number, and what depends on them."""

    row: Tensor  # bool (batch, seqlen_q, heads): of q, or of what has its shape
    key: Tensor  # bool (batch, seqlen_k, heads_k): of k or v
    of_rows: Tensor  # as row: results that depend on any
    of_keys: Tensor  # as key: gradients of k and v that depend on any

    @classmethod
    def of(cls, causal: bool, like_q: tuple[Tensor, ...], k: Tensor, v: Tensor) -> Odd | None:
        """None as a rule. ``like_q`` are tensors (batch, seqlen_q, heads, any)."""
        if all(is_usual(x) for x in (*like_q, k, v)):
            return None
        row, key = _unusual_rows(*like_q), _unusual_rows(k, v)
        group = row.shape[2] // key.shape[2]
        of_rows = row | _any_before(key, causal).repeat_interleave(group, 2)
        by_group = of_rows.unflatten(2, (-1, group)).any(-1)
        of_keys = key | _any_before(by_group.flip(1), causal).flip(1)
        return cls(row, key, of_rows, of_keys)

    def without_rows(self, x: Tensor) -> Tensor:
        """q, or what has its shape, with rows of 0 for the odd ones."""
        return x.masked_fill(self.row[..., None], 0)

    def without_keys(self, x: Tensor) -> Tensor:
        """The same of k or v."""
        return x.masked_fill(self.key[..., None], 0)


def is_usual(x: Tensor) -> bool:
    """Whether all numbers are finite and far from overflow."""
    parts: Sequence[Tensor] = (x,)
    if _GRAIN <= x.numel() <= 8 * _GRAIN and x.is_contiguous():
        parts = x.view(-1).split(_GRAIN - 1)
    for part in parts:
        low, high = torch.aminmax(part)
        if not (low.item() >= -LARGEST and high.item() <= LARGEST):  # NaN is neither
            return False
    return True


def _unusual_rows(*tensors: Tensor) -> Tensor:
    return torch.stack([(x.abs() <= LARGEST).all(-1).logical_not_() for x in tensors]).any(0)


def _any_before(x: Tensor, causal: bool) -> Tensor:
    """Whether any position of dim 1 up to each one is True; with ``causal`` False, any at all."""
    return x.int().cummax(1).values.bool() if causal else x.any(1, keepdim=True)
