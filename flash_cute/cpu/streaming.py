"""Attention on the CPU over tiles of the caller's sizes: the streaming softmax of FlashAttention
(arXiv 2205.14135, algorithms 1 and 4), for plain attention of (n, seqlen, dim) in fp32 or fp64.

All n are computed at once. A step computes as many whole tiles as a block of 128 queries and 512
keys holds. Each tile of keys in a step still has its own row maxima, and rescales the sums of the
tiles before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_cute.cpu.tiles import KEY_BLOCK, QUERY_BLOCK


class Tile(NamedTuple):
    """Sizes of a tile of scores."""

    rows: int
    keys: int


def _steps(length: int, tile: int, block: int) -> Iterator[slice]:
    """[0, length) in slices of whole tiles; the last tile may be cut."""
    step = tile * max(1, block // tile)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _of_tiles(scores: Tensor, keys: int) -> Iterator[Tensor]:
    """Views of scores (n, rows, columns) as (n, rows, tiles, keys): the whole tiles, then a last
    one that is cut."""
    whole = scores.shape[-1] // keys * keys
    for part in (scores[..., :whole], scores[..., whole:]):
        if part.shape[-1] > 0:
            yield part.unflatten(-1, (-1, min(keys, part.shape[-1])))


def _finite(x: Tensor) -> Tensor:
    """``x`` with 0 for -inf: weights of scores of -inf are 0, not NaN."""
    return x.masked_fill(x == -torch.inf, 0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, l, m): softmax(scale q k^T) v, and of each row the sum of exp(scores - m) and the
    maximum m of the scores, (n, seqlen, 1)."""
    out = q.new_zeros((*q.shape[:2], v.shape[2]))
    sums, maxima = q.new_zeros((*q.shape[:2], 1)), q.new_full((*q.shape[:2], 1), -torch.inf)
    for rows in _steps(q.shape[1], tile.rows, QUERY_BLOCK):
        o, total, largest = out[:, rows], sums[:, rows], maxima[:, rows]
        for keys in _steps(k.shape[1], tile.keys, KEY_BLOCK):
            scores = torch.bmm(q[:, rows], k[:, keys].transpose(1, 2)).mul_(scale)
            values = v[:, keys]
            for tiles in _of_tiles(scores, tile.keys):
                count = tiles.shape[2] * tiles.shape[3]
                so_far = torch.cat((largest, tiles.amax(-1)), -1).cummax(-1).values
                before, last = _finite(so_far[..., 1:]), _finite(so_far[..., -1:])
                weights = tiles.sub_(before.unsqueeze(-1)).exp_()
                weights.mul_((before - last).exp_().unsqueeze(-1))
                rescale = (largest - last).exp_()
                total.mul_(rescale).add_(weights.sum((-2, -1)).unsqueeze(-1))
                o.mul_(rescale).add_(torch.bmm(weights.flatten(-2), values[:, :count]))
                largest.copy_(so_far[..., -1:])
                values = values[:, count:]
        o.div_(total.masked_fill(total == 0, 1))
    return out, sums, maxima


def backward(
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    scale: float,
    tile: Tile,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, where ``lse`` is m + log(l), (n, seqlen, 1)."""
    q, k, v = qkv
    dq, dk, dv = (torch.zeros_like(x) for x in qkv)
    row_dot = (dout * out).sum(-1, keepdim=True)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # rows whose weights are all 0
    for keys in _steps(k.shape[1], tile.keys, KEY_BLOCK):
        for rows in _steps(q.shape[1], tile.rows, QUERY_BLOCK):
            p = torch.bmm(q[:, rows], k[:, keys].transpose(1, 2)).mul_(scale)
            p.sub_(lse[:, rows]).exp_()
            dv[:, keys] += torch.bmm(p.transpose(1, 2), dout[:, rows])
            ds = torch.bmm(dout[:, rows], v[:, keys].transpose(1, 2))
            ds.sub_(row_dot[:, rows]).mul_(p).mul_(scale)
            dq[:, rows] += torch.bmm(ds, k[:, keys])
            dk[:, keys] += torch.bmm(ds.transpose(1, 2), q[:, rows])
    return dq, dk, dv
