"""``AttentionLayer``: multi-head attention in the place of ``nn.MultiheadAttention``."""

from __future__ import annotations

import torch

from flash_cute.core.multihead import MultiHeadAttention


class AttentionLayer(MultiHeadAttention):
    """Multi-head attention (arXiv 1706.03762) that never stores the scores.

    Full attention of tokens (batch, seqlen, d_model); :meth:`forward` takes a mask of tokens,
    causal masks and cross attention. It loads the state dict of ``nn.MultiheadAttention``.

    Args:
        d_model: width of tokens, a multiple of ``num_heads``.
        num_heads: attention heads; each has ``d_model / num_heads`` dims.
        dropout: probability that an attention weight is dropped, in training alone.
        bias: whether both projections have one.
        device, dtype: of the parameters; None is torch's default.

    Raises:
        TypeError, ValueError: names the argument, what was given and what is expected.

    Example::

        import torch
        from flash_cute.core import AttentionLayer

        layer = AttentionLayer(512, 8)
        layer.load_state_dict(torch.nn.MultiheadAttention(512, 8).state_dict())
        x = torch.randn(2, 100, 512)
        mask = torch.arange(100) < torch.tensor([[100], [60]])  # the second has 60 tokens
        out = layer(x, mask)  # (2, 100, 512)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dropout: float = 0.1,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, dropout=dropout, bias=bias, device=device, dtype=dtype)
