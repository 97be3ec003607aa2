"""A small byte-level GPT whose attention is an argument."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_cute

VOCABULARY = 256  # every byte is a token

# q, k, v and the result are (batch, seqlen, heads, dim); k and v may have fewer heads.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def flash_cute_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by flash_cute."""
    return flash_cute.flash_attn_func(q, k, v, causal=True)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by PyTorch, which wants (batch, heads, seqlen, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2)


class Rotary(nn.Module):
    """Rotates queries and keys by their positions (RoPE, arXiv:2104.09864)."""

    cos: Tensor  # (context, 1, dim / 2)
    sin: Tensor

    def __init__(self, context: int, dim: int) -> None:
        super().__init__()
        frequencies = 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(context), frequencies).unsqueeze(1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """One layer: attention, then an MLP, each on normalised input and added to its input."""

    def __init__(
        self, width: int, heads: int, heads_k: int, rotary: Rotary, attention: Attention
    ) -> None:
        super().__init__()
        self.dim = width // heads
        self.heads, self.heads_k = heads, heads_k
        self.rotary = rotary
        self.attention = attention
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * heads_k) * self.dim, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views q (..., heads, dim), k and v (..., heads_k, dim) for x (..., width)."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.dim))
        q, k, v = qkv.split((self.heads, self.heads_k, self.heads_k), dim=-2)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        x = x + self.proj(self.attention(self.rotary(q), self.rotary(k), v).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts each next byte of a text.

    Args:
        layers: number of blocks.
        width: features of a token; the head dim is width / heads, and even.
        heads: attention heads.
        context: longest sequence, in bytes.
        attention: what the blocks compute attention with; causal.
        heads_k: heads of keys and values, each for a group of heads; 0 for as many as heads.

    Raises:
        ValueError: width is no multiple of 2 * heads, or heads none of heads_k.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        context: int,
        attention: Attention,
        heads_k: int = 0,
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width must be a multiple of 2 * heads = {2 * heads}, not {width}")
        heads_k = heads_k or heads
        if heads % heads_k:
            raise ValueError(f"heads must be a multiple of heads_k = {heads_k}, not {heads}")
        rotary = Rotary(context, width // heads)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads, heads_k, rotary, attention) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, seqlen, 256) of the byte after each of tokens (batch, seqlen), int64."""
        return self.head(self.norm(self.blocks(self.embedding(tokens))))
