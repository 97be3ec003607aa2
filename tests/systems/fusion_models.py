"""Models to fuse, and how two are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN, BATCH, SEQLEN = 32, 4, 48, 3, 7

LAYERS: dict[str, dict[str, Any]] = {
    "as_documented": {},
    "batch_first": {"batch_first": True, "activation": "gelu"},
    "norm_first": {"norm_first": True, "activation": nn.GELU("tanh")},
    "norm_first_batch_first": {"norm_first": True, "batch_first": True},
    "without_bias": {"bias": False, "norm_first": True, "activation": "gelu"},
    "own_activation": {"activation": torch.tanh, "batch_first": True, "layer_norm_eps": 1e-3},
}


def encoder_layer(device: str = "cpu", dropout: float = 0.0, **options: Any) -> Any:
    """A small layer whose every parameter matters."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=dropout, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.to(device)


def tokens(layer: Any, device: str = "cpu") -> Tensor:
    """An input for it."""
    torch.manual_seed(2)
    batch_first = layer.self_attn.batch_first
    shape = (BATCH, SEQLEN, WIDTH) if batch_first else (SEQLEN, BATCH, WIDTH)
    return torch.randn(shape, device=device)


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

    def forward(self, hidden_states: Tensor, attention_mask=None, position_embeddings=None, **_):
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
        self, width: int = WIDTH, heads: int = HEADS, heads_k: int = 2, hidden: int = HIDDEN,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.self_attn = Attention(width, heads, heads_k, bias)
        self.mlp = MLP(width, hidden)
        self.input_layernorm = RMSNorm(width)
        self.post_attention_layernorm = RMSNorm(width)

    def forward(self, hidden_states: Tensor, attention_mask=None, position_embeddings=None):
        x = hidden_states
        x = x + self.self_attn(self.input_layernorm(x), attention_mask, position_embeddings)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def llama_block(device: str = "cpu", **options: Any) -> LlamaBlock:
    """A small block whose every parameter matters."""
    torch.manual_seed(1)
    block = LlamaBlock(**options)
    for parameter in block.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    return block.to(device)


def rotary(seqlen: int, dim: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(cos, sin), each (1, seqlen, dim)."""
    angles = torch.arange(seqlen)[:, None] * 100.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.cat((angles, angles), dim=-1)[None].to(device)
    return angles.cos(), angles.sin()


def assert_same(model: Any, fused: Any, x: Tensor, *args: Any, **kwargs: Any) -> None:
    """Equal outputs and gradients, of x and of every parameter, and outputs without gradients."""
    results = []
    for one in (model, fused):
        leaf = x.clone().requires_grad_()
        out = one(leaf, *args, **kwargs)
        torch.manual_seed(3)
        grads = torch.autograd.grad(out, [leaf, *model.parameters()], torch.randn_like(out))
        results.append((out, *grads))
    for wanted, got in zip(*results, strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        scale = float(wanted.detach().abs().max()) + 0.1
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=5e-5 * scale)
    with torch.no_grad():
        torch.testing.assert_close(fused(x, *args, **kwargs), results[0][0], rtol=1e-4, atol=1e-4)


def saved_bytes(call: Callable[[], Any], *models: nn.Module) -> int:
    """Bytes that a call keeps for backward, parameters aside; storages count once."""
    storages: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for m in models for p in m.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    del out
    return sum(storages.values())
