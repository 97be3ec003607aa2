"""Blocks of keys that a layer's indexer chose for each query, as in MiniMax-M3."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute.sparse import Sparse


def sparse_of(
    module: torch.nn.Module, block_indices: Tensor, padding: Tensor | None, seqlen_k: int
) -> Sparse:
    """The Sparse of ``block_indices`` (batch, heads_k, seqlen_q, k), -1 for none, and ``padding``
    (batch, seqlen_k), True or 1 for tokens that take part. Blocks are counted from the first key,
    as in the layer's own eager attention.

    Raises:
        ValueError: the layer has no block size.
    """
    keys = getattr(getattr(module, "indexer", None), "block_size", None)
    if keys is None:
        keys = getattr(getattr(module, "config", None), "index_block_size", None)
    if keys is None:
        raise ValueError(
            f"block_indices is given, and {type(module).__name__} does not say how many keys a "
            "block has; set module.config.index_block_size"
        )
    sparse = Sparse.topk(block_indices, keys, layout="bhsk", seqlen_k=seqlen_k)
    return sparse if padding is None else sparse.with_key_mask(padding.bool())


def refuse_with(**others: object) -> None:
    """Refuses arguments that block_indices cannot be combined with."""
    for name, x in others.items():
        if x is not None:
            raise NotImplementedError(
                f"block_indices is given with {name}; chosen blocks need rows of one document, "
                "dense or padded: use attn_implementation='eager' for others"
            )
