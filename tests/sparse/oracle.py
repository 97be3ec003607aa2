"""Dense masked attention in fp64, and its gradients by autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sparse.masks import band
from torch import Tensor

from flash_cute.call.philox import dropout_keep, dropout_rate


class Masked(NamedTuple):
    out: Tensor
    lse: Tensor
    row_max: Tensor
    softmax: Tensor


def masked_attention(call: Any, mask: Tensor, first: int = 0) -> Masked:
    """Of a call of ``fwd`` that sees what bool ``mask`` (batch or 1, lists' heads, seqlen_q,
    seqlen_k) and its own band let through."""
    q, k, v = (x.double() for x in (call.q, call.k, call.v))
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scale = dim**-0.5 if call.softmax_scale is None else call.softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        distance = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
        scores = scores - call.alibi_slopes.double()[..., None, None] * distance.abs()
    window = (call.window_size_left, call.window_size_right)
    seen = mask.repeat_interleave(heads // mask.shape[1], 1)
    seen = seen & band(seqlen_q, seqlen_k, call.is_causal, window)
    scores = scores.masked_fill(~seen, -torch.inf)
    logits = scores
    if call.sink is not None:
        sink = call.sink.double()[None, :, None, None].expand(batch, heads, seqlen_q, 1)
        logits = torch.cat((scores, sink), -1)
    lse = torch.logsumexp(logits, -1)
    dead = lse == -torch.inf
    p = torch.exp(scores - lse.masked_fill(dead, 0)[..., None]).masked_fill(~seen, 0)
    softmax = weights = p
    if call.dropout_p:
        bh = torch.arange(batch * heads) + first * heads
        at = torch.arange(seqlen_q), torch.arange(seqlen_k)
        keep = dropout_keep(call.rng, call.dropout_p, bh, *at).view(p.shape)
        weights = p * keep * dropout_rate(call.dropout_p)[1]
        softmax = torch.where(keep, p, -p)
    row_max = torch.cat((scores, scores.new_full((*scores.shape[:3], 1), -torch.inf)), -1).amax(-1)
    return Masked(torch.einsum("bhij,bjhd->bihd", weights, v), lse, row_max, softmax)


def oracle_of(call: Any, mask: Tensor, dout: Tensor, dlse: Tensor, first: int = 0):
    """Results, and gradients of q, k, v and the sink, if there is one."""
    names = ["q", "k", "v"] + (["sink"] if call.sink is not None else [])
    leaves = {name: getattr(call, name).double().requires_grad_() for name in names}
    result = masked_attention(call._replace(**leaves), mask, first)
    lse = result.lse.masked_fill(result.lse == -torch.inf, 0)
    loss = (result.out * dout.double()).sum() + (lse * dlse.double()).sum()
    return result, torch.autograd.grad(loss, list(leaves.values()))
