"""flash-attn 2.8's helpers for padded batches."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute.call import validate


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x (rows, ...) by distinct indices int64 (n,)."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse: (first_axis_dim, ...) of zeros with ``values`` in the rows ``indices``."""
    validate.count("first_axis_dim", first_axis_dim)
    if len(indices) > first_axis_dim:
        raise ValueError(f"first_axis_dim is {first_axis_dim}; indices names {len(indices)} rows")
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x, and x itself."""
    return index_first_axis(x, indices), x


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Tokens that take part, laid end to end. Waits for the GPU.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integers, 1 takes part.
        unused_mask: as attention_mask, 1 for tokens that are kept but not counted in seqused.

    Returns:
        (tokens (total, ...), indices int64 (total,), cu_seqlens int32 (batch + 1,), max_seqlen,
        seqused int32 (batch,)).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    tokens, indices, cu_seqlens, longest = _laid_end_to_end(hidden_states, kept, lengths)
    return tokens, indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """:func:`unpad_input` for rows of several sequences each, laid end to end.

    Args:
        attention_mask_in_length: (batch, seqlen) integers, the lengths of a row's sequences in its
            first entries, then 0.

    Returns:
        (tokens, indices, cu_seqlens, max_seqlen).
    """
    seqlen = attention_mask_in_length.shape[1]
    positions = torch.arange(seqlen, device=attention_mask_in_length.device)
    kept = positions < attention_mask_in_length.sum(1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _laid_end_to_end(hidden_states, kept, lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse: (batch, seqlen, ...) of zeros with (total, ...) tokens at ``indices``."""
    validate.count("batch", batch)
    validate.count("seqlen", seqlen)
    if len(indices) > batch * seqlen:
        raise ValueError(
            f"batch is {batch} and seqlen {seqlen}; indices names {len(indices)} tokens"
        )
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def _laid_end_to_end(
    hidden_states: Tensor, kept: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    sums = lengths.cumsum(0, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(sums, (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest
