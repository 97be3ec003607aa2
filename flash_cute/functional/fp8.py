"""Attention of fp8 q, k and v: by the ops of e4m3 inputs, or widened where those do not serve."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import check
from flash_cute.call import fp8, spellings, validate
from flash_cute.call.autocast import without_autocast
from flash_cute.call.rng import rng_of_call
from flash_cute.call.sizes import batch_of
from flash_cute.call.validate import fp8 as validate_fp8
from flash_cute.cpu import varlen
from flash_cute.functional.e4m3 import E4M3, Call, OpDescales, attend, why_widened
from flash_cute.functional.run import Result, check_options, run
from flash_cute.ops.typed import FwdCall, VarlenFwdCall
from flash_cute.sparse.value import Sparse

Descales = tuple[fp8.Descale, fp8.Descale, fp8.Descale]


def attention(
    call: Call,
    descales: Descales,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    *,
    sparse: Sparse | None = None,
    **asked: Any,
) -> Result:
    """The attention functions' result of a call with fp8 inputs, of which nothing is checked yet.
    ``asked``: ``return_lse``, ``return_rng`` and ``generator``."""
    fp8.check_arguments(call.q, call.k, call.v, descales, out_dtype, out)
    call = spellings.with_reals(call)
    if why_widened(call, out_dtype, sparse):
        return _widened(call, descales, out_dtype, sparse, asked)
    k_shape = tuple(call.k.shape)  # as it is given: without offsets it is packed below
    call = _prepared(call, (E4M3,))
    options = call._replace(softmax_scale=_scale(call, descales))
    check_options(options, asked["return_lse"], asked["return_rng"])
    rng = rng_of_call(call.q, call.dropout_p, asked["generator"], call.rng)
    if call.q.is_cuda and check.wanted(call.q):  # the CPU's op looks in any case
        _check_values(call, descales)
    found = attend(options, _op_descales(call, k_shape, descales), out_dtype)
    results = [found[0], *([found[1]] if asked["return_lse"] else [])]
    results += [rng] if asked["return_rng"] else []
    return tuple(results) if len(results) > 1 else results[0]


def _prepared(call: Call, dtypes: tuple[torch.dtype, ...]) -> Any:
    """The call with contiguous rows and packed keys, whose q, k, v and sequences are valid."""
    q, k, v = spellings.copy_if_last_dim_strided(call.q, call.k, call.v)
    if isinstance(call, FwdCall):
        validate.dense(q, k, v, dtypes=dtypes)
        check.dense(q, k)
        return call._replace(q=q, k=k, v=v)
    longest = spellings.integer(call.max_seqlen_q), spellings.integer(call.max_seqlen_k)
    cu_seqlens_k = call.cu_seqlens_k
    if cu_seqlens_k is None:
        k, v, cu_seqlens_k = spellings.pack_keys(k, v, call.seqused_k, call.block_table)
    used = call.seqused_q, call.seqused_k
    sequences = (call.cu_seqlens_q, cu_seqlens_k, *longest, *used)
    rest: Any = call[9:]
    validate.varlen(q, k, v, *sequences, call.block_table, dtypes=dtypes)
    check.varlen(q, k, *sequences, call.block_table, call.zero_tensors)
    return VarlenFwdCall(q, k, v, *sequences, *rest)


def _scale(call: Any, descales: Descales) -> Any:
    """softmax_scale times the descales of q and k that are numbers."""
    return fp8.scaled(call.softmax_scale, call.q.shape[-1], *descales[:2])


def _op_descales(call: Any, k_shape: tuple[int, ...], descales: Descales) -> OpDescales:
    """Descales in the op's shapes (:mod:`flash_cute.call.validate.fp8`); None for those that are 1,
    or numbers of q and k."""
    q, k, v = call.q, call.k, call.v
    heads = (batch_of(call), k.shape[-2])
    rows_q, rows_k = (*q.shape[:-1], 1), (*k_shape[:-1], 1)
    own = (rows_q, rows_k, (*heads, v.shape[-1]))
    found: list[Tensor | None] = []
    for name, x, shape in zip(fp8.NAMES, descales, own, strict=True):
        fp8.check_shape(name, x, heads, shape)
        if x is None or (not isinstance(x, Tensor) and name != "v_descale"):
            found.append(None)
            continue
        if not isinstance(x, Tensor):
            x = torch.full((1,), x, dtype=torch.float32, device=q.device)
        x = x.float()
        if x.dim() < 2:
            x = x.reshape(1, 1).expand(heads)
        elif name != "v_descale" and x.dim() == len(shape):  # of rows, which have 3 dims or more
            x = x[..., 0]
            is_packed = x.dim() < 3
            if name == "k_descale" and k.dim() == 3 and not is_packed:
                x, is_packed = x.flatten(0, 1), True
            x = x[None] if is_packed else x
        found.append(x)
    return found[0], found[1], found[2]


def _widened(
    call: Call,
    descales: Descales,
    out_dtype: torch.dtype | None,
    sparse: Sparse | None,
    asked: dict[str, Any],
) -> Result:
    """The result by attention in 16 bits, or in fp32."""
    widening = fp8.Fp8Widening.of(call.q, call.k, call.v, descales, out_dtype)
    q, k, v = widening.widen(call.q, call.k, call.v)
    call = _prepared(call._replace(q=q, k=k, v=v), validate.DTYPES)
    cu_seqlens_q = getattr(call, "cu_seqlens_q", None)
    q, scale = widening.descale(call.q, call.k, call.v, call.softmax_scale, cu_seqlens_q)
    if check.is_readable(q) and (q.is_cpu or check.is_on()):
        _check_values(call, descales)
    call = call._replace(q=q, softmax_scale=scale)
    with without_autocast(q.device):
        result = run(call, sparse=sparse, **asked)
    return widening.finish(result, cu_seqlens_q)


def _check_values(call: Any, descales: Descales) -> None:
    """Refuses tensors of descales that are not positive and finite, where a sequence uses them; of
    rows of pages none is looked at."""
    total_q, total_k = len(call.q), len(call.k)
    for name, x in zip(fp8.NAMES, descales, strict=True):
        if not isinstance(x, Tensor):
            continue
        of_rows = x.dim() > 2 and name != "v_descale"
        if not of_rows or isinstance(call, FwdCall):
            validate_fp8.values(name, x)
            continue
        x = x.flatten(0, -3)
        if name == "q_descale":
            given = (call.cu_seqlens_q, call.seqused_q, call.max_seqlen_q, total_q)
        elif call.block_table is None:
            given = (call.cu_seqlens_k, call.seqused_k, call.max_seqlen_k, total_k)
        else:
            continue
        for rows in varlen.spans(*given):
            validate_fp8.values(name, x[rows])
