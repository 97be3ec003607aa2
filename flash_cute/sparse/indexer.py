"""The choice of keys by a light indexer, whose scores are never all there at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_cute.call.autocast import without_autocast
from flash_cute.sparse import validate as check

_SCORES_AT_ONCE = 2**24
_KEYS_AT_ONCE = 4096


class _Best(NamedTuple):
    """The best blocks so far, (batch, heads, rows, k), best first; -inf and -1 where there are
    none."""

    scores: Tensor
    blocks: Tensor

    def joined(self, scores: Tensor, first: int) -> _Best:
        """With ``scores`` (.., rows, n) of the blocks from ``first`` on."""
        k = self.scores.shape[-1]
        blocks = torch.arange(first, first + scores.shape[-1], device=scores.device)
        all_blocks = torch.cat((self.blocks, blocks.expand(scores.shape)), -1)
        best = torch.cat((self.scores, scores), -1).topk(k, -1)
        return _Best(best.values, all_blocks.gather(-1, best.indices))


@torch.no_grad()
def indexer_topk(
    q_idx: Tensor,
    k_idx: Tensor,
    k: int,
    *,
    granularity: int = 128,
    weights: Tensor | None = None,
    causal: bool = True,
    local_blocks: int = 0,
) -> Tensor:
    """The k blocks of keys that each query scores highest: what :meth:`flash_cute.Sparse.topk`
    takes.

    A block's score is the largest of its keys' that the query sees; a key's is the product of the
    indexer's query and key. The scores are made some millions at a time, and kept for k blocks.

    Args:
        q_idx: (batch, seqlen_q, heads, dim), the indexer's queries: a head chooses for a kv head.
        k_idx: (batch, seqlen_k, heads or 1, dim).
        k: blocks to choose, at least 1.
        granularity: keys of a block: 1, 2, 4, .. or 128.
        weights: (batch, seqlen_q, heads), or None. With them the heads choose together: a key's
            score is the sum over heads of weight * relu(product), as DeepSeek's indexer has it.
        causal: whether query i sees key j only if j <= i + seqlen_k - seqlen_q.
        local_blocks: as many blocks, the one of the query's own position and those before it, are
            chosen before all others. They need ``causal``.

    Returns:
        int32 (batch, seqlen_q, heads, k), with ``weights`` (batch, seqlen_q, 1, k), best first; -1
        behind the blocks of which a query sees a key. Of equal scores any may come first. Scores
        are fp32, of fp64 tensors fp64; there is no gradient.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices that do not go together, and options that
            do not exist.

    Example::

        import torch
        from flash_cute import Sparse
        from flash_cute.sparse import indexer_topk

        q_idx = torch.randn(1, 1024, 2, 32)  # for 2 kv heads
        k_idx = torch.randn(1, 1024, 1, 32)
        indices = indexer_topk(q_idx, k_idx, 3, local_blocks=1)
        assert indices.shape == (1, 1024, 2, 3)
        sparse = Sparse.topk(indices)
    """
    check.indexer(q_idx, k_idx, k, weights, causal, local_blocks)
    check.granularity(granularity)
    with without_autocast(q_idx.device):
        return _chosen(q_idx, k_idx, k, granularity, weights, causal, local_blocks)


def _chosen(
    q_idx: Tensor,
    k_idx: Tensor,
    k: int,
    granularity: int,
    weights: Tensor | None,
    causal: bool,
    local_blocks: int,
) -> Tensor:
    seqlens, dtype = (q_idx.shape[1], k_idx.shape[1]), torch.float32
    dtype = torch.float64 if q_idx.dtype == torch.float64 else dtype
    queries, keys = (x.transpose(1, 2).to(dtype) for x in (q_idx, k_idx))
    of_heads = None if weights is None else weights.transpose(1, 2)[..., None].to(dtype)
    heads = q_idx.shape[2] if weights is None else 1
    chosen = torch.empty((len(q_idx), seqlens[0], heads, k), dtype=torch.int32, device=q_idx.device)
    at_once = max(1, _SCORES_AT_ONCE // max(1, len(q_idx) * q_idx.shape[2] * _KEYS_AT_ONCE))
    for start in range(0, seqlens[0], at_once):
        rows = slice(start, min(start + at_once, seqlens[0]))
        part = queries[:, :, rows]
        best = _Best(
            part.new_full((len(part), heads, part.shape[2], k), -torch.inf),
            torch.full((len(part), heads, part.shape[2], k), -1, device=part.device),
        )
        for of_keys in _parts_of_keys(rows, seqlens, causal):
            scores = _scores(part, keys[:, :, of_keys], of_heads, rows)
            if causal:
                scores.masked_fill_(_hidden(rows, of_keys, seqlens, part.device), -torch.inf)
            blocks = _of_blocks(scores, granularity)
            first = of_keys.start // granularity
            if local_blocks:
                _prefer_local(blocks, rows, seqlens, first, granularity, local_blocks)
            best = best.joined(blocks, first)
        found = best.blocks.masked_fill(best.scores == -torch.inf, -1)
        chosen[:, rows] = found.transpose(1, 2).int()
    return chosen


def _parts_of_keys(rows: slice, seqlens: tuple[int, int], causal: bool) -> Iterator[slice]:
    """The keys that any of the rows sees, in parts that whole blocks fill."""
    end = min(seqlens[1], rows.stop + seqlens[1] - seqlens[0]) if causal else seqlens[1]
    for start in range(0, end, _KEYS_AT_ONCE):
        yield slice(start, min(start + _KEYS_AT_ONCE, end))


def _scores(part: Tensor, keys: Tensor, weights: Tensor | None, rows: slice) -> Tensor:
    """(batch, heads or 1, rows, keys)."""
    scores = part @ keys.transpose(-1, -2)
    if weights is None:
        return scores
    return scores.relu_().mul_(weights[:, :, rows]).sum(1, keepdim=True)


def _hidden(rows: slice, keys: slice, seqlens: tuple[int, int], device: torch.device) -> Tensor:
    query = torch.arange(rows.start, rows.stop, device=device) + (seqlens[1] - seqlens[0])
    return torch.arange(keys.start, keys.stop, device=device) > query[:, None]


def _of_blocks(scores: Tensor, granularity: int) -> Tensor:
    """The largest scores of blocks, (.., blocks); the last block may be cut."""
    room = -scores.shape[-1] % granularity
    if room:
        scores = torch.nn.functional.pad(scores, (0, room), value=-torch.inf)
    return scores.unflatten(-1, (-1, granularity)).amax(-1)


def _prefer_local(
    blocks: Tensor,
    rows: slice,
    seqlens: tuple[int, int],
    first: int,
    granularity: int,
    local_blocks: int,
) -> None:
    """Makes the scores of the last blocks that each query sees the largest there are."""
    query = torch.arange(rows.start, rows.stop, device=blocks.device) + (seqlens[1] - seqlens[0])
    own = query.div(granularity, rounding_mode="floor")[:, None]
    block = torch.arange(first, first + blocks.shape[-1], device=blocks.device)
    local = (block <= own) & (block > own - local_blocks) & (query[:, None] >= 0)
    blocks.masked_fill_(local, torch.inf)
