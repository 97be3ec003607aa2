"""Multi-head attention in fp64, score matrix and all, with a layer's own parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def parameters_of(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's parameters in fp64 on the CPU, as leaves of their own."""
    named = layer.named_parameters()
    return {name: x.detach().cpu().double().requires_grad_() for name, x in named}


def attend(
    parameters: dict[str, Tensor],
    heads: int,
    x: Tensor,
    *,
    kv_heads: int | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    kept: Tensor | None = None,
    rounded: Any = lambda x: x,
) -> Tensor:
    """(batch, seqlen, d_model) of x; ``mask`` (batch, seqlen_k), True takes part.

    ``kept`` (batch or 1, heads or kv_heads or 1, seqlen, seqlen), True is not left out.
    Without a key of its own, a token that takes no part gets the output bias; causal masks and
    windows count positions, so ``mask`` must hold no gaps beside these.
    """
    key = x if key is None else key
    value = key if value is None else value
    kv_heads = heads if kv_heads is None else kv_heads
    dim = x.shape[-1] // heads
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    weights = parameters["in_proj_weight"].split(sizes)
    bias = parameters.get("in_proj_bias")
    biases = (None,) * 3 if bias is None else bias.split(sizes)
    q, k, v = (
        rounded(F.linear(y, w, b).unflatten(-1, (-1, dim))).transpose(1, 2)
        for y, w, b in zip((x, key, value), weights, biases, strict=True)
    )
    k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (k, v))
    scores = q @ k.mT * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seqlen_q, seqlen_k = scores.shape[-2:]
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(scores.shape, dtype=torch.bool)
    hidden |= (distance > right) if right >= 0 else hidden
    hidden |= (distance < -left) if left >= 0 else hidden
    if kept is not None:
        repeats = heads // kv_heads if kept.shape[1] == kv_heads else 1
        hidden = hidden | ~kept.repeat_interleave(repeats, 1)
    if mask is not None:
        hidden = hidden | ~mask[:, None, None, :]
    weights_ = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    out = (weights_ @ v).transpose(1, 2).flatten(-2)
    if mask is not None and key is x:
        out = out.masked_fill(~mask[..., None], 0)
    return F.linear(out, parameters["out_proj.weight"], parameters.get("out_proj.bias"))


def difference(x: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value."""
    size = expected.abs().max().item() or 1.0
    return (x.detach().cpu().double() - expected.detach()).abs().max().item() / size


def compare_gradients(layer: nn.Module, parameters: dict[str, Tensor], bound: float) -> None:
    """The layer's parameters and those of the oracle have the same gradients."""
    sizes = [x.grad.abs().max().item() for x in parameters.values() if x.grad is not None]
    for name, x in layer.named_parameters():
        assert x.grad is not None, name
        expected = parameters[name].grad
        error = (x.grad.cpu().double() - expected).abs().max().item()
        assert error <= bound * max(sizes), (name, error)
