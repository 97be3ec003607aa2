"""Calls in which each query token chose its keys, run with all query heads of a kv head as rows of
one head: :mod:`flash_cute.sparse.token_tiles`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_cute.ops.typed import FwdCall, VarlenFwdCall
from flash_cute.sparse.value import Sparse


def pack(call: FwdCall | VarlenFwdCall, sparse: Sparse) -> tuple[FwdCall, Sparse] | None:
    """The same call with the query heads of a kv head as rows, and its lists; None if its rows
    would not be alike, or ``sparse`` has no such lists."""
    if not isinstance(call, FwdCall) or call.q.numel() == 0 or call.k.numel() == 0:
        return None
    if call.alibi_slopes is not None or call.sink is not None or call.dropout_p > 0:
        return None
    if call.window_size_left >= 0 or call.window_size_right >= 0:
        return None
    if call.return_softmax or call.return_row_max:
        return None
    if (call.q.shape[1], call.k.shape[1]) != (sparse.seqlen_q, sparse.seqlen_k):
        return None
    heads_k = call.k.shape[2]
    if sparse.list_heads not in (1, heads_k):
        return None  # the query heads of a kv head chose apart
    lists = sparse.token_lists(call.q.shape[2] // heads_k, call.is_causal)
    if lists is None:
        return None
    q = call.q.unflatten(2, (heads_k, -1)).transpose(2, 3).flatten(1, 2)
    return call._replace(q=q, is_causal=False), lists


def unpack(results: Any, seqlen_q: int, out: Tensor | None, has_lse: bool) -> Any:
    """The results of the call as it was, of those of its rows: out, in ``out`` if that is given,
    and softmax_lse if it is second; what else there is stays."""
    of_rows, *others = (results,) if isinstance(results, Tensor) else results
    found = of_rows.unflatten(1, (seqlen_q, -1)).transpose(2, 3).flatten(2, 3)
    if out is not None:
        found = out.copy_(found)
    if not has_lse:
        return (found, *others) if others else found
    softmax_lse, *rest = others
    return (found, softmax_lse.unflatten(-1, (seqlen_q, -1)).transpose(-1, -2).flatten(1, 2), *rest)
