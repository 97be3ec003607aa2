"""The backward pass: ``bwd`` and ``varlen_bwd``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.cpu import plain, varlen
from flash_cute.cpu.odd import NonFinite, is_in_range
from flash_cute.cpu.tiles import Options, Tiles, compute_dtype, fold, product, select, unfold_into

if TYPE_CHECKING:
    from flash_cute.ops.typed import BwdCall, VarlenBwdCall

Results = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]


def softmax_d_of(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, (batch, heads, seqlen_q), for dout and out in the layout of q."""
    dtype = compute_dtype(out)
    rows = (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()
    return rows if dlse is None else rows.sub_(dlse)


def dsink_of(options: Options, softmax_lse: Tensor, softmax_d: Tensor) -> Tensor | None:
    """Gradient of the sink, fp32 (heads,), from statistics (batch, heads, seqlen_q); else None."""
    if options.sink is None:
        return None
    lse = softmax_lse.masked_fill(softmax_lse == -torch.inf, torch.inf)
    p = (options.sink[:, None] - lse).exp_()
    return (p * softmax_d).sum((0, 2)).neg_().float()


def differentiate_rows(
    tiles: Tiles,
    rows: slice,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_d: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> Tensor:
    """Adds what ``rows`` contribute to dk and dv (n, seqlen_k, dim), and returns their dq.

    ``dout`` and the result are (n, group * rows, dim), ``lse`` and ``softmax_d`` (.., 1).
    """
    options, q = tiles.options, select(tiles.q, rows)
    dq = torch.zeros_like(q)
    sees_nothing = lse == -torch.inf
    some_see_nothing = bool(sees_nothing.any())
    for keys, hidden in tiles.key_blocks(rows):
        p, tanh = tiles.probabilities(rows, keys, hidden, lse)
        if some_see_nothing:
            p.masked_fill_(sees_nothing, 0)  # a score may be NaN
            hidden = sees_nothing.expand_as(p) if hidden is None else hidden | sees_nothing
        seen_by = None if hidden is None else hidden.transpose(-1, -2)
        ds = torch.bmm(dout, v[:, keys].transpose(1, 2))
        dropped = tiles.dropped(rows, keys)
        if dropped is None:
            p_kept = p
        else:
            p_kept = p.masked_fill(dropped, 0).mul_(options.keep_scale)
            ds.masked_fill_(dropped, 0).mul_(options.keep_scale)
        dv[:, keys] += product(p_kept.transpose(1, 2), dout, seen_by)
        ds.sub_(softmax_d).mul_(p)
        if tanh is not None:
            ds.mul_(1 - tanh.square_())
        if hidden is not None:
            ds.masked_fill_(hidden, 0)
        dq.add_(product(ds, tiles.k[:, keys], hidden), alpha=options.scale)
        dk[:, keys].add_(product(ds.transpose(1, 2), q, seen_by), alpha=options.scale)
    return dq


def _differentiate_tiles(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_lse: Tensor,
    softmax_d: Tensor,
    options: Options,
    first: int,
) -> plain.Gradients:
    """(dq, dk, dv), by tiles of scores."""
    tiles = Tiles(q, k, options, first)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    v, dout = fold(v, tiles.heads_k).flatten(0, 1), fold(dout, tiles.heads_k)
    lse, correction = tiles.statistic(softmax_lse), tiles.statistic(softmax_d)
    dk_sum, dv_sum = torch.zeros_like(tiles.k), torch.zeros_like(v)
    for rows in tiles.query_blocks():
        dout_rows, lse_rows, d_rows = (select(x, rows) for x in (dout, lse, correction))
        dq_rows = differentiate_rows(tiles, rows, v, dout_rows, lse_rows, d_rows, dk_sum, dv_sum)
        unfold_into(dq[:, rows], dq_rows)
    unfold_into(dk, dk_sum)
    unfold_into(dv, dv_sum)
    return dq, dk, dv


def _differentiate(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None,
    softmax_d: Tensor,
    options: Options,
    first: int = 0,
) -> plain.Gradients:
    """(dq, dk, dv) of dense tensors; ``first`` is the index of the first sequence in the whole
    batch."""
    causal = plain.causal_of(q, k, v, options) if dlse is None else None
    if causal is None:
        return _differentiate_tiles(dout, q, k, v, softmax_lse, softmax_d, options, first)
    results = plain.backward(dout, q, k, v, out, softmax_lse, options.scale, causal)
    if is_in_range(results[0]):  # any input out of range would make dq so, too
        return results
    odd = NonFinite.of(causal, (q, dout, out, softmax_lse.transpose(1, 2)[..., None]), k, v)
    if odd is None:
        return results
    results = plain.backward(
        *(odd.without_rows(dout), odd.without_rows(q), odd.without_keys(k), odd.without_keys(v)),
        odd.without_rows(out), softmax_lse.masked_fill(odd.row.transpose(1, 2), 0),
        options.scale, causal,
    )  # fmt: skip
    exact = _differentiate_tiles(dout, q, k, v, softmax_lse, softmax_d, options, first)
    dq, dk, dv = (
        torch.where(depends[..., None], right, x)
        for depends, right, x in zip(
            (odd.of_rows, odd.of_keys, odd.of_keys), exact, results, strict=True
        )
    )
    return dq, dk, dv


@internals.without_autograd
def bwd(call: BwdCall) -> Results:
    """The op ``bwd`` on the CPU: (dq, dk, dv, dsink, softmax_d) of a call of ``fwd``.

    ``dout`` is shaped like out, and ``dlse`` like softmax_lse or None for 0. The result is bitwise
    repeatable, ``deterministic`` or not. Raises ValueError for dropout without ``rng``.
    """
    options = Options.of(call)
    softmax_d = softmax_d_of(call.dout, call.out, call.dlse)
    dq, dk, dv = _differentiate(
        call.dout, call.q, call.k, call.v, call.out, call.softmax_lse, call.dlse, softmax_d, options
    )
    return dq, dk, dv, dsink_of(options, call.softmax_lse, softmax_d), softmax_d


@internals.without_autograd
def varlen_bwd(call: VarlenBwdCall) -> Results:
    """The op ``varlen_bwd`` on the CPU: (dq, dk, dv, dsink, softmax_d) of packed sequences.

    Rows of no sequence get gradients and softmax_d of 0, with or without ``zero_tensors``; else as
    ``bwd``. Raises ValueError for dropout without ``rng``.
    """
    return over_sequences(call, _differentiate)


def over_sequences(call: VarlenBwdCall, differentiate_one: Callable[..., Any]) -> Results:
    """Results of a packed batch, each sequence by ``differentiate_one``, which has the arguments of
    :func:`_differentiate`."""
    q, k, v, dout, out, dlse = call.q, call.k, call.v, call.dout, call.out, call.dlse
    options, softmax_lse = Options.of(call), call.softmax_lse
    softmax_d = torch.zeros_like(softmax_lse, memory_format=torch.contiguous_format)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    parts = zip(
        varlen.spans(call.cu_seqlens_q, call.seqused_q, call.max_seqlen_q, len(q)),
        varlen.spans(call.cu_seqlens_k, call.seqused_k, call.max_seqlen_k, len(k)),
        strict=False,
    )
    for index, (rows, keys) in enumerate(parts):
        lse, correction = softmax_lse[None, :, rows], softmax_d[None, :, rows]
        of_rows = None if dlse is None else dlse[None, :, rows]
        correction.copy_(softmax_d_of(dout[None, rows], out[None, rows], of_rows))
        dq[rows], dk[keys], dv[keys] = differentiate_one(
            dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse,
            of_rows, correction, options, index,
        )  # fmt: skip
    return dq, dk, dv, dsink_of(options, softmax_lse[None], softmax_d[None]), softmax_d
