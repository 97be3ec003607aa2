"""flash_attn_func beside softmax(q k^T) v written out: the largest difference, and both times.

python demos/attention.py [--device cpu] [--seqlen 512]
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_cute import flash_attn_func
from flash_cute.utils.timing import time_calls

BATCH, HEADS, DIM = 2, 4, 64
CALLS = 5
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window of 64": {"causal": True, "window_size": (63, 0)},
    "softcap": {"softcap": 5.0},
}


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """The same, with the matrix of scores in memory."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    seen = ones.tril() if causal else ones
    if window_size[0] >= 0:
        seen = seen & ones.triu(-window_size[0])
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seqlen", type=int, default=512)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    generator = torch.Generator(device).manual_seed(0)
    shape = (3, BATCH, options.seqlen, HEADS, DIM)
    q, k, v = torch.randn(shape, generator=generator, device=device).unbind()
    print(f"{BATCH} x {options.seqlen} tokens, {HEADS} heads of {DIM}, fp32, on {device}")
    print(f"{'case':<14}{'largest difference':>20}{'flash_cute':>14}{'written out':>14}")
    worst = 0.0
    for name, case in CASES.items():
        difference = float(
            (flash_attn_func(q, k, v, **case) - written_out(q, k, v, **case)).abs().max()
        )
        worst = max(worst, difference)
        ours, theirs = (
            time_calls(partial(f, q, k, v, **case), CALLS, device).median
            for f in (flash_attn_func, written_out)
        )
        print(f"{name:<14}{difference:>20.1e}{ours:>11.2f} ms{theirs:>11.2f} ms")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    raise SystemExit(main())
