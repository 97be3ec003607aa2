"""q, k and v in fp8 with descales: what rounding to fp8 costs in accuracy, by granularity.

python examples/fp8_inputs.py [--device cpu] [--seqlen 512]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from flash_cute import flash_attn_func, quantize_fp8

BATCH, HEADS, HEADS_K, DIM = 2, 8, 2, 64
GRANULARITIES: dict[str, dict[str, Any]] = {
    "each tensor": {"qk_scaling": "tensor", "v_scaling": "tensor"},
    "each head": {},
    "each row of q and k, each channel of v": {"qk_scaling": "row", "v_scaling": "channel"},
}
WITH_OUTLIERS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "rotated, k without its mean": {"hadamard": True, "smooth_k": True},
}


def errors(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """The error of each head's attention in fp8, relative to the head's own size."""
    exact = flash_attn_func(q, k, v, causal=True)
    x = quantize_fp8(q, k, v, **options)
    out = flash_attn_func(x.q, x.k, x.v, causal=True, **x.descales()).float()
    squares = (0, 1, 3)
    return ((out - exact).square().sum(squares) / exact.square().sum(squares)).sqrt()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where usable",
    )
    parser.add_argument("--seqlen", type=int, default=512, help="default: %(default)s")
    options = parser.parse_args(argv)
    rows = (BATCH, options.seqlen)
    q = torch.randn(*rows, HEADS, DIM, device=options.device)
    k, v = torch.randn(2, *rows, HEADS_K, DIM, device=options.device).unbind()
    of_unlike_sizes = v * torch.logspace(-4, 1, HEADS_K, device=options.device)[:, None]
    worst = 0.0
    for name, granularity in GRANULARITIES.items():
        of_heads = errors(q, k, of_unlike_sizes, granularity)
        worst = float(of_heads.max())
        print(f"a descale for {name}: error {float(of_heads.mean()):.3f}, worst head {worst:.3f}")
    q, k = (x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001) for x in (q, k))
    for name, remedy in WITH_OUTLIERS.items():
        print(f"q and k with outliers, {name}: error {float(errors(q, k, v, remedy).mean()):.3f}")
    return 0 if worst < 0.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
