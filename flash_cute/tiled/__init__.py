"""Attention of (B, H, N, D) with the caller's tile: ``Br`` query rows, ``Bc`` key columns.

Softmax over ``q k^T / sqrt(D)``, without a mask (FlashAttention, arXiv 2205.14135). Any ``Bc, Br``
>= 1 gives the right result, whether they divide N or not; only the scores of a tile, or of a few
small ones, are in memory.

- On the CPU they are the tile. A step takes several small tiles (:mod:`flash_cute.cpu.streaming`).
- On CUDA tiles are built in: the kernel with the nearest tile runs, of those that are made for the
  head dim (:func:`flash_cute.kernels.nearest`; :func:`kernel_of` says which). A pair whose tiles of
  Q, K and V would not fit into a CTA's shared memory raises ValueError.

For masks, grouped heads and the fastest kernel call :func:`flash_cute.flash_attn_func`.
"""

from flash_cute.tiled.functions import (
    FlashAttention,
    flash_attention_backward,
    flash_attention_forward,
    kernel_of,
)

__all__ = [
    "FlashAttention",
    "flash_attention_backward",
    "flash_attention_forward",
    "kernel_of",
]
