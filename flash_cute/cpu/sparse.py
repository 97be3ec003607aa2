"""Attention on the CPU over lists of tiles: only the listed tiles are computed.

``lists`` and ``masks`` are the ops' ``tile_lists`` and ``tile_bits`` (:mod:`flash_cute.sparse`).
Each row of tiles is attention of its queries over the keys that it lists, by the loops of dense
calls; rows with equally many tiles are computed together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.cpu import backward, forward
from flash_cute.cpu.forward import Outputs
from flash_cute.cpu.gathered import GatheredTiles, ListedCall, from_tiles
from flash_cute.cpu.plain import Gradients
from flash_cute.cpu.tiles import Options, unfold_into
from flash_cute.sparse.lists import TILE, codes_of, tiles_of

if TYPE_CHECKING:
    from flash_cute.ops.typed import BwdCall, FwdCall, VarlenBwdCall, VarlenFwdCall

_QUERIES = slice(0, TILE)


@internals.without_autograd
def fwd(call: FwdCall, lists: Tensor, masks: Tensor | None) -> Outputs:
    """The op ``fwd`` with lists that have queries as rows: as :func:`flash_cute.cpu.forward.fwd`"""
    q, k, statistic = call.q, call.k, (len(call.q), call.q.shape[2], call.q.shape[1])
    optional = (call.return_softmax, call.return_row_max)
    outputs = Outputs.of_no_keys(q, call.v, statistic, (*statistic, k.shape[1]), *optional)
    codes = codes_of(lists, tiles_of(k.shape[1]))
    _attend(q, k, call.v, Options.of(call), outputs, codes, masks)
    return outputs


@internals.without_autograd
def varlen_fwd(call: VarlenFwdCall, lists: Tensor, masks: Tensor | None) -> Outputs:
    """The op ``varlen_fwd`` with lists of each sequence, or one for all."""

    def attend_one(q: Tensor, k: Tensor, v: Tensor, options: Options, out: Outputs, i: int) -> None:
        codes = codes_of(_of_sequence(lists, i), tiles_of(k.shape[1]))
        _attend(q, k, v, options, out, codes[:, :, : tiles_of(q.shape[1])], masks, i)

    return forward.over_sequences(call, attend_one)


@internals.without_autograd
def bwd(call: BwdCall, lists: Tensor, masks: Tensor | None) -> backward.Results:
    """The op ``bwd`` with lists that have keys as rows: as :func:`flash_cute.cpu.backward.bwd`."""
    options, softmax_lse = Options.of(call), call.softmax_lse
    softmax_d = backward.softmax_d_of(call.dout, call.out, call.dlse)
    codes = codes_of(lists, tiles_of(call.q.shape[1])).transpose(-1, -2)
    tensors = (call.dout, call.q, call.k, call.v, softmax_lse, softmax_d)
    gradients = _differentiate(*tensors, options, codes, masks)
    return *gradients, backward.dsink_of(options, softmax_lse, softmax_d), softmax_d


@internals.without_autograd
def varlen_bwd(call: VarlenBwdCall, lists: Tensor, masks: Tensor | None) -> backward.Results:
    """The op ``varlen_bwd`` with lists of each sequence, or one for all."""

    def differentiate_one(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        dlse: Tensor | None, softmax_d: Tensor, options: Options, i: int,
    ) -> Gradients:  # fmt: skip
        codes = codes_of(_of_sequence(lists, i), tiles_of(q.shape[1])).transpose(-1, -2)
        codes = codes[..., : tiles_of(k.shape[1])]
        return _differentiate(dout, q, k, v, softmax_lse, softmax_d, options, codes, masks, i)

    return backward.over_sequences(call, differentiate_one)


def _of_sequence(lists: Tensor, index: int) -> Tensor:
    return lists if len(lists) == 1 else lists[index : index + 1]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    outputs: Outputs,
    codes: Tensor,
    masks: Tensor | None,
    first: int = 0,
) -> None:
    """Attention of dense q, k and v, written into ``outputs``; ``codes`` as :class:`ListedCall` has
    them, ``first`` is the index of the first sequence in the whole batch."""
    whole = ListedCall(q, k, v, options, codes, masks, first)
    out = whole.q.new_zeros((*whole.q.shape[:-1], v.shape[-1]))
    lse, row_max = (whole.q.new_full((*whole.q.shape[:-1], 1), -torch.inf) for _ in range(2))
    if options.sink is not None:
        of_lists = options.sink.repeat(whole.batch).view(-1, whole.group, 1, 1)
        lse.copy_(of_lists.repeat_interleave(tiles_of(whole.seqlen_q), 0))
    for rows in whole.parts():
        tiles = GatheredTiles(whole, rows)
        results = forward.attend_rows(tiles, tiles.keys(whole.v), _QUERIES)
        for total, part in zip((out, lse, row_max), results, strict=True):
            tiles.write_queries(total, part)
        if outputs.softmax is not None:
            _write_softmax(tiles, results[1], outputs.softmax)
    _write(outputs.out, out)
    for target, total in ((outputs.softmax_lse, lse), (outputs.row_max, row_max)):
        if target is not None:
            target.copy_(from_tiles(total, whole.seqlen_q).reshape(target.shape))


def _write(target: Tensor, by_tiles: Tensor) -> None:
    """Rounds (n * tiles, group, 128, dim) into the layout of q."""
    unfold_into(target, from_tiles(by_tiles, target.shape[1]).flatten(1, 2))


def _write_softmax(tiles: GatheredTiles, lse: Tensor, softmax: Tensor) -> None:
    """Writes the probabilities of the rows, negative where dropout drops them, into (batch, heads,
    seqlen_q, seqlen_k)."""
    at = tiles.at
    for keys, hidden in tiles.key_blocks(_QUERIES):
        p, _ = tiles.probabilities(_QUERIES, keys, hidden, lse)
        dropped = tiles.dropped(_QUERIES, keys)
        if dropped is not None:
            p = torch.where(dropped, -p, p)
        places = tiles.places(slice(keys.start // TILE, keys.stop // TILE))
        for m, part in enumerate(p.unflatten(1, (-1, TILE))):
            key = places[m][places[m] < softmax.shape[3]]
            row = slice(int(at.row[m]) * TILE, int(at.row[m]) * TILE + TILE)
            for head, of_head in zip(tiles.query_heads[m], part, strict=True):
                target = softmax[at.batch[m], head, row]
                target[:, key] = of_head[: len(target), : len(key)].to(softmax.dtype)


def _differentiate(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_lse: Tensor,
    softmax_d: Tensor,
    options: Options,
    codes: Tensor,
    masks: Tensor | None,
    first: int = 0,
) -> Gradients:
    """(dq, dk, dv) of dense tensors, bitwise repeatable; statistics (batch, heads, seqlen_q)."""
    whole = ListedCall(q, k, v, options, codes, masks, first)
    dout_tiles = whole.of_queries(dout)
    lse, correction = whole.statistic(softmax_lse, -torch.inf), whole.statistic(softmax_d, 0)
    dq, dk, dv = torch.zeros_like(whole.q), torch.zeros_like(whole.k), torch.zeros_like(whole.v)
    for rows in whole.parts():
        tiles = GatheredTiles(whole, rows)
        values = tiles.keys(whole.v)
        dk_part, dv_part = torch.zeros_like(tiles.k), torch.zeros_like(values)
        dout_rows, lse_rows, d_rows = (tiles.queries(x) for x in (dout_tiles, lse, correction))
        dq_part = backward.differentiate_rows(
            tiles, _QUERIES, values, dout_rows, lse_rows, d_rows, dk_part, dv_part
        )
        tiles.write_queries(dq, dq_part)
        tiles.add_to_keys(dk, dk_part)
        tiles.add_to_keys(dv, dv_part)
    results = tuple(x.new_empty(x.shape) for x in (q, k, v))
    _write(results[0], dq)
    _write(results[1], dk[:, None])
    _write(results[2], dv[:, None])
    return results[0], results[1], results[2]
