"""Every kernel once, on small ragged problems: what ``tools/sanitize.sh`` watches."""

from __future__ import annotations

from typing import Any

import torch

from flash_cute import ops

# Whole tiles of every width, then columns that do not exist and rows that are not aligned.
HEAD_DIMS = (
    (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256),
    (40, 40), (59, 51),
)  # fmt: skip


def rules(heads: int) -> dict[str, Any]:
    """Every option of the Rich tier, and a sink."""
    return {
        "softcap": 10.0,
        "alibi_slopes": torch.rand(heads, device="cuda"),
        "sink": torch.randn(heads, device="cuda"),
        "dropout_p": 0.3,
        "rng": torch.tensor([1, 2], device="cuda"),
    }


def dense(dtype: torch.dtype, dim: int, dim_v: int, options: dict[str, Any]) -> None:
    """Causal, grouped heads, lengths that end inside a tile."""
    q = torch.randn(1, 150, 4, dim, device="cuda", dtype=dtype)
    k = torch.randn(1, 133, 2, dim, device="cuda", dtype=dtype)
    v = torch.randn(1, 133, 2, dim_v, device="cuda", dtype=dtype)
    out, softmax_lse, _, _ = ops.fwd(
        q, k, v, is_causal=True, return_softmax=True, return_row_max=True, **options
    )
    ops.bwd(out, q, k, v, out, softmax_lse, is_causal=True, deterministic=True, **options)


def varlen(dtype: torch.dtype, dim: int, dim_v: int, options: dict[str, Any]) -> None:
    """An empty sequence, and rows that belong to none."""
    cu_seqlens = torch.tensor([0, 70, 70, 130], device="cuda", dtype=torch.int32)
    q = torch.randn(150, 4, dim, device="cuda", dtype=dtype)
    k = torch.randn(150, 2, dim, device="cuda", dtype=dtype)
    v = torch.randn(150, 2, dim_v, device="cuda", dtype=dtype)
    sequences = (cu_seqlens, cu_seqlens, 70, 70)
    out, softmax_lse, _, _ = ops.varlen_fwd(q, k, v, *sequences, **options)
    ops.varlen_bwd(out, q, k, v, out, softmax_lse, *sequences, **options)


def main() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for dim, dim_v in HEAD_DIMS:
            for options in ({}, rules(heads=4)):
                dense(dtype, dim, dim_v, options)
                varlen(dtype, dim, dim_v, options)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
