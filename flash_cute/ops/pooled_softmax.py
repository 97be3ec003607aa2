"""The op that says how much of its attention a block of queries gives to each block of keys
(:mod:`flash_cute.sparse.estimate`), on the CPU and for tracing. It has no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def register(library: torch.library.Library) -> None:
    torch.library.register_fake("flash_cute::pooled_softmax", _room, lib=library)
    library.impl("pooled_softmax", _pooled, "CPU")
    torch.library.register_vmap("flash_cute::pooled_softmax", _mapped, lib=library)


def _room(scores: Tensor, seen: Tensor, scale: float, queries: int, keys: int) -> Tensor:
    batch, heads, _, rows, columns = scores.shape
    return scores.new_empty((batch, heads, rows // queries, columns // keys))


def _pooled(scores: Tensor, seen: Tensor, scale: float, queries: int, keys: int) -> Tensor:
    """The mean over the rows of a block of queries, and the group, of softmax(scale scores) summed
    over each block of keys.

    ``scores`` fp32 (batch, heads, group, rows, columns), of ``queries`` rows and ``keys`` columns a
    block. ``seen`` int32 (batch or 1, rows): how many columns a row sees, from the first on; a row
    that sees none takes no part.
    """
    _check(scores, seen, queries, keys)
    if scale != 1:
        scores = scores * scale
    if (seen < scores.shape[-1]).any():
        columns = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
        hidden = (columns >= seen[..., None])[:, None, None]  # (batch or 1, 1, 1, rows, columns)
        scores = scores.masked_fill(hidden, -torch.inf)
    shares = scores.softmax(-1)
    taking_part = (seen > 0)[:, None, None]
    if not taking_part.all():
        shares.masked_fill_(~taking_part[..., None], 0)
    of_queries = shares.unflatten(3, (-1, queries)).sum((2, 4))  # before the other sum, of less
    of_blocks = of_queries.unflatten(-1, (-1, keys)).sum(-1)
    count = taking_part[:, :, 0].unflatten(-1, (-1, queries)).sum(-1) * scores.shape[2]
    return of_blocks / count.clamp(min=1)[..., None]


def _mapped(
    info: Any,
    in_dims: Sequence[int | None],
    scores: Tensor,
    seen: Tensor,
    scale: float,
    queries: int,
    keys: int,
) -> tuple[Tensor, int]:
    """The rule of ``torch.vmap``: samples become part of the batch."""
    samples: int = info.batch_size
    of_scores, of_seen = in_dims[:2]
    if of_scores is None:
        scores = scores.expand(samples, *scores.shape)
    else:
        scores = scores.movedim(of_scores, 0)
    batch = scores.shape[1]
    if of_seen is not None:
        seen = seen.movedim(of_seen, 0).expand(-1, batch, -1).flatten(0, 1)
    elif len(seen) > 1:
        seen = seen.repeat(samples, 1)
    folded = scores.flatten(0, 1).contiguous(), seen.contiguous()
    result: Tensor = torch.ops.flash_cute.pooled_softmax(*folded, scale, queries, keys)
    return result.unflatten(0, (samples, batch)), 0


def _check(scores: Tensor, seen: Tensor, queries: int, keys: int) -> None:
    if scores.dtype != torch.float32 or scores.dim() != 5:
        raise ValueError(
            f"scores is {scores.dtype} of shape {tuple(scores.shape)}; expected float32 (batch, "
            "heads, group, rows, keys)"
        )
    for name, value, size in (
        ("queries", queries, scores.shape[3]),
        ("keys", keys, scores.shape[4]),
    ):
        if value <= 0 or size % value != 0:
            raise ValueError(f"{name} is {value}; expected a divisor of {size}, of scores' size")
    if seen.dtype != torch.int32 or seen.dim() != 2 or seen.shape[1] != scores.shape[3]:
        raise ValueError(
            f"seen is {seen.dtype} of shape {tuple(seen.shape)}; expected int32 (batch or 1, "
            f"{scores.shape[3]})"
        )
    if seen.shape[0] not in (1, scores.shape[0]):
        raise ValueError(f"seen has a batch of {len(seen)}; expected 1 or {scores.shape[0]}")
