"""Every kernel once, on small ragged problems: what ``tools/sanitize.sh`` watches."""

from __future__ import annotations

import torch

from flash_cute import ops

HEAD_DIMS = (64, 128, 40, 59)  # whole tiles, columns that do not exist, rows that are not aligned


def dense(dtype: torch.dtype, dim: int) -> None:
    """Causal, grouped heads, lengths that end inside a tile."""
    q = torch.randn(1, 150, 4, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(1, 133, 2, dim, device="cuda", dtype=dtype) for _ in range(2))
    out, softmax_lse, _, _ = ops.fwd(q, k, v, is_causal=True)
    ops.bwd(q, q, k, v, out, softmax_lse, is_causal=True)


def varlen(dtype: torch.dtype, dim: int) -> None:
    """An empty sequence, and rows that belong to none."""
    cu_seqlens = torch.tensor([0, 70, 70, 130], device="cuda", dtype=torch.int32)
    q = torch.randn(150, 4, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(150, 2, dim, device="cuda", dtype=dtype) for _ in range(2))
    sequences = (cu_seqlens, cu_seqlens, 70, 70)
    out, softmax_lse, _, _ = ops.varlen_fwd(q, k, v, *sequences)
    ops.varlen_bwd(q, q, k, v, out, softmax_lse, *sequences)


def main() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for dim in HEAD_DIMS:
            dense(dtype, dim)
            varlen(dtype, dim)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
