"""A document of many tokens through one layer that keeps neighbours and a few tokens that all see.

    PYTHONPATH=. python examples/sparse_document.py

On two busy cores it took 28 s with OMP_WAIT_POLICY=PASSIVE, and 48 s without it.
"""

from __future__ import annotations

import argparse
import time

import torch

from flash_cute.attention import SparsePattern, create_sparse_attention
from flash_cute.library import can_use_cuda


def seconds(layer: torch.nn.Module, document: torch.Tensor) -> float:
    """The time of a call, forward and backward, after one to warm up."""
    for _ in range(2):
        if document.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        layer(document).float().square().mean().backward()
        if document.is_cuda:
            torch.cuda.synchronize()
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where usable")
    parser.add_argument("--tokens", type=int, help="default: 131072 on cuda, 8192 on cpu")
    parser.add_argument(
        "--sparsity", type=float, default=0.95, help="pairs left out; default: %(default)s"
    )
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if can_use_cuda() else "cpu")
    tokens = options.tokens or (131_072 if device == "cuda" else 8192)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    document = torch.randn(1, tokens, 512, device=device, dtype=dtype)
    times = {}
    for name, ratio in (("dense", 0.0), ("sparse", options.sparsity)):
        layer = create_sparse_attention(
            512, 8, ratio, SparsePattern.LOCAL_GLOBAL, causal=True, device=device, dtype=dtype
        )
        print(layer.explain(tokens))
        times[name] = seconds(layer, document)
        print(f"{name}: {1000 * times[name]:.1f} ms, {layer.last_sparsity:.3f} left out")
    print(f"sparse takes {times['sparse'] / times['dense']:.2f} of dense")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
