"""How much of its attention a row of blocks gives to each block of keys, without all scores.

Two estimates are averaged, the second with twice the weight. Sums along antidiagonals of patches of
stride x stride scores (XAttention, arXiv 2503.16428) cost 1 / stride of the scores, and see every
query and key. An upper bound of scores by each channel's largest and smallest of a few keys (Quest,
arXiv 2406.10774) costs next to nothing, and sees single keys that a sum drowns.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute.sparse.grid import BlockGrid

STRIDES = (1, 2, 4, 8, 16, 32, 64)
QUERIES_OF_BOUND, KEYS_OF_BOUND = 4, 32  # whose mean, and whose extremes, the bound takes
_SCORES_AT_ONCE = 2**22


@torch.no_grad()
def estimated_mass(
    q: Tensor,
    k: Tensor,
    grid: BlockGrid,
    *,
    stride: int = 16,
    softmax_scale: float | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Estimated shares of attention, of which each row's sum to 1.

    Args:
        q: (batch, seqlen, heads, dim).
        k: (batch, seqlen, heads_k, dim).
        grid: the blocks.
        stride: of patches, a power of two up to 64; 16 costs half of what 8 does, which finds more
            of single keys.
        softmax_scale: factor of q k^T; None means ``dim ** -0.5``.
        lengths: (batch,) tokens of each sequence; None means all.

    Returns:
        fp32 (batch, heads_k, blocks, blocks), the mean over the query heads of a group.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    with without_autocast(q.device):
        sums = _mass_of_patches(q, k, grid, stride, scale, lengths)
        return (sums + 2 * _mass_of_bound(q, k, grid, scale, lengths)) / 3


@torch.no_grad()
def block_mass(
    q: Tensor,
    k: Tensor,
    grid: BlockGrid,
    *,
    softmax_scale: float | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The same as it is, from all scores, of which few are held at once: fp32 (batch, heads_k,
    blocks, blocks). It takes as long as attention does without fused kernels."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    with without_autocast(q.device):
        return _mass_of_patches(q, k, grid, 1, scale, lengths)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast on the device, which may be one that has none."""
    if device.type not in ("cpu", "cuda"):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _mass_of_patches(
    q: Tensor, k: Tensor, grid: BlockGrid, stride: int, scale: float, lengths: Tensor | None
) -> Tensor:
    q, k = (padded(x, grid).unflatten(1, (-1, stride)) for x in (q, k))
    queries = q.flip(2).permute(0, 3, 1, 2, 4).flatten(-2)
    keys = k.permute(0, 3, 1, 2, 4).flatten(-2)
    return _pooled_softmax(queries, keys, grid, scale / stride, lengths)


def _mass_of_bound(
    q: Tensor, k: Tensor, grid: BlockGrid, scale: float, lengths: Tensor | None
) -> Tensor:
    runs = padded(q, grid).unflatten(1, (-1, QUERIES_OF_BOUND)).float().mean(2).transpose(1, 2)
    largest, smallest = extremes(k, grid, lengths, KEYS_OF_BOUND)
    queries = torch.cat((runs.clamp(min=0), runs.clamp(max=0)), -1).to(q.dtype)
    keys = torch.cat((largest, smallest), -1).to(k.dtype)
    return _pooled_softmax(queries, keys, grid, scale, lengths)


