"""Inputs that ATen's flash kernel computes wrongly: inf, NaN, and numbers that may overflow.

The kernel multiplies hidden values by 0, and its maximum and its exponential may lose a NaN. It is
therefore given 0 instead of such numbers, and the results that depend on them are computed by
tiles. All other results keep their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Sums of up to 2^10 products of two such numbers, times a scale of up to 2^16, are finite in fp32.
LARGEST = 2.0**50
# With this many elements or more torch uses several threads. On a busy machine these wait for each
# other longer than one thread takes for a few times as many.
_GRAIN = 2**15


class NonFinite(NamedTuple):
    """Which rows (vectors of the last dimension) hold such a number, and which depend on one."""

    row: Tensor  # bool (batch, seqlen_q, heads): of q, or of a tensor with its shape
    key: Tensor  # bool (batch, seqlen_k, heads_k): of k or v
    of_rows: Tensor  # as row: results that depend on such a number
    of_keys: Tensor  # as key: gradients of k and v that depend on such a number

    @classmethod
    def of(cls, causal: bool, like_q: tuple[Tensor, ...], k: Tensor, v: Tensor) -> NonFinite | None:
        """None if all are in range. ``like_q`` are tensors (batch, seqlen_q, heads, any)."""
        if all(is_in_range(x) for x in (*like_q, k, v)):
            return None
        row, key = _rows_out_of_range(*like_q), _rows_out_of_range(k, v)
        group = row.shape[2] // key.shape[2]
        of_rows = row | _any_before(key, causal).repeat_interleave(group, 2)
        by_group = of_rows.unflatten(2, (-1, group)).any(-1)
        of_keys = key | _any_before(by_group.flip(1), causal).flip(1)
        return cls(row, key, of_rows, of_keys)

    def without_rows(self, x: Tensor) -> Tensor:
        """q, or a tensor with its shape, with such rows set to 0."""
        return x.masked_fill(self.row[..., None], 0)

    def without_keys(self, x: Tensor) -> Tensor:
        """k or v with such rows set to 0."""
        return x.masked_fill(self.key[..., None], 0)


def is_in_range(x: Tensor) -> bool:
    """Whether all numbers are finite and far from overflow."""
    parts: Sequence[Tensor] = (x,)
    if _GRAIN <= x.numel() <= 8 * _GRAIN and x.is_contiguous():
        parts = x.view(-1).split(_GRAIN - 1)
    for part in parts:
        low, high = torch.aminmax(part)
        if not (low.item() >= -LARGEST and high.item() <= LARGEST):  # both are False for NaN
            return False
    return True


def _rows_out_of_range(*tensors: Tensor) -> Tensor:
    return torch.stack([(x.abs() <= LARGEST).all(-1).logical_not_() for x in tensors]).any(0)


def _any_before(x: Tensor, causal: bool) -> Tensor:
    """Whether any position of dim 1 up to each one is True; with ``causal`` False, any at all."""
    return x.int().cummax(1).values.bool() if causal else x.any(1, keepdim=True)
