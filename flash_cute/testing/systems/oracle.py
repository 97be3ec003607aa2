"""The expected results of the systems: attention and other layers in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def band(queries: int, keys: int, window: tuple[int, int], device: torch.device) -> Tensor:
    """The visible keys, bool (queries, keys); the last query is aligned to the last key."""
    i = torch.arange(queries, device=device)[:, None] + (keys - queries)
    j = torch.arange(keys, device=device)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    left, right = window
    if left >= 0:
        seen = seen & (i - j <= left)
    if right >= 0:
        seen = seen & (j - i <= right)
    return seen


def softmax_of_seen(
    scores: Tensor, seen: Tensor, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights, lse) of scores (heads, queries, keys); a row that sees nothing has weights 0.

    ``sink`` (heads,) is one more logit of each row, without a value.
    """
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        column = sink.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, column), -1)
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -math.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    is_empty = total == 0
    lse = torch.where(is_empty, -math.inf, top + torch.where(is_empty, 1.0, total).log())
    weights = weights / torch.where(is_empty, 1.0, total)
    return (weights if sink is None else weights[..., :-1]), lse.squeeze(-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sink: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one sequence: q (queries, heads, dim), k and v (keys, heads_k, dim).

    ``slopes`` (heads,) subtract slope times distance; ``keep`` (heads, queries, keys) multiplies
    the weights. out is (queries, heads, dim_v), lse (heads, queries).
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        i = torch.arange(len(q), device=q.device)[:, None] + (len(k) - len(q))
        distance = (i - torch.arange(len(k), device=q.device)).abs()
        scores = scores - slopes.to(scores.dtype)[:, None, None] * distance
    weights, lse = softmax_of_seen(scores, band(len(q), len(k), window, q.device), sink)
    weights = weights if keep is None else weights * keep
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def rounded_to(x: Tensor, mantissa: int, least_exponent: int, largest: float) -> Tensor:
    """x (fp32) rounded to nearest even with so many explicit bits of mantissa, with subnormals
    below 2^least_exponent, and clamped to ``largest``."""
    wide = x.double()
    _, exponent = torch.frexp(wide)
    exponent = (exponent - 1).clamp(min=least_exponent)
    step = torch.ldexp(torch.ones_like(wide), exponent - mantissa)
    return ((wide / step).round() * step).clamp(-largest, largest)


_FP8 = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}
LARGEST = {name: numbers[2] for name, numbers in _FP8.items()}


def fp8(x: Tensor, name: str) -> Tensor:
    """x (fp32) rounded to an fp8 format, in fp64."""
    return rounded_to(x, *_FP8[name])


def fp8_scaled(x: Tensor, name: str, margin: int = 0, bound: Tensor | None = None) -> Tensor:
    """x with one scale that takes its largest absolute value (or ``bound``) to the format's
    largest, rounded, and divided by the scale again; fp64."""
    wide = x.detach().float()
    if bound is None:
        bound = wide.abs().max() if wide.numel() else wide.new_zeros(())
    bound = bound.float().clamp(min=1e-30) * 2.0**margin
    scale = LARGEST[name] / bound
    return fp8(wide * scale, name) * (bound / LARGEST[name]).double()


def fp8_power_of_two(x: Tensor, name: str, dims: tuple[int, ...]) -> Tensor:
    """x with scales that are powers of two, one for all of ``dims``, rounded, in x's dtype."""
    peak = x.detach().abs().amax(dims, keepdim=True).double()
    exponent = torch.ceil(torch.log2(peak / LARGEST[name]).clamp(min=-126.0))
    scale = torch.exp2(exponent)
    return (fp8((x.detach().float().double() / scale).float(), name) * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Of the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    out = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias."""
    out = torch.einsum("...i,oi->...o", x, weight)
    return out if bias is None else out + bias


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x times the cumulative distribution function of the standard normal distribution."""
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