def extremes(
    k: Tensor, grid: BlockGrid, lengths: Tensor | None, keys: int
) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of each channel over every ``keys`` tokens, each fp32 (batch,
    heads, blocks * block / keys, dim); 0 of what holds no token."""
    tokens = are_tokens(grid, k.device, lengths)[..., None, None]
    whole = padded(k, grid).float()
    largest, smallest = (
        whole.masked_fill(~tokens, fill).unflatten(1, (-1, keys))
        for fill in (-torch.inf, torch.inf)
    )
    none = ~tokens.unflatten(1, (-1, keys)).any(2)
    of_max, of_min = (
        x.masked_fill(none, 0).transpose(1, 2) for x in (largest.amax(2), smallest.amin(2))
    )
    return of_max, of_min


def padded(x: Tensor, grid: BlockGrid) -> Tensor:
    """x (batch, seqlen, heads, dim) with zeros up to whole blocks."""
    return F.pad(x, (0, 0, 0, 0, 0, grid.blocks * grid.block - x.shape[1]))


def are_tokens(grid: BlockGrid, device: torch.device, lengths: Tensor | None) -> Tensor:
    """bool (1 or batch, blocks * block): what is no padding."""
    places = torch.arange(grid.blocks * grid.block, device=device)
    whole = grid.seqlen if lengths is None else lengths.unsqueeze(-1)
    return (places < whole).view(-1, len(places))


def _pooled_softmax(
    queries: Tensor, keys: Tensor, grid: BlockGrid, scale: float, lengths: Tensor | None
) -> Tensor:
    """softmax(scale queries keys^T), summed over the keys of a block, meaned over the queries of a
    block and the heads of a group, by some rows of blocks at a time.

    ``queries`` (batch, heads, a * blocks, width), ``keys`` (batch, heads_k, b * blocks, width).
    """
    batch, heads_k = keys.shape[:2]
    a, b = (x.shape[2] // grid.blocks for x in (queries, keys))
    queries = (queries * scale).unflatten(1, (heads_k, -1)).flatten(0, 1)  # (.., group, ..)
    transposed = keys.flatten(0, 1).mT
    scores_of_row = len(queries) * queries.shape[1] * a * keys.shape[2]
    step = max(1, _SCORES_AT_ONCE // max(1, scores_of_row))
    parts = []
    for start in range(0, grid.blocks, step):
        stop = min(start + step, grid.blocks)
        seen = stop if grid.is_causal else grid.blocks  # blocks of keys
        rows = queries[:, :, a * start : a * stop]
        scores = _products(rows.flatten(1, 2), transposed[..., : b * seen])
        scores = scores.view(batch, heads_k, -1, rows.shape[2], b * seen)
        if grid.is_causal or lengths is not None or grid.seqlen % grid.block:
            hidden = _hidden(grid, (a * start, a * stop), a, b, seen, lengths, scores.device)
            scores = scores.masked_fill_(hidden, -torch.inf)
        shares = scores.softmax(-1).unflatten(-1, (-1, b)).sum(-1).mean(2).unflatten(2, (-1, a))
        parts.append(F.pad(_mean_of_tokens(shares, grid, start, lengths), (0, grid.blocks - seen)))
    return torch.cat(parts, 2)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """x y in fp32; 16-bit factors are multiplied as they are on CUDA."""
    if x.is_cuda and x.dtype == y.dtype and x.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(x, y, out_dtype=torch.float32)
    return torch.bmm(x.float(), y.float())


def _hidden(
    grid: BlockGrid,
    rows: tuple[int, int],
    a: int,
    b: int,
    seen: int,
    lengths: Tensor | None,
    device: torch.device,
) -> Tensor:
    """bool (1 or batch, 1, 1, rows, keys): no pair of the two runs of tokens is visible."""
    first_key = torch.arange(b * seen, device=device) * (grid.block // b)
    whole = grid.seqlen if lengths is None else lengths.view(-1, 1, 1, 1, 1)
    hidden = (first_key >= whole).view(-1, 1, 1, 1, b * seen)
    if not grid.is_causal:
        return hidden
    last_query = torch.arange(*rows, device=device).unsqueeze(-1) * (grid.block // a)
    return hidden | (first_key > last_query + grid.block // a - 1)


def _mean_of_tokens(shares: Tensor, grid: BlockGrid, start: int, lengths: Tensor | None) -> Tensor:
    """The mean over those of ``shares`` (batch, heads, rows, a, blocks) that hold a token."""
    a = shares.shape[3]
    first = torch.arange(shares.shape[2] * a, device=shares.device) + start * a
    whole = grid.seqlen if lengths is None else lengths.view(-1, 1)
    held = (first * (grid.block // a) < whole).view(-1, 1, shares.shape[2], a, 1)
    return shares.masked_fill(~held, 0).sum(3) / held.sum(3).clamp(min=1)
