"""Attention of e4m3 q, k and v, whose weights are rounded to e4m3, too: ``fp8_fwd`` and
``fp8_varlen_fwd``.

The numbers are those of kernels on tensor cores: products and sums in fp32, weights relative to the
largest score so far, times 2^8 rounded to e4m3, and divided by the sum of what they were rounded
to. Weights below 2^-18 of a row's largest are 0. The log-sum-exp is of weights before they are
rounded. Kernels sum a chunk of keys in their tensor cores, whose accumulators hold 14 bits, and
chunks in fp32 unless ``two_level`` is off; here all sums are in fp32, with either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call.validate import fp8 as validate_fp8
from flash_cute.cpu import varlen
from flash_cute.cpu.forward import finite
from flash_cute.cpu.tiles import Options, Tiles, fold, product, select, unfold_into

if TYPE_CHECKING:
    from flash_cute.ops.typed import Fp8FwdCall, Fp8VarlenFwdCall

E4M3 = torch.float8_e4m3fn
WEIGHTS = 256.0  # what weights, which are at most 1, are multiplied by: e4m3 reaches 448
Results = tuple[Tensor, Tensor]
Descales = tuple[Tensor | None, Tensor | None, Tensor | None]


@internals.without_autograd
def fwd(call: Fp8FwdCall) -> Results:
    """The op ``fp8_fwd`` on the CPU: (out, softmax_lse) of dense q, k and v."""
    q, v = call.q, call.v
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=validate_fp8.out_dtype(call))
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
    descales = (call.q_descale, call.k_descale, call.v_descale)
    _attend(q, call.k, v, descales, _options(call), out, lse)
    return out, lse


@internals.without_autograd
def varlen_fwd(call: Fp8VarlenFwdCall) -> Results:
    """The op ``fp8_varlen_fwd`` on the CPU. Rows of no sequence get out 0 and lse -inf, and their
    descales may be anything."""
    q, options = call.q, _options(call)
    total_q, heads, _ = q.shape
    out = q.new_zeros((total_q, heads, call.v.shape[-1]), dtype=validate_fp8.out_dtype(call))
    lse = q.new_full((heads, total_q), -torch.inf, dtype=torch.float32)
    of_keys = (call.cu_seqlens_k, call.seqused_k, call.max_seqlen_k, call.block_table)
    k_rows, k_descale = None, call.k_descale
    if k_descale is not None and k_descale.dim() == 3:
        k_rows = k_descale if call.block_table is not None else k_descale[0]
    keys = [varlen.sequences(x.view(torch.uint8), *of_keys) for x in (call.k, call.v)]
    rows = varlen.spans(call.cu_seqlens_q, call.seqused_q, call.max_seqlen_q, total_q)
    of_k = None if k_rows is None else varlen.sequences(k_rows, *of_keys, missing=1.0)
    for index, (span, k, v) in enumerate(zip(rows, *keys, strict=False)):
        one = slice(index, index + 1)
        descales = (
            _sequence_descale(call.q_descale, one, span),
            _sequence_descale(k_descale, one, None) if of_k is None else next(of_k),
            None if call.v_descale is None else call.v_descale[one],
        )
        _attend(
            q[None, span], k.view(E4M3), v.view(E4M3), descales, options, out[None, span],
            lse[None, :, span],
        )  # fmt: skip
    return out, lse


def _sequence_descale(descale: Tensor | None, one: slice, rows: slice | None) -> Tensor | None:
    if descale is None:
        return None
    return descale[one] if descale.dim() == 2 or rows is None else descale[:, rows]


def _options(call: Any) -> Options:
    dim = call.q.shape[-1]
    return Options(
        scale=dim**-0.5 if call.softmax_scale is None else call.softmax_scale,
        window=(call.window_size_left, 0 if call.is_causal else call.window_size_right),
        softcap=0.0, slopes=None, sink=call.sink, dropout_p=0.0, rng=None,
    )  # fmt: skip


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: Descales,
    options: Options,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention of dense q, k and v, written into ``out`` and ``lse``."""
    for name, x in zip(validate_fp8.DESCALES, descales, strict=True):
        if x is not None:
            validate_fp8.values(name, x)
    tiles = Tiles(q, k, options)
    factors = _score_factors(tiles, descales)
    of_values = _value_factors(tiles, descales[2])
    values = fold(v, tiles.heads_k).flatten(0, 1)
    for rows in tiles.query_blocks():
        found, of_rows = _attend_rows(tiles, values, rows, factors)
        unfold_into(out[:, rows], found.mul_(of_values))
        target = lse[:, :, rows]
        target.copy_(of_rows.view(target.shape))


