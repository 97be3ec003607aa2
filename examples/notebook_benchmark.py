"""Times attention of (batch, heads, seq, dim) tensors: batch 4, 16 heads, 4096 tokens, scale 1.3.

python examples/notebook_benchmark.py [--device cpu] [--mode fwd] [--seqlen 512]

Mode ``fwd`` takes q and k in fp8 (e5m2) and v in fp16, forward alone; ``both`` takes all of them in
fp16, forward and backward. On CUDA the time is ``triton.testing.do_bench``'s, on the CPU a clock's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cute import flash_attn_func
from flash_cute.utils.timing import time_calls

HEADS, DIM, SCALE = 16, 64, 1.3


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float) -> Tensor:
    """flash_attn_func of (batch, heads, seq, dim): its layout is (batch, seq, heads, dim), which
    transposed views have without a copy."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, causal=causal, softmax_scale=softmax_scale).transpose(1, 2)


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        import triton.testing

        return triton.testing.do_bench(call)
    return time_calls(call, 3, device).median


def flash_attention_v2(
    batch_size: int, num_heads: int, seq_len: int, emb_dim: int, causal: bool, mode: str,
    device: torch.device,
) -> float:  # fmt: skip
    """Milliseconds of a call of ``mode`` fwd or both."""
    shape = (3, batch_size, num_heads, seq_len, emb_dim)
    q, k, v = torch.randn(shape, device=device).half().unbind()
    if mode == "fwd":
        q, k = q.to(torch.float8_e5m2), k.to(torch.float8_e5m2)
        return milliseconds(lambda: attention(q, k, v, causal, SCALE), device)
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    dout = torch.randn_like(v)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v, causal, SCALE), leaves, dout)

    return milliseconds(both, device)


def mask_of(causal: bool) -> str:
    return "causal" if causal else "full"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where usable",
    )
    parser.add_argument("--mode", choices=("fwd", "both"), help="default: both of them")
    parser.add_argument("--batch", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--seqlen", type=int, default=4096, help="default: %(default)s")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    sizes = (options.batch, HEADS, options.seqlen, DIM)
    modes = [options.mode] if options.mode else ["fwd", "both"]
    for mode in modes:
        for causal in (False, True):
            print(f"measuring {mode}, {mask_of(causal)} ...", file=sys.stderr, flush=True)
            ms = flash_attention_v2(*sizes, causal, mode, device)
            products = {"fwd": 2, "both": 7}[mode]  # backward has five
            flops = products * 2 * options.batch * HEADS * options.seqlen**2 * DIM
            rate = flops / (2 if causal else 1) / ms / 1e9
            print(f"{mode:<5}{mask_of(causal):<7}{ms:>10.3f} ms{rate:>9.2f} TFLOP/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
