"""Blocks of Llama's shape in plain PyTorch, some of which compute something else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Additional computations of a block; each shows at some length, or only in training.
VARIANTS = (
    "plain", "plain", "plain", "window8", "window60", "dropout", "hidden_dropout", "softcap",
    "scaled", "cut_keys", "long_scale", "own_norm", "sigmoid",
)  # fmt: skip


_OWN_SCORES = ("window8", "window60", "softcap", "cut_keys")


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normal = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return self.weight * normal.to(x.dtype)


class Attention(nn.Module):
    """Attention by torch's own function if it supports the scores, as in models; with
    ``is_written_out`` by plain products and sums."""

    is_causal, is_written_out = True, False

    def __init__(self, width: int, heads: int, heads_k: int, bias: bool, variant: str) -> None:
        super().__init__()
        self.head_dim, self.variant = width // heads, variant
        self.q_proj = nn.Linear(width, width, bias)
        self.k_proj = nn.Linear(width, heads_k * self.head_dim, bias)
        self.v_proj = nn.Linear(width, heads_k * self.head_dim, bias)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None,
        position_embeddings: Any = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        x, n = hidden_states, hidden_states.shape[1]
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if position_embeddings is not None:
            cos, sin = (y[:, None].to(x.dtype) for y in position_embeddings)
            q, k = (y * cos + _turned(y) * sin for y in (q, k))
        if self.variant == "long_scale" and n > 50:
            q = q * 1.3
        if not self.is_written_out and self.variant not in _OWN_SCORES:
            p = 0.5 if self.training and self.variant == "dropout" else 0.0
            out = F.scaled_dot_product_attention(
                q, k, v, attention_mask, p, is_causal=attention_mask is None, enable_gqa=True
            )
            return self.o_proj(out.transpose(1, 2).flatten(2)), None
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        if self.variant == "softcap":
            scores = 5 * torch.tanh(scores / 5)
        if attention_mask is None:
            scores = scores.masked_fill(_later(n, x.device), -torch.inf)
        elif attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, -torch.inf)
        else:
            scores = scores + attention_mask
        if self.variant.startswith("window"):
            left = int(self.variant.removeprefix("window"))
            places = torch.arange(n, device=x.device)
            scores = scores.masked_fill(places[:, None] - places >= left, -torch.inf)
        if self.variant == "cut_keys" and n > 100:
            others = ~torch.eye(n, dtype=torch.bool, device=x.device)
            cut = (torch.arange(n, device=x.device) == 1) & others
            scores = scores.masked_fill(cut, -torch.inf)
        weights = scores.softmax(-1)
        if self.variant == "dropout":
            weights = F.dropout(weights, 0.5, self.training)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), None


def _later(n: int, device: torch.device) -> Tensor:
    """bool (n, n): True for keys behind the query."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, variant: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.act_fn, self.variant = nn.SiLU(), variant

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = torch.sigmoid(gate) if self.variant == "sigmoid" else self.act_fn(gate)
        hidden = gate * self.up_proj(x)
        if self.variant == "hidden_dropout":
            hidden = F.dropout(hidden, 0.5, self.training)
        return self.down_proj(hidden)


class Block(nn.Module):
    """A block with the names and the arguments of Hugging Face's."""

    def __init__(
        self, width: int, heads: int, heads_k: int, hidden: int, bias: bool, variant: str
    ) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads, heads_k, bias, variant)
        self.mlp = MLP(width, hidden, variant)
        self.input_layernorm = RMSNorm(width)
        self.post_attention_layernorm = RMSNorm(width)
        self.variant = variant

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
    ) -> Tensor:  # fmt: skip
        x = hidden_states
        factor = 0.7 if self.variant == "scaled" else 1.0
        y, _ = self.self_attn(self.input_layernorm(x), attention_mask, position_embeddings)
        x = x + factor * y
        normal = self.post_attention_layernorm(x)
        if self.variant == "own_norm" and x.shape[1] > 30:
            normal = F.normalize(normal, dim=-1) * normal.shape[-1] ** 0.5
        return x + self.mlp(normal)


class Model(nn.Module):
    """Blocks in a row, all called with the same masks and positions."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, **given)
        return x


def rotary(seqlen: int, dim: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (1, seqlen, dim), in fp64."""
    angles = torch.arange(seqlen)[:, None] * 100.0 ** -(torch.arange(0, dim, 2).double() / dim)
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()