def _score_factors(tiles: Tiles, descales: Descales) -> tuple[Tensor, Tensor | None]:
    """What products of q and k are multiplied by: of each row (n, group, seqlen_q, 1), and of each
    key (n, 1, seqlen_k), None if they are all 1."""
    n = tiles.batch * tiles.heads_k
    of_rows = torch.full((n, 1, 1, 1), tiles.options.scale, dtype=torch.float32, device="cpu")
    of_keys = None
    of_q, of_k, _ = descales
    if of_q is not None and of_q.dim() == 2:
        of_rows = of_rows * of_q.reshape(n, 1, 1, 1)
    elif of_q is not None:
        of_rows = of_rows * of_q.transpose(1, 2).reshape(n, tiles.group, tiles.seqlen_q, 1)
    if of_k is not None and of_k.dim() == 2:
        of_rows = of_rows * of_k.reshape(n, 1, 1, 1)
    elif of_k is not None:
        of_keys = of_k.transpose(1, 2).reshape(n, 1, tiles.seqlen_k)
    return of_rows.expand(n, tiles.group, tiles.seqlen_q, 1), of_keys


def _value_factors(tiles: Tiles, descale: Tensor | None) -> Tensor:
    """v's descale as (n, 1, 1 or dim_v)."""
    n = tiles.batch * tiles.heads_k
    if descale is None:
        return torch.ones((n, 1, 1), device="cpu")
    return descale.reshape(n, 1, 1 if descale.dim() == 2 else descale.shape[-1])


def _attend_rows(
    tiles: Tiles, v: Tensor, rows: slice, factors: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Output (n, group * rows, dim_v) but for v's descale, and log-sum-exp (.., 1) of ``rows``."""
    q, of_rows, of_keys = select(tiles.q, rows), select(factors[0], rows), factors[1]
    largest = q.new_full((*q.shape[:2], 1), -torch.inf)
    total, rounded_total = torch.zeros_like(largest), torch.zeros_like(largest)
    out = q.new_zeros((*q.shape[:2], v.shape[-1]))
    for keys, hidden in tiles.key_blocks(rows):
        scores = torch.bmm(q, tiles.k[:, keys].transpose(1, 2)).mul_(of_rows)
        if of_keys is not None:
            scores.mul_(of_keys[..., keys])
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        previous, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        base = finite(largest)
        p = scores.sub_(base).exp_()
        rescale = previous.sub(base).exp_()
        total.mul_(rescale).add_(p.sum(-1, keepdim=True))
        p = p.mul_(WEIGHTS).to(E4M3).float()
        rounded_total.mul_(rescale).add_(p.sum(-1, keepdim=True))
        out.mul_(rescale).add_(product(p, v[:, keys], hidden))
    base = finite(largest)
    lse = total.log_().add_(base)
    if tiles.options.sink is not None:
        sink = tiles.of_heads(tiles.options.sink[None], rows)
        top = torch.maximum(base, sink)  # relative to the larger: neither overflows
        damping = base.sub(top).mul_(0.5).exp_()  # two factors, as the square may underflow
        rounded_total.mul_(damping).mul_(damping).add_(sink.sub(top).exp_().mul_(WEIGHTS))
        out.mul_(damping)
        lse = torch.logaddexp(lse, sink)
        return out.div_(rounded_total.masked_fill(rounded_total == 0, 1)).mul_(damping), lse
    return out.div_(rounded_total.masked_fill(rounded_total == 0, 1)), lse
