"""Attention by torch, where a test needs someone else's."""

import torch


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Tensors are (batch, seqlen, heads, dim), as everywhere but in torch."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2)
