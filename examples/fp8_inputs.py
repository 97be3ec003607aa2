"""q, k and v in fp8 with descales: what rounding to fp8 costs in accuracy, by granularity.

python examples/fp8_inputs.py [--device cpu] [--seqlen 512]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from flash_cute import flash_attn_func

BATCH, HEADS, HEADS_K, DIM = 2, 8, 2, 64
E4M3 = torch.float8_e4m3fn


def quantized(x: Tensor, each_head: bool) -> tuple[Tensor, Tensor]:
    """x (batch, seqlen, heads, dim) in e4m3, and its descale: one element, or (batch, heads_k)."""
    grouped = x.unflatten(2, (HEADS_K, -1))  # query heads that share a kv head share a descale
    largest = grouped.abs().amax((1, 3, 4)) if each_head else x.abs().amax()
    descale = (largest / torch.finfo(E4M3).max).float()
    factor = descale[:, None, :, None, None] if each_head else descale
    return (grouped / factor).flatten(2, 3).to(E4M3), descale


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
    v = v * torch.logspace(-4, 1, HEADS_K, device=options.device)[:, None]  # heads of unlike sizes
    exact = flash_attn_func(q, k, v, causal=True)
    worst = 0.0
    for each_head in (False, True):
        (q8, q_descale), (k8, k_descale), (v8, v_descale) = (
            quantized(x, each_head) for x in (q, k, v)
        )
        out = flash_attn_func(
            q8, k8, v8, causal=True, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
        )
        squares = (0, 1, 3)
        of_heads = (
            (out.float() - exact).square().sum(squares) / exact.square().sum(squares)
        ).sqrt()
        worst = float(of_heads.max())
        name = "each head" if each_head else "each tensor"
        print(f"a descale for {name}: error {float(of_heads.mean()):.3f}, worst head {worst:.3f}")
    return 0 if worst < 0.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
