"""The attention step between its two projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_cute.attention.fusion.masks import Visible
from flash_cute.kernels import support


def attend_packed(qkv: Tensor, visible: Visible, dropout_p: float, rng: Tensor | None) -> Tensor:
    """Attention of qkv (batch, seqlen, 3, heads, dim): (batch, seqlen, heads, dim).

    Dropout of flash_cute's kernels depends on ``rng``, int64 (2,); SDPA uses torch's generator.
    """
    if visible.bias is None and visible.order is None and kernels_support(qkv):
        return flash_attn_qkvpacked_func(qkv, dropout_p, causal=visible.causal, rng=rng)
    q, k, v = qkv.unbind(2)
    return attend(q, k, v, visible, dropout_p, rng)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    dropout_p: float,
    rng: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Attention of q (batch, seqlen, heads, dim), k and v (batch, seqlen, heads_k, dim)."""
    if visible.bias is not None or not kernels_support(q):
        return _sdpa(q, k, v, visible, dropout_p, scale)
    if visible.order is None:
        return flash_attn_func(q, k, v, dropout_p, scale, visible.causal, rng=rng)
    batch, seqlen = q.shape[:2]
    starts = torch.arange(0, batch * seqlen + 1, seqlen, dtype=torch.int32, device=q.device)
    rows = (visible.order + starts[:-1, None]).flatten()
    k, v = (x.reshape(batch * seqlen, *x.shape[2:]).index_select(0, rows) for x in (k, v))
    q = q.reshape(batch * seqlen, *q.shape[2:])
    out = flash_attn_varlen_func(
        q, k, v, starts, starts, seqlen, seqlen, dropout_p, scale,
        seqused_k=visible.lengths, rng=rng,
    )  # fmt: skip
    return out.view(batch, seqlen, *out.shape[1:])


def kernels_support(q: Tensor) -> bool:
    """Whether flash_cute supports q's device, dtype and head dim."""
    if not q.is_cuda:
        return q.device.type == "cpu"
    return support.has_kernel(q.dtype, q.shape[-1], q.get_device())


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, dropout_p: float, scale: float | None
) -> Tensor:
    bias = visible.bias
    if visible.order is not None and visible.lengths is not None:
        places = torch.arange(q.shape[1], device=q.device)
        hidden = torch.empty_like(visible.order, dtype=torch.bool)
        hidden.scatter_(1, visible.order, places >= visible.lengths[:, None])
        bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, float("-inf"))
        bias = bias[:, None, None, :].expand(-1, 1, q.shape[1], -1)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        None if bias is None else bias.to(q.dtype), dropout_p, visible.causal, scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)
