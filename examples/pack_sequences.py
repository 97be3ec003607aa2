"""Sequences of different lengths without padding: packed end to end, one call for all.

python examples/pack_sequences.py [--device cpu] [--longest 300]
"""

from __future__ import annotations

import argparse

import torch

from flash_cute import flash_attn_func, flash_attn_varlen_func

HEADS, DIM, SEQUENCES = 4, 64, 8


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where usable",
    )
    parser.add_argument("--longest", type=int, default=300, help="default: %(default)s")
    options = parser.parse_args(argv)
    lengths = torch.randint(1, options.longest + 1, (SEQUENCES,)).tolist()
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    cu_seqlens, longest = offsets.to(options.device), max(lengths)
    q, k, v = torch.randn(3, sum(lengths), HEADS, DIM, device=options.device).unbind()
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    worst = 0.0
    for begin, length in zip(offsets.tolist(), lengths, strict=False):
        rows = slice(begin, begin + length)
        alone = flash_attn_func(q[None, rows], k[None, rows], v[None, rows], causal=True)
        worst = max(worst, float((out[None, rows] - alone).abs().max()))
    print(f"{sum(lengths)} rows in place of {SEQUENCES * longest}")
    print(f"differs from calls of their own by {worst:.1e}")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    raise SystemExit(main())
