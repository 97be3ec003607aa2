"""flash_attn_func beside softmax(q k^T) v written out and beside torch's own attention.

python demos/attention.py [--device cpu] [--seqlen 512]
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flash_cute import flash_attn_func
from flash_cute.utils.timing import time_calls

Inputs = tuple[Tensor, Tensor, Tensor]  # q, k and v

BATCH, HEADS, DIM = 2, 4, 64
CALLS = 5
LONG_CALLS = 2
WINDOW = 64
LONGER = 8  # times as many tokens
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window of 64": {"causal": True, "window_size": (WINDOW - 1, 0)},
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


def with_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own attention over a window of WINDOW keys: it has no windows, but takes a mask."""
    places = torch.arange(q.shape[1], device=q.device)
    before = places[:, None] - places
    seen = (before >= 0) & (before < WINDOW)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def compare(qkv: Inputs, device: torch.device) -> float:
    """Prints a line a case; the largest difference of all."""
    print(f"{'case':<14}{'largest difference':>20}{'flash_cute':>14}{'written out':>14}")
    worst = 0.0
    for name, case in CASES.items():
        difference = (flash_attn_func(*qkv, **case) - written_out(*qkv, **case)).abs().max()
        worst = max(worst, float(difference))
        ours, theirs = (
            time_calls(partial(f, *qkv, **case), CALLS, device).median
            for f in (flash_attn_func, written_out)
        )
        print(f"{name:<14}{difference:>20.1e}{ours:>11.2f} ms{theirs:>11.2f} ms")
    return worst


def compare_long(qkv: Inputs, device: torch.device) -> float:
    """Prints what a window over longer sequences takes, here and in torch; their difference."""
    ours = partial(flash_attn_func, *qkv, causal=True, window_size=(WINDOW - 1, 0))
    theirs = partial(with_a_mask, *qkv)
    difference = float((ours() - theirs()).abs().max())
    times = [time_calls(f, LONG_CALLS, device).median for f in (ours, theirs)]
    print(f"\nA window of {WINDOW} keys over {qkv[0].shape[1]} tokens, which torch has as a mask:")
    print(f"flash_cute {times[0]:.1f} ms, torch {times[1]:.1f} ms, {times[1] / times[0]:.1f}x")
    return difference


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seqlen", type=int, default=512)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    generator = torch.Generator(device).manual_seed(0)

    def inputs(tokens: int) -> Inputs:
        shape = (3, BATCH, tokens, HEADS, DIM)
        q, k, v = torch.randn(shape, generator=generator, device=device).unbind()
        return q, k, v

    print(f"{BATCH} x {options.seqlen} tokens, {HEADS} heads of {DIM}, fp32, on {device}")
    worst = compare(inputs(options.seqlen), device)
    if device.type == "cpu":
        print("On a CPU full and causal run torch's own kernel, the others flash_cute's.")
    worst = max(worst, compare_long(inputs(LONGER * options.seqlen), device))
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    raise SystemExit(main())
