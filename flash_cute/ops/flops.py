"""The FLOPs that ``torch.utils.flop_counter.FlopCounterMode`` counts for the ops: their matrix
products, as for torch's own attention, without regard to masks. Sparse calls count as many tiles as
the lists have room for: reading them would wait for the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call.sizes import batch_of, cache_capacity
from flash_cute.cpu.varlen import spans
from flash_cute.ops.schema import CALLS, OPS, over_cache
from flash_cute.ops.typed import (
    AttendKvcacheCall,
    AttendQuantizedKvcacheCall,
    BwdCall,
    FwdCall,
    FwdKvcacheCall,
    VarlenBwdCall,
    VarlenFwdCall,
)
from flash_cute.ops.when_imported import when_imported
from flash_cute.sparse.lists import TILE


def register(_: torch.library.Library) -> None:
    """Registers the formulas once torch's counter is imported: importing it imports triton."""
    when_imported("torch.utils.flop_counter", _register_formulas)


def _register_formulas() -> None:
    """Registers a formula for every op that multiplies matrices, and for its overloads."""
    from torch.utils.flop_counter import register_flop_formula

    for packet, pairs in (
        (OPS.fwd, _dense_pairs),
        (OPS.varlen_fwd, _varlen_pairs),
        (OPS.fwd_kvcache, _cached_pairs),
        (OPS.attend_kvcache, _cached_pairs),
        (OPS.fp8_fwd, _dense_pairs),
        (OPS.fp8_varlen_fwd, _varlen_pairs),
        (OPS.attend_quantized_kvcache, _cached_pairs),
        (OPS.bwd, _dense_pairs),
        (OPS.varlen_bwd, _varlen_pairs),
    ):
        register_flop_formula(packet, get_raw=True)(_formula(packet, pairs))


def _formula(packet: Any, pairs: Any) -> Any:
    names = CALLS[packet.default]._fields
    is_backward = "dout" in names

    def flops(*args: Any, **named: Any) -> int:
        call = CALLS[packet.default](*args, **{x: named[x] for x in named if x in names})
        dim, dim_v = call.q.shape[-1], _values(call).shape[-1]
        # S = QK^T and PV; in backward S, dK and dQ have the dims of q, dP and dV those of v.
        columns = 3 * dim + 2 * dim_v if is_backward else dim + dim_v
        return 2 * call.q.shape[-2] * min(pairs(call), _listed_pairs(call)) * columns

    return flops


def _values(call: Any) -> Tensor:
    return call.v_cache if hasattr(call, "v_cache") else call.v


def _listed_pairs(call: Any) -> float:
    """Pairs of one head in the tiles that lists have room for, over all sequences."""
    lists = getattr(call, "tile_lists", None)
    if lists is None:
        return math.inf
    return batch_of(call) * lists.shape[2] * (lists.shape[3] - 1) * TILE**2


def _dense_pairs(call: FwdCall | BwdCall) -> int:
    """Pairs of a query and a key of one head, over all sequences."""
    batch, seqlen_q = call.q.shape[:2]
    return batch * seqlen_q * call.k.shape[1]


def _varlen_pairs(call: VarlenFwdCall | VarlenBwdCall) -> int:
    table = getattr(call, "block_table", None)
    queries = _lengths(call.cu_seqlens_q, call.max_seqlen_q, len(call.q), call.seqused_q)
    offsets, longest, used = call.cu_seqlens_k, call.max_seqlen_k, call.seqused_k
    if table is None:
        keys = _lengths(offsets, longest, len(call.k), used)
    elif _is_unknown(offsets):
        keys = [longest] * table.shape[0]
    else:
        capacity = min(longest, table.shape[1] * call.k.shape[1])
        keys = (offsets.diff() if used is None else used).clamp(0, capacity).tolist()
    return sum(n * m for n, m in zip(queries, keys, strict=True))


def _cached_pairs(cached: FwdKvcacheCall | AttendKvcacheCall | AttendQuantizedKvcacheCall) -> int:
    call = over_cache(cached)
    q, capacity = call.q, cache_capacity(call.k_cache, call.block_table)
    if call.cu_seqlens_q is None:
        queries = [q.shape[1]] * q.shape[0]
    else:
        queries = _lengths(call.cu_seqlens_q, call.max_seqlen_q, q.shape[0])
    if call.k is None:
        new = [0] * len(queries)
    elif call.cu_seqlens_k_new is None:
        new = [call.k.shape[1]] * len(queries)
    else:
        new = _lengths(call.cu_seqlens_k_new, call.k.shape[0], call.k.shape[0])
    used, pads = call.cache_seqlens, call.cache_leftpad
    if used is None or _is_unknown(used):
        in_use = [capacity] * len(queries)
    else:
        in_use = used.clamp(0, capacity).tolist()
    hidden = [0] * len(queries) if pads is None or _is_unknown(pads) else pads.tolist()
    return sum(
        rows * (min(n + m, capacity) - min(max(pad, 0), n))
        for rows, n, m, pad in zip(queries, in_use, new, hidden, strict=True)
    )


def _lengths(offsets: Tensor, longest: int, total: int, used: Tensor | None = None) -> list[int]:
    """The lengths of packed sequences, clamped as in the ops; the longest for all if the offsets'
    values are not known."""
    if _is_unknown(offsets):
        return [longest] * (len(offsets) - 1)
    return [rows.stop - rows.start for rows in spans(offsets, used, longest, total)]


def _is_unknown(x: Tensor) -> bool:
    return internals.is_fake(x) or x.is_meta
