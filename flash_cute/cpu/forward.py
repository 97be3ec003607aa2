"""The forward pass: ``fwd`` and ``varlen_fwd``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.cpu import plain, varlen
from flash_cute.cpu.odd import NonFinite
from flash_cute.cpu.tiles import (
    Blocks,
    Options,
    Tiles,
    compute_dtype,
    fold,
    product,
    select,
    unfold_into,
)

if TYPE_CHECKING:
    from flash_cute.ops.typed import FwdCall, VarlenFwdCall


class Outputs(NamedTuple):
    """The results of a forward pass; ``row_max`` and ``softmax`` are optional."""

    out: Tensor  # (batch, seqlen_q, heads, dim_v) or (total_q, heads, dim_v)
    softmax_lse: Tensor  # (batch, heads, seqlen_q) or (heads, total_q)
    row_max: Tensor | None  # as softmax_lse
    softmax: Tensor | None  # (batch, heads, max_seqlen_q, max_seqlen_k)

    @classmethod
    def of_no_keys(
        cls,
        q: Tensor,
        v: Tensor,
        lse_shape: tuple[int, ...],
        softmax_shape: tuple[int, ...],
        return_softmax: bool,
        return_row_max: bool,
    ) -> Outputs:
        """New tensors with the results of rows that see no key."""
        dtype = compute_dtype(q)
        return cls(
            out=q.new_zeros((*q.shape[:-1], v.shape[-1])),
            softmax_lse=q.new_full(lse_shape, -torch.inf, dtype=dtype),
            row_max=q.new_full(lse_shape, -torch.inf, dtype=dtype) if return_row_max else None,
            softmax=q.new_zeros(softmax_shape) if return_softmax else None,
        )

    def of_sequence(self, index: int, rows: slice, seqlen_k: int) -> Outputs:
        """Views of the part of a packed batch that belongs to one sequence, as a batch of one."""
        row_max, softmax = self.row_max, self.softmax
        seqlen_q = rows.stop - rows.start
        return Outputs(
            out=self.out[None, rows],
            softmax_lse=self.softmax_lse[None, :, rows],
            row_max=None if row_max is None else row_max[None, :, rows],
            softmax=None if softmax is None else softmax[index, None, :, :seqlen_q, :seqlen_k],
        )


def attend_rows(tiles: Tiles, v: Blocks, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Output (n, group * rows, dim_v), log-sum-exp and row maximum (.., 1) of ``rows``.

    Online softmax (Milakov and Gimelshein, arXiv 1805.02867): ``total`` and ``out`` are sums
    relative to exp(reference), where reference is the maximum so far of the sink and the scores.
    """
    q, sink = select(tiles.q, rows), tiles.options.sink
    row_max = q.new_full((*q.shape[:2], 1), -torch.inf)
    reference = row_max if sink is None else tiles.of_heads(sink[None], rows)
    total = (reference - finite(reference)).exp_()
    out = q.new_zeros((*q.shape[:2], v.shape[-1]))
    for keys, hidden in tiles.key_blocks(rows):
        scores, _ = tiles.scores(rows, keys)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        tile_max = scores.amax(-1, keepdim=True)
        row_max = torch.maximum(row_max, tile_max)
        previous, reference = reference, torch.maximum(reference, tile_max)
        base = finite(reference)
        p = scores.sub_(base).exp_()
        rescale = previous.sub(base).exp_()
        total.mul_(rescale).add_(p.sum(-1, keepdim=True))
        dropped = tiles.dropped(rows, keys)
        if dropped is not None:
            p.masked_fill_(dropped, 0).mul_(tiles.options.keep_scale)
        out.mul_(rescale).add_(product(p, v[:, keys], hidden))
    out.div_(total.masked_fill(total == 0, 1))
    return out, total.log_().add_(finite(reference)), row_max


def finite(reference: Tensor) -> Tensor:
    """``reference`` with 0 for -inf, so that exp(-inf - reference) is 0 and not nan."""
    return reference.masked_fill(reference == -torch.inf, 0)


def _write_softmax(tiles: Tiles, rows: slice, lse: Tensor, softmax: Tensor) -> None:
    """Writes the probabilities of ``rows``, negative where dropout drops them."""
    for keys, hidden in tiles.key_blocks(rows):
        p, _ = tiles.probabilities(rows, keys, hidden, lse)
        dropped = tiles.dropped(rows, keys)
        if dropped is not None:
            p = torch.where(dropped, -p, p)
        target = softmax[:, :, rows, keys]
        target.copy_(p.view(target.shape))


def _attend_tiles(tiles: Tiles, v: Tensor, outputs: Outputs) -> None:
    """Attention of all rows over v (batch, seqlen_k, heads_k, dim_v), written into ``outputs``."""
    attend_tiles(tiles, fold(v, tiles.heads_k).flatten(0, 1), outputs)


def attend_tiles(tiles: Tiles, values: Blocks, outputs: Outputs) -> None:
    """Attention of all rows over ``values`` (n, seqlen_k, dim_v), written into ``outputs``."""
    for rows in tiles.query_blocks():
        out, lse, row_max = attend_rows(tiles, values, rows)
        unfold_into(outputs.out[:, rows], out)
        target = outputs.softmax_lse[:, :, rows]
        target.copy_(lse.view(target.shape))
        if outputs.row_max is not None:
            outputs.row_max[:, :, rows] = row_max.view(target.shape)
        if outputs.softmax is not None:
            _write_softmax(tiles, rows, lse, outputs.softmax)


