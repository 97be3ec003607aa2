"""Calls in which each query token chose its keys, run with all query heads of a kv head as rows of
one head: :mod:`flash_cute.sparse.token_tiles`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_cute.call.sizes import longest_keys, longest_queries
from flash_cute.ops.typed import FwdCall, VarlenFwdCall
from flash_cute.sparse.value import Sparse


def pack(
    call: FwdCall | VarlenFwdCall, sparse: Sparse
) -> tuple[FwdCall | VarlenFwdCall, Sparse] | None:
    """The same call with the query heads of a kv head as rows, and its lists; None if its rows
    would not be alike, or ``sparse`` has no such lists."""
    if call.q.numel() == 0 or call.k.numel() == 0:
        return None
    if call.alibi_slopes is not None or call.sink is not None or call.dropout_p > 0:
        return None
    if call.window_size_left >= 0 or call.window_size_right >= 0:
        return None
    if call.return_softmax or call.return_row_max:
        return None
    if (longest_queries(call), longest_keys(call)) != (sparse.seqlen_q, sparse.seqlen_k):
        return None
    heads_k = call.k.shape[-2]
    if sparse.list_heads not in (1, heads_k):
        return None  # the query heads of a kv head chose apart
    group = call.q.shape[-2] // heads_k
    shift = _shift(call) if isinstance(call, VarlenFwdCall) else None
    lists = sparse.token_lists(group, call.is_causal, shift)
    if lists is None:
        return None
    q = call.q.unflatten(-2, (heads_k, group)).transpose(-3, -2).flatten(-4, -3)
    call = call._replace(q=q, is_causal=False)
    if isinstance(call, VarlenFwdCall):  # what is behind the end, times a group, may be no int32
        used, longest = call.seqused_q, call.max_seqlen_q
        call = call._replace(
            cu_seqlens_q=call.cu_seqlens_q.clamp(0, call.q.shape[0]) * group,
            max_seqlen_q=longest * group,
            seqused_q=None if used is None else used.clamp(0, longest) * group,
        )
    return call, lists


def _shift(call: VarlenFwdCall) -> int | Tensor:
    """How many more keys than queries each sequence has: 0, also if no mask asks for it, or int32
    (batch,)."""
    of_queries = (call.cu_seqlens_q, call.seqused_q, call.max_seqlen_q, call.q.shape[0])
    of_keys = (call.cu_seqlens_k, call.seqused_k, call.max_seqlen_k, call.k.shape[0])
    are_same = of_queries[0] is of_keys[0] and of_queries[1] is of_keys[1]
    if not call.is_causal or (are_same and of_queries[2:] == of_keys[2:]):
        return 0
    return _lengths(*of_keys) - _lengths(*of_queries)


def _lengths(cu_seqlens: Tensor, used: Tensor | None, longest: int, total: int) -> Tensor:
    """The tokens of each sequence, int32 (batch,), cut to what fits as the ops cut them."""
    found = cu_seqlens.clamp(0, total).diff().clamp(0, longest)
    return found if used is None else found.minimum(used.clamp(min=0))


def unpack(results: Any, group: int, out: Tensor | None, has_lse: bool) -> Any:
    """The results of the call as it was, of those of its rows: out, in ``out`` if that is given,
    and softmax_lse if it is second; what else there is stays."""
    of_rows, *others = (results,) if isinstance(results, Tensor) else results
    found = of_rows.unflatten(-3, (-1, group)).transpose(-3, -2).flatten(-3, -2)
    if out is not None:
        found = out.copy_(found)
    if not has_lse:
        return (found, *others) if others else found
    softmax_lse, *rest = others
    of_heads = softmax_lse.unflatten(-1, (-1, group)).transpose(-1, -2).flatten(-3, -2)
    return (found, of_heads, *rest)
