"""How much of its attention a row of blocks gives to each block of keys, without all scores.

Two estimates are averaged, the second with twice the weight. Sums along antidiagonals of patches of
stride x stride scores (XAttention, arXiv 2503.16428) cost 1 / stride of the scores, and see every
query and key. An upper bound of scores by each channel's largest and smallest of a few keys (Quest,
arXiv 2406.10774) costs next to nothing, and sees single keys that a sum drowns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute.call.autocast import without_autocast
from flash_cute.sparse.grid import BlockGrid

STRIDES = (1, 2, 4, 8, 16, 32, 64)
QUERIES_OF_BOUND, KEYS_OF_BOUND = 8, 32  # whose mean, and whose extremes, the bound takes
_SCORES_AT_ONCE = 2**22  # that a CPU's caches hold
_SCORES_AT_ONCE_ON_CUDA = 2**26  # in few launches; they and their softmax take 512 MB
_CAUSAL_SCORES_AT_ONCE_ON_CUDA = 2**24  # more slices: of each what its last row sees is computed


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
        q = padded(q, grid)
        sums = _mass_of_patches(q, k, grid, stride, scale, lengths)
        return sums.lerp(_mass_of_bound(q, k, grid, scale, lengths), 2 / 3)


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


def _mass_of_patches(
    q: Tensor, k: Tensor, grid: BlockGrid, stride: int, scale: float, lengths: Tensor | None
) -> Tensor:
    q, k = (padded(x, grid).transpose(1, 2).unflatten(2, (-1, stride)) for x in (q, k))
    queries, keys = torch.cat(q.unbind(3)[::-1], -1), k.flatten(-2)
    return _pooled_softmax(queries, keys, grid, scale / stride, lengths)


def _mass_of_bound(
    q: Tensor, k: Tensor, grid: BlockGrid, scale: float, lengths: Tensor | None
) -> Tensor:
    runs = padded(q, grid).unflatten(1, (-1, QUERIES_OF_BOUND)).mean(2)
    queries = torch.cat((runs.clamp(min=0), runs.clamp(max=0)), -1).transpose(1, 2)
    keys = torch.cat(extremes(k, grid, lengths, KEYS_OF_BOUND), -1)
    return _pooled_softmax(queries, keys, grid, scale, lengths)


def extremes(
    k: Tensor, grid: BlockGrid, lengths: Tensor | None, keys: int
) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of each channel over every ``keys`` tokens, each (batch, heads,
    blocks * block / keys, dim) of k's dtype; finite also of what holds no token."""
    room = grid.blocks * grid.block - grid.seqlen
    if room:
        k = torch.cat((k, k[:, -1:].expand(-1, room, -1, -1)), 1)
    runs = k.unflatten(1, (-1, keys))
    if lengths is None:
        smallest, largest = torch.aminmax(runs, dim=2)
        return largest.transpose(1, 2), smallest.transpose(1, 2)
    hidden = grid.padding(k.device, lengths)[..., None, None]
    none = hidden[:, ::keys].transpose(1, 2)
    hidden = hidden.unflatten(1, (-1, keys))
    largest = runs.masked_fill(hidden, -torch.inf).amax(2).transpose(1, 2)
    smallest = runs.masked_fill(hidden, torch.inf).amin(2).transpose(1, 2)
    return largest.masked_fill(none, 0), smallest.masked_fill(none, 0)


def padded(x: Tensor, grid: BlockGrid) -> Tensor:
    """x (batch, seqlen, heads, dim) with zeros up to whole blocks."""
    room = grid.blocks * grid.block - x.shape[1]
    return x if room == 0 else F.pad(x, (0, 0, 0, 0, 0, room))


def _pooled_softmax(
    queries: Tensor, keys: Tensor, grid: BlockGrid, scale: float, lengths: Tensor | None
) -> Tensor:
    """softmax(scale queries keys^T), summed over the keys of a block, meaned over the queries of a
    block and the heads of a group, by some rows of blocks at a time.

    ``queries`` (batch, heads, a * blocks, width), ``keys`` (batch, heads_k, b * blocks, width).
    """
    batch, heads_k = keys.shape[:2]
    a, b = (x.shape[2] // grid.blocks for x in (queries, keys))
    group = queries.shape[1] // heads_k
    queries = queries.unflatten(1, (heads_k, group)).flatten(0, 1)
    if not keys.is_cuda:  # where a pass over the scores costs more
        keys, scale = keys * scale, 1.0
    transposed = keys.flatten(0, 1).mT
    seen = grid.seen(a, b, keys.device, lengths)
    step = _blocks_at_once(len(queries) * queries.shape[1] * a * keys.shape[2], grid, keys.device)
    parts = []
    for start in range(0, grid.blocks, step):
        stop = min(start + step, grid.blocks)
        blocks = stop if grid.is_causal else grid.blocks  # of keys
        rows = slice(a * start, a * stop)
        scores = _products(queries[:, :, rows].flatten(1, 2), transposed[..., : b * blocks])
        scores = scores.view(batch, heads_k, group, a * (stop - start), b * blocks)
        seen_by_rows = seen[:, rows].contiguous()
        part: Tensor = torch.ops.flash_cute.pooled_softmax(scores, seen_by_rows, scale, a, b)
        parts.append(F.pad(part, (0, grid.blocks - blocks)) if blocks < grid.blocks else part)
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _blocks_at_once(scores_of_block: int, grid: BlockGrid, device: torch.device) -> int:
    """Rows of blocks of a slice of the scores."""
    at_once = _SCORES_AT_ONCE
    if device.type == "cuda":
        causal = grid.is_causal
        at_once = _CAUSAL_SCORES_AT_ONCE_ON_CUDA if causal else _SCORES_AT_ONCE_ON_CUDA
    return max(1, at_once // max(1, scores_of_block))


def _products(x: Tensor, y: Tensor) -> Tensor:
    """x y in fp32; 16-bit factors are multiplied as they are on CUDA."""
    if x.is_cuda and x.dtype == y.dtype and x.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(x, y, out_dtype=torch.float32)
    return torch.bmm(x.float(), y.float())
