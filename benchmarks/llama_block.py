"""A block of Llama's shape in plain PyTorch, with the names and arguments of Hugging Face's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotary = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """As Llama has it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normal.to(x.dtype)


class Attention(nn.Module):
    """Grouped heads with rotary positions."""

    is_causal = True

    def __init__(self, width: int, heads: int, heads_k: int, bias: bool) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, width, bias)
        self.k_proj = nn.Linear(width, heads_k * self.head_dim, bias)
        self.v_proj = nn.Linear(width, heads_k * self.head_dim, bias)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Rotary | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (
            proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if position_embeddings is not None:
            cos, sin = (x[:, None] for x in position_embeddings)
            q, k = (x * cos + turned(x) * sin for x in (q, k))
        out = F.scaled_dot_product_attention(
            q, k, v, attention_mask, is_causal=attention_mask is None, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """A block with the names and the arguments of Hugging Face's."""

    def __init__(
        self, width: int, heads: int, heads_k: int, hidden: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads, heads_k, bias)
        self.mlp = MLP(width, hidden)
        self.input_layernorm = RMSNorm(width)
        self.post_attention_layernorm = RMSNorm(width)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Rotary | None = None,
    ) -> Tensor:
        x = hidden_states
        x = x + self.self_attn(self.input_layernorm(x), attention_mask, position_embeddings)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def rotary(seqlen: int, dim: int, device: Any = "cpu") -> Rotary:
    """(cos, sin), each (1, seqlen, dim)."""
    angles = torch.arange(seqlen)[:, None] * 100.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.cat((angles, angles), dim=-1)[None].to(device)
    return angles.cos(), angles.sin()
