"""The rows of the sequences of a packed batch; bad offsets are clamped to the tensor."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def _clamp(value: int, high: int) -> int:
    return min(max(value, 0), high)


def spans(
    cu_seqlens: Tensor, seqused: Tensor | None, max_seqlen: int, total: int
) -> Iterator[slice]:
    """The rows of each sequence in a packed tensor of ``total`` rows.

    ``cu_seqlens`` int32 (batch + 1,), ``seqused`` int32 (batch,) or None. Offsets are clamped to
    [0, total], lengths to [0, max_seqlen] and then to ``seqused``.
    """
    offsets = [_clamp(offset, total) for offset in cu_seqlens.tolist()]
    used = [max_seqlen] * (len(offsets) - 1) if seqused is None else seqused.tolist()
    for start, stop, limit in zip(offsets, offsets[1:], used, strict=False):
        length = _clamp(stop - start, min(max_seqlen, max(limit, 0)))
        yield slice(start, start + length)


def sequences(
    x: Tensor,
    cu_seqlens: Tensor,
    seqused: Tensor | None,
    max_seqlen: int,
    block_table: Tensor | None = None,
    missing: float = 0,
) -> Iterator[Tensor]:
    """Each sequence (1, length, heads, dim) of ``x``, as a batch of one.

    ``x`` is packed, (total, heads, dim), or with ``block_table`` int32 (batch, max_blocks) paged,
    (num_blocks, page_size, heads, dim). The length of a paged sequence is its ``seqused`` or else
    its step in ``cu_seqlens``, clamped to [0, max_seqlen] and to what the table can hold; a page
    whose id lies outside [0, num_blocks) reads as ``missing``.
    """
    if block_table is None:
        for rows in spans(cu_seqlens, seqused, max_seqlen, len(x)):
            yield x[None, rows]
        return
    num_blocks, page_size = x.shape[:2]
    lengths = (cu_seqlens.diff() if seqused is None else seqused).tolist()
    for pages, length in zip(block_table.long(), lengths, strict=False):
        length = _clamp(length, min(max_seqlen, len(pages) * page_size))
        pages = pages[: -(-length // max(page_size, 1))]
        inside = (pages >= 0) & (pages < num_blocks)
        gathered = x.new_full((len(pages), *x.shape[1:]), missing)
        gathered[inside] = x[pages[inside]]
        yield gathered.flatten(0, 1)[None, :length]
