"""Attention of e4m3 queries over e4m3 caches by ``fp8_varlen_fwd``, the op of e4m3 inputs: prompts
and chunks of them. To the op all caches are pages; one without a table has one page a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import ops
from flash_cute.call.fp8 import Descale, scaled
from flash_cute.call.sizes import batch_of
from flash_cute.functional import e4m3
from flash_cute.functional.cache_rows import MOST_ROWS, begins_on_vectors, capacity, query_rows
from flash_cute.functional.e4m3 import E4M3
from flash_cute.ops.typed import FwdKvcacheCall, VarlenFwdCall
from flash_cute.sparse.value import Sparse


def widened_because(call: FwdKvcacheCall, v_descale: Descale, sparse: Sparse | None) -> str:
    """Why attention of a valid call over 8-bit caches is in q's dtype, or in bf16 if that is e4m3;
    empty if the op of e4m3 inputs computes it. One rule for all devices, but for what GPUs lack."""
    q, k_cache = call.q, call.k_cache
    if q.dtype != E4M3 or k_cache.dtype != E4M3:
        name, x = ("q is", q) if q.dtype != E4M3 else ("the caches are", k_cache)
        return f"{name} {x.dtype}"
    if query_rows(call) <= MOST_ROWS:
        return f"a kv head has no more than {MOST_ROWS} rows of queries"
    given = {
        "sparse": sparse is not None, "softcap": call.softcap != 0,
        "alibi_slopes": call.alibi_slopes is not None,
        "cache_leftpad": call.cache_leftpad is not None, "rotary_cos": call.rotary_cos is not None,
        "num_splits": call.num_splits > 1,  # the op does not split keys
        "split_size": call.split_size > 0,
    }  # fmt: skip
    for name, is_given in given.items():
        if is_given:
            return f"{name} is given"
    if isinstance(v_descale, Tensor) and v_descale.dim() == 3:
        return "v_descale is of tokens"
    # The op's kernels transpose V for as many keys as each sequence has room for.
    rows, dims = batch_of(call) * capacity(call), (q.shape[-1], call.v_cache.shape[-1])
    copied = 2 * min(rows, k_cache.shape[0] * k_cache.shape[1]) * sum(dims)
    if rows * dims[1] > copied:
        return "the sequences have room for many more keys than the caches hold"
    return _lacking_on_cuda(call) if q.is_cuda else ""


def _lacking_on_cuda(call: FwdKvcacheCall) -> str:
    """What kernels lack for a call that the op computes on the CPU."""
    device, page_size, table = call.q.device, call.k_cache.shape[1], call.block_table
    dim, dim_v = call.q.shape[-1], call.v_cache.shape[-1]
    if not ops.has_fp8_attention(device):
        return f"there are no kernels of e4m3 inputs for {device}"
    if table is not None and table.shape[1] > 1 and page_size % 8:
        return f"pages have {page_size} rows, no multiple of 8"
    if dim % 16 or dim_v % 16 or not all(map(begins_on_vectors, call[1:3])):
        return "rows of the caches are no multiples of 16 bytes that begin on their boundaries"
    if dim <= 128 < dim_v:
        return f"head dims are {dim} and {dim_v}"
    return ""


def attend(
    call: FwdKvcacheCall, q_descale: Descale, k_descale: Descale, v_descale: Descale
) -> tuple[Tensor, Tensor]:
    """out, in bf16, and softmax_lse of such a call, which nothing joins any more. Descales of heads
    are one element, or (batch, heads_k)."""
    q, batch = call.q, batch_of(call)
    packed, offsets, longest = q, call.cu_seqlens_q, call.max_seqlen_q
    integers: dict[str, Any] = {"dtype": torch.int32, "device": q.device}
    if offsets is None:
        packed, longest = q.flatten(0, 1), q.shape[1]
        offsets = torch.arange(batch + 1, **integers) * longest
    table, used = call.block_table, call.cache_seqlens
    if table is None:
        pages = call.cache_batch_idx
        table = (torch.arange(batch, **integers) if pages is None else pages)[:, None]
    if used is None:
        used = torch.full((batch,), capacity(call), **integers)
    scale = scaled(call.softmax_scale, q.shape[-1], q_descale, k_descale)
    of_op = VarlenFwdCall(
        packed, call.k_cache, call.v_cache, offsets, offsets, longest,  # ``used`` counts keys
        capacity(call), None, used, block_table=table, softmax_scale=scale,
        is_causal=call.is_causal, window_size_left=call.window_size_left,
        window_size_right=call.window_size_right, sink=call.sink,
    )  # fmt: skip
    heads = (batch, call.k_cache.shape[2])
    if isinstance(q_descale, Tensor) and q_descale.dim() > 2:  # of rows
        q_descale = q_descale.reshape(1, *packed.shape[:2])
    if v_descale is not None and not isinstance(v_descale, Tensor):
        v_descale = torch.full((1,), v_descale, dtype=torch.float32, device=q.device)
    of_q, of_k, of_v = (_of_heads(x, heads) for x in (q_descale, k_descale, v_descale))
    out, softmax_lse = e4m3.attend(of_op, (of_q, of_k, of_v), None)
    if call.cu_seqlens_q is None:
        out = out.view(*q.shape[:-1], out.shape[-1])
        softmax_lse = softmax_lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1).contiguous()
    return out, softmax_lse


def _of_heads(x: Descale, heads: tuple[int, int]) -> Tensor | None:
    """A descale as the op takes it; None for numbers, which softmax_scale has."""
    if not isinstance(x, Tensor):
        return None
    return x if x.dim() > 1 else x.reshape(1, 1).expand(heads)