def _attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, options: Options, in_bf16: bool, with_lse: bool = True
) -> plain.Results | None:
    """(out, softmax_lse) by ATen's kernel, or None if it does not compute this call."""
    causal = plain.causal_of(q, k, v, options)
    if causal is None:
        return None
    odd = NonFinite.of(causal, (q,), k, v)
    if odd is None:
        return plain.forward(q, k, v, options.scale, causal, in_bf16, with_lse)
    in_range = odd.without_rows(q), odd.without_keys(k), odd.without_keys(v)
    out, lse = plain.forward(*in_range, options.scale, causal, in_bf16, with_lse)
    exact = Outputs.of_no_keys(q, v, (*q.shape[:3:2], q.shape[1]), (), False, False)
    _attend_tiles(Tiles(q, k, options), v, exact)
    out = torch.where(odd.of_rows[..., None], exact.out, out)
    if lse is not None:
        lse = torch.where(odd.of_rows.transpose(1, 2), exact.softmax_lse, lse)
    return out, lse


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    outputs: Outputs,
    first: int = 0,
    in_bf16: bool = False,
) -> None:
    """Attention of dense q, k and v, written into ``outputs``; ``first`` is the index of the first
    sequence in the whole batch. Optional results change no bit of out and softmax_lse."""
    results = _attend_plainly(q, k, v, options, in_bf16)
    if results is None or outputs.row_max is not None or outputs.softmax is not None:
        _attend_tiles(Tiles(q, k, options, first), v, outputs)
    if results is not None:
        outputs.out.copy_(results[0])
        outputs.softmax_lse.copy_(results[1])


@internals.without_autograd
def fwd(call: FwdCall) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The op ``fwd`` on the CPU: (out, softmax_lse, row_max, softmax) of dense q, k and v.

    q (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_k, dim), v (batch, seqlen_k, heads_k,
    dim_v); fp16, bf16, fp32 or fp64. The result is bitwise repeatable, ``deterministic`` or not.
    Raises ValueError for dropout without ``rng``.
    """
    q, k, v = call.q, call.k, call.v
    options, in_bf16 = Options.of(call), plain.is_fast_in_bf16(q)
    if not call.return_softmax and not call.return_row_max:
        results = _attend_plainly(q, k, v, options, in_bf16)
        if results is not None:
            return *results, None, None
    batch, seqlen_q, heads, _ = q.shape
    statistic = (batch, heads, seqlen_q)
    shape, optional = (*statistic, k.shape[1]), (call.return_softmax, call.return_row_max)
    outputs = Outputs.of_no_keys(q, v, statistic, shape, *optional)
    attend(q, k, v, options, outputs, in_bf16=in_bf16)
    return outputs


@internals.without_autograd
def fwd_without_lse(call: FwdCall) -> tuple[Tensor | None, ...]:
    """:func:`fwd` for callers that need out alone: results that would take extra time are None."""
    q, k, v = call.q, call.k, call.v
    if plain.is_fast_in_bf16(q):
        results = _attend_plainly(q, k, v, Options.of(call), in_bf16=True, with_lse=False)
        if results is not None:
            return *results, None, None
    return fwd(call)


@internals.without_autograd
def varlen_fwd(call: VarlenFwdCall) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The op ``varlen_fwd`` on the CPU: (out, softmax_lse, row_max, softmax) of packed sequences.

    q (total_q, heads, dim); k and v (total_k, heads_k, dim or dim_v), or with ``block_table``
    (num_blocks, page_size, heads_k, dim or dim_v). Rows of no sequence get out 0 and lse -inf, with
    or without ``zero_tensors``. Raises ValueError for dropout without ``rng``.
    """
    return over_sequences(call, attend)


def over_sequences(call: VarlenFwdCall, attend_one: Callable[..., None]) -> Outputs:
    """Results of a packed batch: each sequence is computed by ``attend_one``, whose arguments are
    those of :func:`attend`."""
    q, options = call.q, Options.of(call)
    total_q, heads, _ = q.shape
    batch = max(len(call.cu_seqlens_q) - 1, 0)
    shape = (batch, heads, call.max_seqlen_q, call.max_seqlen_k)
    optional = (call.return_softmax, call.return_row_max)
    outputs = Outputs.of_no_keys(q, call.v, (heads, total_q), shape, *optional)
    of_keys = (call.cu_seqlens_k, call.seqused_k, call.max_seqlen_k, call.block_table)
    parts = zip(
        varlen.spans(call.cu_seqlens_q, call.seqused_q, call.max_seqlen_q, total_q),
        varlen.sequences(call.k, *of_keys),
        varlen.sequences(call.v, *of_keys),
        strict=False,
    )
    for index, (rows, keys, values) in enumerate(parts):
        part = outputs.of_sequence(index, rows, keys.shape[1])
        attend_one(q[None, rows], keys, values, options, part, index)
    return outputs
