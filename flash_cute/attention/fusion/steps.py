"""The steps of a block beside attention: by kernels of their own, or by torch's ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.attention.fusion.functions import (
    Activate,
    AddNorm,
    FeedForward,
    Gate,
    LinearAddNorm,
    Packed,
    as_it_lies,
    kernels_for,
    linear_kernels,
)

MAX_WIDTH = 32768  # of a norm's row, which one program of a kernel holds


@dataclass(frozen=True)
class Means:
    """By which means the steps of a call run: ``own`` kernels or torch's ops; ``save_memory``: the
    activation is computed again in backward."""

    own: bool
    save_memory: bool


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
        eps = torch.finfo(module.weight.dtype).eps if eps is None else eps
        return Norm(module.weight, getattr(module, "bias", None), eps, rms)

    def __call__(self, x: Tensor) -> Tensor:
        shape = self.weight.shape
        if self.rms:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.layer_norm(x, shape, self.weight, self.bias, self.eps)


def add_norm(
    x: Tensor, y: Tensor, norm: Norm, p: float, seed: Tensor | None, means: Means, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    """(sum, norm(sum)) of sum = x + dropout(y); without ``keep_sum`` the first may be None."""
    if means.own and norm.weight.numel() <= MAX_WIDTH and kernels_for(x) is not None:
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
    means: Means,
    keep_sum: bool,
) -> tuple[Tensor, Tensor]:
    """:func:`add_norm` of x and linear(a), by one kernel where one takes it."""
    if means.own and x.dim() == 3 and x.is_cuda and kernels_for(x) is not None:
        arguments = under_autocast(a, linear.weight, linear.bias)
        if linear_kernels().takes(x, *arguments[:2]):
            options = (norm.eps, norm.rms, p, keep_sum, torch.is_grad_enabled())
            seed = seed if p else None
            return LinearAddNorm.apply(x, *arguments, norm.weight, norm.bias, options, seed)
    rows = as_it_lies(a)
    y = F.linear(rows, linear.weight, linear.bias)
    y = y if rows is a else y.transpose(0, 1)
    return add_norm(x, y, norm, p, seed, means, keep_sum)


def add(x: Tensor, y: Tensor, p: float, seed: Tensor | None, means: Means) -> Tensor:
    """x + dropout(y)."""
    if p and means.own and kernels_for(x) is not None:
        return Activate.apply(y, x, "identity", p, seed)
    return x + F.dropout(y, p)


@dataclass(frozen=True)
class Hidden:
    """The weights of a feed-forward step: ``gated`` is linear(activation(g) * u) with (g, u) the
    halves of the first product."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    activation: Any
    gated: bool = False


def feed_forward(x: Tensor, hidden: Hidden, p: float, seed: Tensor | None, means: Means) -> Tensor:
    """linear(dropout(activation(linear(x))))."""
    name = activation_name(hidden.activation)
    if not means.own or name is None or kernels_for(x) is None:
        return _by_torch(x, hidden, p)
    seed = seed if p else None
    w1, b1, w2, b2 = hidden.w1, hidden.b1, hidden.w2, hidden.b2
    if means.save_memory:
        x, w1, b1, w2, b2 = under_autocast(x, w1, b1, w2, b2)
        return FeedForward.apply(x, w1, b1, w2, b2, (name, hidden.gated, p), seed)
    x = F.linear(x, w1, b1)
    x = Gate.apply(x, name) if hidden.gated else Activate.apply(x, None, name, p, seed)
    return F.linear(x, w2, b2)


def _by_torch(x: Tensor, hidden: Hidden, p: float) -> Tensor:
    x = F.linear(x, hidden.w1, hidden.b1)
    if hidden.gated:
        first, second = x.chunk(2, dim=-1)
        x = hidden.activation(first) * second
    else:
        x = F.dropout(hidden.activation(x), p)
    return F.linear(x, hidden.w2, hidden.b2)


def activation_name(activation: Any) -> str | None:
    """The name of an activation that kernels know: a key of ``kernels_torch.ACTIVATIONS``."""
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if isinstance(activation, nn.Module):
        return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(activation))
    return {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", F.silu: "silu"}.get(activation)


def under_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, if it is on where the first one is and they are no fp64."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    keep = (None, torch.float64)
    return tuple(x if getattr(x, "dtype", None) in keep else x.to(dtype) for x in tensors)


def draw_seeds(x: Tensor, number: int) -> Tensor:
    """int64 (number,) of x's device, from torch's generator: as ``flash_cute.rng_state``, more."""
    return torch.randint(-(2**63), 2**63 - 1, (number,), device=x.device)


def pack(linears: Sequence[nn.Linear]) -> None:
    """Moves the weights, and biases, one after the other, in one piece of memory.

    The parameters stay the same objects with the same values.
    """
    for name in ("weight", "bias"):
        parameters = [getattr(linear, name) for linear in linears]
        if any(p is None or p.device.type == "meta" for p in parameters) or lie_packed(parameters):
            continue
        if len({(p.dtype, p.device) for p in parameters}) == 1:
            together = torch.cat([p.detach() for p in parameters])
            for p, part in zip(
                parameters, together.split([len(p) for p in parameters]), strict=True
            ):
                p.data = part


def packed(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several products of one input, for one product.

    Without a copy where :func:`pack` left them; ``module.to`` and torch.compile cost one.
    """
    weight, bias = ([getattr(linear, name) for linear in linears] for name in ("weight", "bias"))
    return _joined(weight), None if bias[0] is None else _joined(bias)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    traced = torch.compiler.is_compiling() or internals.in_transform()
    if not traced and not internals.is_fake(parameters[0]) and lie_packed(parameters):
        return Packed.apply(*parameters)
    return torch.cat(list(parameters))


def lie_packed(parameters: Sequence[Tensor]) -> bool:
    """Whether each lies right behind the one before, in the same storage."""
    first = parameters[0]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for p in parameters:
        if p.untyped_storage().data_ptr() != storage or p.storage_offset() != place:
            return False
        if p.dtype != first.dtype or not p.is_contiguous():
            return False
        place += p.numel()
    return True
