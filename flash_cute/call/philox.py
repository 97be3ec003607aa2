"""Counter-based random numbers for dropout: the same bits on every device and for every tiling.

Philox4x32-7 is due to Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3" (SC 2011). One call gives 128 bits, which serve the 16 elements of 32 queries x 32 keys whose
places are the same modulo 8, as the matrix instructions of a GPU spread a tile over the registers
of one thread. Each takes 16 bits: those of query octet y (of 4) are in word y, those of key octet x
are the word's byte x and the byte below it, for x = 0 the word's byte 3. So every element is
dropped with its exact chance, and two that share a byte are correlated by less than 0.004.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
DROP_STEPS = 2**16  # random numbers have 16 bits


def _multiply(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of ``multiplier * x``.

    ``multiplier - 2**32`` is negative and below 2**30 in magnitude, so its product with 32 bits
    fits int64; adding the missing ``2**32 * x`` afterwards changes the high word alone.
    """
    product = x * (multiplier - (MASK + 1))
    high = (product >> 32).add_(x).bitwise_and_(MASK)
    return high, product.bitwise_and_(MASK)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The seven-round Philox4x32 of ``counter`` under ``key``.

    ``counter`` holds four int64 tensors of 32-bit values whose shapes broadcast; ``key`` two 32-bit
    integers. Returns four int64 tensors of 32-bit values, of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def dropout_rate(dropout_p: float) -> tuple[int, float]:
    """(drop_below, keep_scale) of a dropout probability.

    A weight is dropped if its random number in [0, 65536) is below ``drop_below``, which is
    ``dropout_p`` in 65536ths, rounded; only 1 drops all. ``keep_scale`` is 1 / (1 - drop_below /
    65536), so that dropout keeps the mean; 0 if everything is dropped.
    """
    if dropout_p == 1:
        return DROP_STEPS, 0.0
    drop_below = min(round(dropout_p * DROP_STEPS), DROP_STEPS - 1)
    return drop_below, DROP_STEPS / (DROP_STEPS - drop_below)


def dropout_keep(
    rng: Tensor | None, dropout_p: float, bh: Tensor, rows: Tensor, cols: Tensor
) -> Tensor:
    """Which probabilities dropout keeps, True for kept.

    ``rng`` is int64 (2,): seed and offset. ``dropout_p`` in [0, 1] is the chance to drop, as
    :func:`dropout_rate` rounds it. ``bh`` holds ``batch * heads + query_head``, ``rows`` and
    ``cols`` the positions of queries and keys in their sequence: int64 vectors in any order, so
    that any part of the matrix can be computed. Returns bool (len(bh), len(rows), len(cols)).
    Raises ValueError without ``rng``.
    """
    if rng is None:
        raise ValueError(
            f"dropout_p={dropout_p} needs rng, an int64 tensor (seed, offset); got None"
        )
    seed, offset = rng.tolist()
    row_groups, row_index = torch.unique(rows // 32 * 8 + rows % 8, return_inverse=True)
    col_groups, col_index = torch.unique(cols // 32 * 8 + cols % 8, return_inverse=True)
    counter = (
        col_groups[None, None, :],
        row_groups[None, :, None],
        (bh & MASK)[:, None, None],
        torch.full((1, 1, 1), offset & MASK, device=rows.device),
    )
    key = (seed & MASK, (seed >> 32 ^ offset >> 32) & MASK)
    words = torch.stack(philox4x32(counter, key), 2)  # (bh, row group, 4, column group)
    bytes_ = [words >> 8 * i & 0xFF for i in range(4)]
    lanes = torch.stack([bytes_[i] << 8 | bytes_[i - 1] for i in range(4)], -1)
    kept = (lanes >= dropout_rate(dropout_p)[0]).flatten(3).flatten(1, 2)  # (bh, rows, columns)
    row_index = row_index * 4 + rows // 8 % 4
    col_index = col_index * 4 + cols // 8 % 4
    return kept.index_select(1, row_index).index_select(2, col_index)
