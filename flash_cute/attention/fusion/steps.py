"""The steps of a block other than attention, by fused kernels or torch's ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute.attention.fusion.config import StepOptions
from flash_cute.attention.fusion.functions import (
    Activate,
    AddNorm,
    FeedForward,
    Gate,
    GateLinear,
    LinearAddNorm,
    Products,
    in_memory_order,
    kernels_for,
    linear_kernels,
)
from flash_cute.attention.fusion.parts import LINEARS, are_plain, is_plain

MAX_WIDTH = 32768  # of a norm's row, which one Triton program holds


@dataclass
class Norm:
    """LayerNorm, or RMSNorm, of the last dimension. Not frozen: torch 2.11 cannot trace that."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    rms: bool

    @staticmethod
    def of(module: Any, rms: bool) -> Norm:
        eps = getattr(module, "variance_epsilon", None)
        eps = module.eps if eps is None else eps
        if eps is None:  # torch's default depends on the dtype of the computation
            eps = torch.finfo(torch.promote_types(module.weight.dtype, torch.float32)).eps
        return Norm(module.weight, getattr(module, "bias", None), eps, rms)

    def __call__(self, x: Tensor) -> Tensor:
        shape = self.weight.shape
        if self.rms:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.layer_norm(x, shape, self.weight, self.bias, self.eps)


def add_norm(
    x: Tensor,
    y: Tensor,
    norm: Norm,
    p: float,
    seed: Tensor | None,
    step: StepOptions,
    keep_sum: bool,
) -> tuple[Tensor, Tensor]:
    """(sum, norm(sum)) of sum = x + dropout(y); without ``keep_sum`` the first may be None."""
    if step.own_kernels and norm.weight.numel() <= MAX_WIDTH and kernels_for(x) is not None:
        options = (norm.eps, norm.rms, p, keep_sum)
        return AddNorm.apply(x, y, norm.weight, norm.bias, options, seed if p else None)
    total = x + F.dropout(y, p)
    return total, norm(total)


def linear_add_norm(
    x: Tensor,
    a: Tensor,
    linear: nn.Linear,
    norm: Norm,
    p: float,
    seed: Tensor | None,
    step: StepOptions,
    keep_sum: bool,
) -> tuple[Tensor, Tensor]:
    """:func:`add_norm` of x and linear(a), by one kernel if that supports it."""
    if step.own_kernels and x.dim() == 3 and x.is_cuda and kernels_for(x) is not None:
        arguments = under_autocast(a, linear.weight, linear.bias)
        if linear_kernels().takes(x, *arguments[:2]):
            options = (norm.eps, norm.rms, p, keep_sum, torch.is_grad_enabled())
            seed = seed if p else None
            return LinearAddNorm.apply(x, *arguments, norm.weight, norm.bias, options, seed)
    rows = in_memory_order(a)
    y = F.linear(rows, linear.weight, linear.bias)
    y = y if rows is a else y.transpose(0, 1)
    return add_norm(x, y, norm, p, seed, step, keep_sum)


def add(x: Tensor, y: Tensor, p: float, seed: Tensor | None, step: StepOptions) -> Tensor:
    """x + dropout(y)."""
    if p and step.own_kernels and kernels_for(x) is not None:
        return Activate.apply(y, x, "identity", p, seed)
    return x + F.dropout(y, p)


@dataclass(frozen=True)
class FeedForwardWeights:
    """The weights of a feed-forward step."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    activation: Any


def feed_forward(
    x: Tensor, weights: FeedForwardWeights, p: float, seed: Tensor | None, step: StepOptions
) -> Tensor:
    """linear(dropout(activation(linear(x))))."""
    name = activation_name(weights.activation)
    w1, b1, w2, b2 = weights.w1, weights.b1, weights.w2, weights.b2
    if not step.own_kernels or name is None or kernels_for(x) is None:
        return F.linear(F.dropout(weights.activation(F.linear(x, w1, b1)), p), w2, b2)
    seed = seed if p else None
    if step.save_memory:
        x, w1, b1, w2, b2 = under_autocast(x, w1, b1, w2, b2)
        return FeedForward.apply(x, w1, b1, w2, b2, (name, p), seed)
    return F.linear(Activate.apply(F.linear(x, w1, b1), None, name, p, seed), w2, b2)


def gated(x: Tensor, first: Sequence[Any], last: Any, activation: Any, step: StepOptions) -> Tensor:
    """last(activation(g) * u), where g and u are the results of the two linears ``first``."""
    both, _ = products(x, first)
    name = activation_name(activation)
    if not step.own_kernels or name is None or kernels_for(both) is None:
        g, u = both.chunk(2, dim=-1)
        return last(activation(g) * u)
    if step.save_memory and is_plain(last, *LINEARS):
        return GateLinear.apply(*under_autocast(both, last.weight, last.bias), name)
    return last(Gate.apply(both, name))


def products(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, list[int]]:
    """The results of several linears of one input, concatenated, and their widths. Linears that are
    not plain are called."""
    if kernels_for(x) is None or not are_plain(linears, *LINEARS):
        found = [linear(x) for linear in linears]
        return torch.cat(found, dim=-1), [y.shape[-1] for y in found]
    weights, biases = ([getattr(linear, name) for linear in linears] for name in ("weight", "bias"))
    out = Products.apply(*under_autocast(x, *weights, *biases))
    return out, [len(weight) for weight in weights]


def activation_name(activation: Any) -> str | None:
    """The name of an activation that kernels know: a key of ``kernels_torch.ACTIVATIONS``."""
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if isinstance(activation, nn.Module):
        return _MODULES.get(type(activation))
    return {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", F.silu: "silu"}.get(activation)


_MODULES: dict[type, str] = {nn.ReLU: "relu", nn.SiLU: "silu"}


def under_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, if it is on for the first one's device and none is fp64."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    keep = (None, torch.float64)
    return tuple(x if getattr(x, "dtype", None) in keep else x.to(dtype) for x in tensors)


def draw_seeds(x: Tensor, number: int) -> Tensor:
    """int64 (number,) on x's device, from torch's generator, as ``flash_cute.rng_state`` draws."""
    return torch.randint(-(2**63), 2**63 - 1, (number,), device=x.device)
