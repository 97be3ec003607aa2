"""Attention over a cache of 8 bits: ``attend_quantized_kvcache``.

Numbers are widened to the compute dtype and multiplied by their descale in it; what follows is
attention as over any other cache. Keys and values of a sequence are widened at once if they are
few, else a block at a time, so that memory does not grow with the length of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_cute.cpu import varlen
from flash_cute.cpu.forward import Outputs, attend, attend_tiles
from flash_cute.cpu.kvcache import CachedSequence, cached_sequences, packed_queries, results_of
from flash_cute.cpu.tiles import Options, Tiles, compute_dtype

if TYPE_CHECKING:
    from flash_cute.ops.typed import AttendQuantizedKvcacheCall

FEW_NUMBERS = 2**25  # of K and V of a sequence: 128 MiB in fp32


class Dequantized:
    """Keys or values of a sequence; blocks (heads_k, rows, dim) are widened when asked for."""

    def __init__(self, codes: Tensor, descale: Tensor | None, dtype: torch.dtype) -> None:
        """``codes`` (rows, heads_k, dim) of 8 bits, ``descale`` (rows or 1, heads_k) or None."""
        self.codes, self.descale, self.dtype = codes, descale, dtype
        rows, heads_k, dim = codes.shape
        self.shape = torch.Size((heads_k, rows, dim))

    def rows(self, rows: slice) -> Tensor:
        """(rows, heads_k, dim) in the compute dtype."""
        wide = self.codes[rows].to(self.dtype, memory_format=torch.contiguous_format)
        if self.descale is not None:
            wide *= (self.descale if len(self.descale) == 1 else self.descale[rows])[..., None]
        return wide

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        return self.rows(index[1]).transpose(0, 1)


class QuantizedTiles(Tiles):
    """Tiles of one sequence q (1, seqlen_q, heads, dim), whose keys are widened block by block."""

    def __init__(self, q: Tensor, keys: Dequantized, options: Options, first: int) -> None:
        heads_k, rows, _ = keys.shape
        super().__init__(q, q.new_empty((1, rows, heads_k, 0)), options, first)  # sizes alone
        self._keys = keys

    def block_of_keys(self, keys: slice) -> Tensor:
        return self._keys[:, keys]


@torch.no_grad()
def attend_quantized_kvcache(call: AttendQuantizedKvcacheCall) -> tuple[Tensor, Tensor]:
    """The op ``attend_quantized_kvcache`` on the CPU: (out, softmax_lse).

    As ``fwd_kvcache`` without new keys, but the caches hold e4m3 or int8, which are multiplied by
    descales: fp32 (batch, heads_k), or of each token and head, the shape of the caches without
    their last dimension. q is of any dtype that attention has.
    """
    options, dtype = Options.of(call), compute_dtype(call.q)
    packed, offsets, longest_q = packed_queries(call)
    shape = (packed.shape[1], len(packed))
    outputs = Outputs.of_no_keys(packed, call.v_cache, shape, (), False, False)
    rows_of_each = varlen.spans(offsets, None, longest_q, len(packed))
    sequences = cached_sequences(call, len(offsets) - 1)
    for index, (rows, sequence) in enumerate(zip(rows_of_each, sequences, strict=True)):
        keys, values = (
            _dequantized(sequence, index, cache, descale, dtype)
            for cache, descale in ((call.k_cache, call.k_descale), (call.v_cache, call.v_descale))
        )
        part = outputs.of_sequence(index, rows, keys.shape[1])
        queries = packed[None, rows].to(dtype)
        if keys.shape.numel() + values.shape.numel() <= FEW_NUMBERS:
            every = slice(None)
            attend(queries, keys.rows(every)[None], values.rows(every)[None], options, part, index)
        else:
            attend_tiles(QuantizedTiles(queries, keys, options, index), values, part)
    return results_of(call, outputs)


def _dequantized(
    sequence: CachedSequence, index: int, cache: Tensor, descale: Tensor | None, dtype: torch.dtype
) -> Dequantized:
    """Keys or values in use of the sequence of this index."""
    codes = sequence.read(cache.view(torch.int8), sequence.used)[0].view(cache.dtype)
    if descale is None:
        return Dequantized(codes, None, dtype)
    if descale.dim() == 2:
        return Dequantized(codes, descale[index, None], dtype)
    return Dequantized(codes, sequence.read(descale, sequence.used)[0], dtype)
