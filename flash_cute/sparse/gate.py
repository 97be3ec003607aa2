"""A gate that learns which blocks get attention (SeerAttention, arXiv 2410.13276)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flash_cute.call.autocast import without_autocast
from flash_cute.sparse.estimate import block_mass, extremes, padded
from flash_cute.sparse.grid import BlockGrid

_INVISIBLE = -1e30  # finite, so that rows of nothing else have a softmax and a gradient


class LearnedGate(nn.Module):
    """Shares of attention that blocks get, from pooled queries and keys of each head.

    Of a block the queries are meaned; the largest, the smallest and the mean of each channel of the
    keys stand side by side. Two projections a head turn both to vectors, whose products are what
    the softmax is over. Untrained, a gate takes the products of means; :meth:`distill_loss` trains
    it, without a gradient for q and k.

    Args:
        num_heads: heads of queries.
        num_kv_heads: heads of keys, which divide ``num_heads``.
        head_dim: dims of both.
        device, dtype: of the parameters; None is torch's default.

    Example::

        import torch
        from flash_cute.sparse.gate import LearnedGate
        from flash_cute.sparse.grid import grid_of

        gate, grid = LearnedGate(4, 2, 32), grid_of(500, is_causal=True)
        q, k = torch.randn(1, 500, 4, 32), torch.randn(1, 500, 2, 32)
        gate.distill_loss(q, k, grid).backward()
        assert gate(q, k, grid).shape == (1, 2, grid.blocks, grid.blocks)
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        own = torch.eye(head_dim, device=device, dtype=dtype)
        of_keys = torch.cat((torch.zeros_like(own), torch.zeros_like(own), own))
        self.query_weight = nn.Parameter(own.repeat(num_heads, 1, 1))
        self.key_weight = nn.Parameter(of_keys.repeat(num_kv_heads, 1, 1))

    def check(self, q: Tensor, k: Tensor) -> None:
        """Raises ValueError if q and k (batch, seqlen, heads, dim) are not of this gate's sizes."""
        (heads, dim), heads_k = self.query_weight.shape[:2], len(self.key_weight)
        if (q.shape[2], k.shape[2], q.shape[3]) != (heads, heads_k, dim):
            raise ValueError(
                f"q has shape {tuple(q.shape)}, and k {tuple(k.shape)}; the gate is for {heads} "
                f"heads of q, {heads_k} of k, and a head dim of {dim}"
            )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        grid: BlockGrid,
        *,
        softmax_scale: float | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """fp32 (batch, heads_k, blocks, blocks), of which each row's sum to 1: the mean over the
        query heads of a group. ``q`` (batch, seqlen, heads, dim), ``k`` (batch, seqlen, heads_k,
        dim), ``lengths`` (batch,) tokens of each sequence."""
        logits = self._logits(q, k, grid, softmax_scale, lengths)
        shares = logits.softmax(-1)
        return shares.squeeze(2) if shares.shape[2] == 1 else shares.mean(2)

    def distill_loss(
        self,
        q: Tensor,
        k: Tensor,
        grid: BlockGrid,
        *,
        softmax_scale: float | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """KL divergence, in nats and meaned over rows, of the gate from the shares of attention
        that blocks truly get: q k^T is computed for it, some rows at a time, without a gradient.
        Backward reaches the gate's parameters alone."""
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        true = block_mass(q, k, grid, softmax_scale=scale, lengths=lengths)
        logits = self._logits(q.detach(), k.detach(), grid, scale, lengths)
        visible = grid.visible(true.device, lengths)
        log_shares = logits.log_softmax(-1).logsumexp(2) - math.log(logits.shape[2])
        apart = true * (true.clamp(min=1e-30).log() - log_shares)
        visible = visible.expand_as(apart)
        return apart.masked_fill(~visible, 0).sum() / visible.any(-1).sum().clamp(min=1)

    def _logits(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float | None, lengths: Tensor | None
    ) -> Tensor:
        """fp32 (batch, heads_k, heads / heads_k, blocks, blocks); the invisible are far below."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        with without_autocast(q.device):
            pooled = _mean(q, grid, lengths)
            largest, smallest = extremes(k, grid, lengths, grid.block)
            of_keys = torch.cat((largest, smallest, _mean(k, grid, lengths)), -1).float()
            queries = pooled @ self.query_weight.float()
            keys = of_keys @ self.key_weight.float()
            grouped = queries.unflatten(1, (keys.shape[1], -1))
            logits = grouped @ keys.unsqueeze(2).mT * scale
        if grid.sees_all(lengths):
            return logits
        visible = grid.visible(logits.device, lengths).unsqueeze(2)
        return logits.masked_fill(~visible, _INVISIBLE)


def _mean(x: Tensor, grid: BlockGrid, lengths: Tensor | None) -> Tensor:
    """The means over the tokens of blocks, fp32 (batch, heads, blocks, dim), of x (batch, seqlen,
    heads, dim)."""
    tokens = padded(x, grid)
    if grid.is_full(lengths):
        return tokens.unflatten(1, (-1, grid.block)).mean(2, dtype=torch.float32).transpose(1, 2)
    if lengths is not None:
        tokens = tokens.masked_fill(grid.padding(x.device, lengths)[..., None, None], 0)
    sums = tokens.unflatten(1, (-1, grid.block)).sum(2, dtype=torch.float32).transpose(1, 2)
    counts = grid.tokens(x.device, lengths).clamp(min=1)
    return sums / counts[:, None, :, None]
