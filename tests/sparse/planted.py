"""Queries and keys of which it is known where attention goes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

SEQLEN, DIM = 8192, 64
Drawn = tuple[Tensor, Tensor]  # q and k, (1, seqlen, 1, dim)


def directions(count: int) -> Tensor:
    x = torch.randn(count, DIM)
    return x / x.norm(dim=1, keepdim=True)


def noise() -> Drawn:
    return torch.randn(SEQLEN, DIM), torch.randn(SEQLEN, DIM)


def cluster() -> Drawn:
    """Segments of 64 to 511 tokens of one of 16 topics, which attend to their topic."""
    lengths = torch.randint(64, 512, (SEQLEN // 64,))
    topic = torch.randint(16, (len(lengths),)).repeat_interleave(lengths)[:SEQLEN]
    own = 2.2 * math.sqrt(8) * directions(16)[topic]
    q, k = noise()
    return q + own, k + own


def needle() -> Drawn:
    """Each query looks for one of 40 keys, anywhere."""
    q, k = noise()
    sought = directions(40)
    k[torch.randperm(SEQLEN)[:40]] += 10 * sought
    return q + 9 * sought[torch.randint(40, (SEQLEN,))], k


def slash() -> Drawn:
    """Attention at fixed distances, as rotary embeddings give it."""
    angles = torch.arange(SEQLEN)[:, None] * 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    size = 1.5 * torch.randn(DIM // 2)
    x = torch.cat((angles.cos() * size, angles.sin() * size), 1)
    q, k = noise()
    return x + 0.5 * q, x + 0.5 * k


def sink() -> Drawn:
    """The first four keys get most."""
    q, k = noise()
    to = directions(1)
    k[:4] += 14 * to
    return q + 5 * to, k


KINDS: dict[str, Callable[[], Drawn]] = {
    "cluster": cluster, "needle": needle, "slash": slash, "sink": sink, "random": noise,
}  # fmt: skip


def draw(kind: str) -> Drawn:
    q, k = KINDS[kind]()
    return q[None, :, None], k[None, :, None]
