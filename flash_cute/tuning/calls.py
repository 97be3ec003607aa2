"""Makes a call of given sizes to measure, for the tuner and for ncu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flash_cute.functional import flash_attn_func, flash_attn_with_kvcache


def call_of(
    op: str, dtype: str, batch: int, heads: int, heads_k: int, seqlen_q: int, seqlen_k: int,
    head_dim: int, head_dim_v: int, causal: bool, device: str = "cuda",
) -> Callable[[], Any]:  # fmt: skip
    """A call on standard normal inputs: of forward, of backward, or over a cache."""

    def random(rows: int, count: int, dim: int) -> torch.Tensor:
        return torch.randn(batch, rows, count, dim, device=device).to(getattr(torch, dtype))

    q = random(seqlen_q, heads, head_dim)
    k, v = random(seqlen_k, heads_k, head_dim), random(seqlen_k, heads_k, head_dim_v)
    if op == "decode":
        return lambda: flash_attn_with_kvcache(q, k, v, causal=causal)
    if op == "fwd":
        return lambda: flash_attn_func(q, k, v, causal=causal)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    dout = torch.randn_like(out)
    return lambda: torch.ops.flash_cute.bwd(dout, q, k, v, out, lse, is_causal=causal)
