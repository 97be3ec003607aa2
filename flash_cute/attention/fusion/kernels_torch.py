"""The kernels of the fused steps in torch's ops, for devices without Triton.

Each function has a namesake with the same arguments in kernels_triton.py. Sums and norms are in
fp32, in fp64 for fp64. Dropout is a function of the seed, but another one than in Triton.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in."""
    is_double = any(x.dtype == torch.float64 for x in tensors)
    return torch.float64 if is_double else torch.float32


def dropped(x: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """x with each element 0 with probability p, the others divided by 1 - p."""
    if p == 0 or seed is None:
        return x
    if p == 1:
        return torch.zeros_like(x)
    generator = torch.Generator(x.device).manual_seed(int(seed))
    keep = torch.rand(x.shape, generator=generator, device=x.device) >= p
    return torch.where(keep, x / (1 - p), 0)


def activation(name: str, x: Tensor) -> Tensor:
    """The activation of that name: a key of ``ACTIVATIONS``."""
    return ACTIVATIONS[name](x)


ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def activate(x: Tensor, residual: Tensor | None, name: str, p: float, seed: Tensor | None):
    """residual + dropout(activation(x))."""
    out = dropped(activation(name, x), p, seed)
    return out if residual is None else residual + out


def activate_backward(grad: Tensor, x: Tensor, name: str, p: float, seed: Tensor | None) -> Tensor:
    """The gradient of x; for "identity" only x's dtype is used."""
    grad = dropped(grad, p, seed)
    if name == "identity":
        return grad.to(x.dtype)
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out = activation(name, leaf)
    return torch.autograd.grad(out, leaf, grad.to(out.dtype))[0]


def gate(x: Tensor, name: str) -> Tensor:
    """activation(first half) * second half, of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return activation(name, first) * second


def gate_backward(grad: Tensor, x: Tensor, name: str) -> Tensor:
    """The gradient of x."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out = gate(leaf, name)
    return torch.autograd.grad(out, leaf, grad)[0]


def add_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    p: float,
    seed: Tensor | None,
    keep_sum: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """(sum or None, norm(sum) in ``dtype``, mean, rstd) of sum = x + dropout(y).

    The norm is LayerNorm's, or RMSNorm's; mean (0 for RMSNorm) and rstd are (rows,).
    """
    total = x.to(wide(x)) + dropped(y, p, seed)
    kept = total.to(torch.promote_types(x.dtype, y.dtype)) if keep_sum else None
    total = total if kept is None else kept.to(total.dtype)
    if not rms and dtype == total.dtype == weight.dtype:
        out, mean, rstd = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
        return kept, out, mean.flatten(), rstd.flatten()
    mean = total.new_zeros(total.shape[:-1]) if rms else total.mean(-1)
    centred = total - mean[..., None]
    rstd = (centred.square().mean(-1) + eps).rsqrt()
    out = centred * rstd[..., None] * weight
    out = out if bias is None else out + bias
    return kept, out.to(dtype), mean.flatten(), rstd.flatten()


def add_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    rms: bool,
    p: float,
    seed: Tensor | None,
    y_like: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, y, weight and bias.

    If ``y`` is None, x is the sum that forward returned. ``grad_sum`` is the sum's gradient.
    ``y_like`` has y's dtype and strides.
    """
    dtype = wide(x)
    total = x.to(dtype) if y is None else x.to(dtype) + dropped(y, p, seed)
    mean, rstd = (s.view(*x.shape[:-1], 1) for s in (mean, rstd))
    normal = (total - mean) * rstd
    grad = grad.to(dtype)
    scaled = grad * weight
    inner = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    inner = inner if rms else inner - scaled.mean(-1, keepdim=True)
    dx = inner * rstd
    dx = dx if grad_sum is None else dx + grad_sum
    rows = tuple(range(grad.dim() - 1))
    dy = dropped(dx, p, seed).to(y_like.dtype)
    return dx.to(x.dtype), dy, (grad * normal).sum(rows), grad.sum(rows)


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """The first ``heads`` of qkv (batch, seqlen, all heads, dim), rotated.

    cos and sin are (batch or 1, seqlen, dim); pairs are (i, i + dim / 2).
    """
    x = qkv[:, :, :heads]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos[:, :, None].to(x.dtype) + turned * sin[:, :, None].to(x.dtype)


def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv, from the gradients of the rotated heads and of v."""
    dqk = torch.cat((dq, dk), dim=2)
    cos, sin = (x[:, :, None].to(dqk.dtype) for x in (cos, sin))
    first, second = (dqk * sin).chunk(2, dim=-1)
    return torch.cat((dqk * cos + torch.cat((second, -first), dim=-1), dv), dim=2)
