"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the ops: their matrix products.

They count as those of torch's own attention: nothing is taken off for what a mask hides.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.cpu.varlen import spans
from flash_cute.ops.schema import DEFAULTS, OPS

_COUNTER = "torch.utils.flop_counter"  # imports triton, where there is one


def register(_: torch.library.Library) -> None:
    when_counted(_register_formulas)


def when_counted(register_formulas: Callable[[], None]) -> None:
    """Calls it now if torch's counter is there, else as soon as somebody imports it."""
    if _COUNTER in sys.modules:
        register_formulas()
        return
    _waiting.append(register_formulas)
    if len(_waiting) == 1:
        sys.meta_path.insert(0, _WhenImported())


_waiting: list[Callable[[], None]] = []


class _WhenImported(MetaPathFinder):
    """Finds torch's counter as others would, once, and registers the formulas behind its import."""

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            for register_formulas in _waiting:
                register_formulas()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register_formulas() -> None:
    """Of every op that multiplies matrices, its overloads included."""
    from torch.utils.flop_counter import register_flop_formula

    for packet, pairs in (
        (OPS.fwd, _dense_pairs),
        (OPS.varlen_fwd, _varlen_pairs),
        (OPS.fwd_kvcache, _cached_pairs),
        (OPS.attend_kvcache, _cached_pairs),
        (OPS.bwd, _dense_pairs),
        (OPS.varlen_bwd, _varlen_pairs),
    ):
        register_flop_formula(packet, get_raw=True)(_formula(packet, pairs))


def _formula(packet: Any, pairs: Any) -> Any:
    names = list(DEFAULTS[packet.default])
    is_backward = "dout" in names

    def flops(*args: Any, **named: Any) -> int:
        bound = dict(zip(names, args, strict=False)) | named
        dim, dim_v = bound["q"].shape[-1], _values(bound).shape[-1]
        # S = QK^T and PV; in backward S, dK and dQ have the dims of q, dP and dV those of v.
        columns = 3 * dim + 2 * dim_v if is_backward else dim + dim_v
        return 2 * bound["q"].shape[-2] * pairs(bound) * columns

    return flops


def _values(bound: dict[str, Any]) -> Tensor:
    return bound["v_cache"] if "v_cache" in bound else bound["v"]


def _dense_pairs(bound: dict[str, Any]) -> int:
    """Pairs of a query and a key of one head, over all sequences."""
    batch, seqlen_q = bound["q"].shape[:2]
    return batch * seqlen_q * bound["k"].shape[1]


def _varlen_pairs(bound: dict[str, Any]) -> int:
    q, k, table = bound["q"], bound["k"], bound.get("block_table")
    queries = _lengths(
        bound["cu_seqlens_q"], bound["max_seqlen_q"], q.shape[0], bound.get("seqused_q")
    )
    offsets, longest, used = bound["cu_seqlens_k"], bound["max_seqlen_k"], bound.get("seqused_k")
    if table is None:
        keys = _lengths(offsets, longest, k.shape[0], used)
    elif _is_unknown(offsets):
        keys = [longest] * table.shape[0]
    else:
        capacity = min(longest, table.shape[1] * k.shape[1])
        keys = (offsets.diff() if used is None else used).clamp(0, capacity).tolist()
    return sum(n * m for n, m in zip(queries, keys, strict=True))


def _cached_pairs(bound: dict[str, Any]) -> int:
    q, k_cache, table = bound["q"], bound["k_cache"], bound.get("block_table")
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    offsets = bound.get("cu_seqlens_q")
    if offsets is None:
        queries = [q.shape[1]] * q.shape[0]
    else:
        queries = _lengths(offsets, bound["max_seqlen_q"], q.shape[0])
    new, new_offsets = bound.get("k"), bound.get("cu_seqlens_k_new")
    if new is None:
        joining = [0] * len(queries)
    elif new_offsets is None:
        joining = [new.shape[1]] * len(queries)
    else:
        joining = _lengths(new_offsets, new.shape[0], new.shape[0])
    used, pads = bound.get("cache_seqlens"), bound.get("cache_leftpad")
    if used is None or _is_unknown(used):
        in_use = [capacity] * len(queries)
    else:
        in_use = used.clamp(0, capacity).tolist()
    hidden = [0] * len(queries) if pads is None or _is_unknown(pads) else pads.tolist()
    return sum(
        rows * (min(n + m, capacity) - min(max(pad, 0), n))
        for rows, n, m, pad in zip(queries, in_use, joining, hidden, strict=True)
    )


def _lengths(offsets: Tensor, longest: int, total: int, used: Tensor | None = None) -> list[int]:
    """Of sequences end to end, as the ops take them; the longest for all where the offsets' values
    are not known."""
    if _is_unknown(offsets):
        return [longest] * (len(offsets) - 1)
    return [rows.stop - rows.start for rows in spans(offsets, used, longest, total)]


def _is_unknown(x: Tensor) -> bool:
    return internals.is_fake(x) or x.is_meta
