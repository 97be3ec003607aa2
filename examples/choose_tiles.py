"""Attention whose tile the caller chooses: sizes, memory, and a gradient without autograd.

python examples/choose_tiles.py [--device cpu] [--seqlen 256]
"""

from __future__ import annotations

import argparse

import torch

from flash_cute import (
    estimate_memory_usage,
    flash_attention_backward,
    flash_attention_forward,
    get_optimal_block_sizes,
)

BATCH, HEADS, DIM = 2, 4, 64


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where usable",
    )
    parser.add_argument("--seqlen", type=int, default=256, help="default: %(default)s")
    options = parser.parse_args(argv)
    memory = estimate_memory_usage(BATCH, HEADS, options.seqlen, DIM)
    print(f"a forward call takes {memory['total_memory_mb']:.2f} MB, its tensors included")
    shape = (4, BATCH, HEADS, options.seqlen, DIM)
    Q, K, V, dO = torch.randn(shape, device=options.device).unbind()
    best = get_optimal_block_sizes(options.seqlen, DIM)
    print(f"the library's own tile: Bc={best[0]}, Br={best[1]}")
    expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V)
    worst = 0.0
    for Bc, Br in (best, (32, 32), (16, 64), (100, 7)):
        O, l, m = flash_attention_forward(Q, K, V, Bc, Br, return_stats=True)
        dQ, _, _ = flash_attention_backward(Q, K, V, O, dO, l, m, Bc, Br)
        difference = float((O - expected).abs().max())
        worst = max(worst, difference)
        print(f"Bc={Bc:<4} Br={Br:<4} differs by {difference:.1e}, |dQ| {float(dQ.norm()):.4f}")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    raise SystemExit(main())
