"""Attention over a key/value cache, for serving: one call appends, rotates and attends.

Arguments are those of flash-attn 2.8's function of the same name, in its order, and by keyword
those that FlashAttention-3's has on top for chunks of prompts, other rotary positions, pages and
caches of 8 bits: not ``qv``, ``attention_chunk``, nor how its kernels are scheduled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import check, ops
from flash_cute.call import spellings, validate
from flash_cute.call.fp8 import Descale
from flash_cute.call.refusal import is_refusal
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.call.validate import options as validate_options
from flash_cute.call.validate import quantized_kvcache as quantized
from flash_cute.functional import quantized_kvcache, sparse_kvcache
from flash_cute.functional.run import (
    are_counts,
    are_rows,
    is_direct,
    is_plain,
    needs_grad,
    run_kvcache,
)
from flash_cute.kernels import plan_log
from flash_cute.ops import autocast
from flash_cute.ops.typed import FwdKvcacheCall
from flash_cute.sparse.value import Sparse


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,  # an int: see flash_cute.functional
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    sink: Tensor | None = None,
    split_size: int = 0,
    check_indices: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sparse: Sparse | None = None,
    q_descale: Tensor | float | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    **others: Any,
) -> Any:
    """Attention of a few queries a sequence over its cache, which new keys and values join first.

    Args:
        q: (batch, seqlen_q, heads, dim), or (total_q, heads, dim) with ``cu_seqlens_q``. Under
            ``torch.autocast`` q, k, v and the rotary tables are cast to the caches' dtype, unless
            they are fp64. Over caches of 8 bits also e4m3, which autocast leaves: k, v, rotary
            tables and out are bf16 then. See below what it costs.
        k_cache: (batch_cache, capacity, heads_k, dim), or with ``block_table`` (num_blocks,
            page_size, heads_k, dim); any strides, last dimension contiguous. Written in place. Of
            q's dtype, or float8_e4m3fn or int8, both caches alike: see ``k_descale``.
        v_cache: as k_cache, with its own head dim dim_v. Both may be views of one tensor. Where k
            joins, sequences have memory of their own in both; and under ``torch.compile`` views
            that begin inside of a tensor are to be made outside of the compiled function, or of a
            tensor whose shape is static: its inductor would lose where they begin, so others are
            refused. Before torch 2.13 it cannot append to views of one tensor whose shape is
            dynamic at all, and loses the place of views of views.
        k: (batch, seqlen_new, heads_k, dim), or (total_new, heads_k, dim) with
            ``cu_seqlens_k_new``: joins the cache behind its first ``cache_seqlens`` rows, for its
            own sequence: whether another one of the call sees them is not defined.
        v: as k, with head dim dim_v.
        rotary_cos: (positions, rotary_dim / 2) in q's dtype: rotary embedding of q and k, row i of
            k at position ``cache_seqlens + i``; row i of q too if there is a causal mask or a
            window, else all of q at position ``cache_seqlens``. Positions behind the last one
            take that, unless ``check_indices`` refuses them. Needs k and v.
        rotary_sin: as rotary_cos.
        cache_seqlens: int, or int32 (batch,): rows of the cache in use before k joins; None: all,
            where none joins.
        cache_batch_idx: int32 (batch,), which row of the caches is whose; None: in order. Not
            with ``block_table``; no two alike where k joins.
        cache_leftpad: int32 (batch,), rows at the start of each cache that do not count.
        block_table: int32 (batch, max_blocks), the page ids of each sequence. Pages of any size.
        softmax_scale, causal, window_size, softcap, alibi_slopes, sink: as in
            :func:`flash_attn_func`, with seqlen_k the keys of each sequence after the append.
        rotary_interleaved: pairs are dims (2i, 2i + 1), else (i, i + rotary_dim / 2).
        num_splits: parts that each sequence's keys are cut into; 0: what keeps the GPU busiest.
        return_softmax_lse: also return the log-sum-exp.
        page_table: another name of ``block_table``.
        cu_seqlens_q: int32 (batch + 1): sequence b is rows ``[cu_seqlens_q[b], cu_seqlens_q[b +
            1])`` of q.
        max_seqlen_q: the longest sequence of q; needed with ``cu_seqlens_q``.
        cu_seqlens_k_new: int32 (batch + 1), likewise for k and v.
        rotary_seqlens: int32 (batch,), positions that rotary embedding starts from, in place of
            ``cache_seqlens``.
        split_size: cut each sequence's keys into parts of about so many: then its result has the
            same bits whatever other sequences are in the batch, as long as the longest query is as
            long. Results of parts take memory for as many as the caches have room for. 0: off, as
            it must be with ``num_splits``. On CUDA a head dim that is no multiple of 8 copies the
            keys in use, and leaves those of a sequence whole, whatever both say.
        check_indices: look for indices outside of their tensors, and for rows that two sequences
            would append to, in 8 bits for descales in use that are not positive and finite, too,
            and raise ValueError with the first one. Waits for the GPU; not inside of a full graph.
            Without it indices are clamped on the device: what lies outside is neither read nor
            written. ``FLASH_CUTE_CHECK=1`` asks for it everywhere (:mod:`flash_cute.check`).
        s_aux, learnable_sink, others: as in :func:`flash_attn_func`.
        sparse: which keys each query sees (:class:`flash_cute.Sparse`), made for as many keys as a
            sequence has room for; lengths, causal masks and windows hide more. Each query reads
            runs of as many keys as are visible together: 128 or 64 of ``Sparse.blocks``, the
            granularity of ``Sparse.topk``, single keys of other formats, which is slow. Both caches
            must have one layout. Not with ``alibi_slopes`` or ``rotary_cos``.
        q_descale: what q is multiplied by, over 8-bit caches alone: a number, or fp32 of one
            element, (heads_k,) or (batch, heads_k), each for the query heads of its kv head, or of
            each row and head: q's shape with 1 for the head dim. None: 1.
        k_descale: what the numbers of an 8-bit k_cache are multiplied by: a number, or fp32 of one
            element, (heads_k,), (batch, heads_k), or one for each token and head, k_cache's shape
            without its last dimension. None: 1 for fp8; int8 needs one. Not for other caches.
        v_descale: likewise for v_cache; its kind may be another.

    **8-bit caches.** k and v, rotated as the call asks, join as x / descale, in fp32, rounded to
    the nearest even number, at most 448 in fp8 and 127 in int8; NaN stays NaN in fp8, and is 0 in
    int8. With a descale for each token and head, k_descale and v_descale are written in place, too:
    the largest magnitude of the new row / 448, or 127, and 1 if that is 0, so that a row with inf
    or NaN comes out as NaN. Numbers are multiplied by their descales in fp32, but for those that
    are no tensors: k_descale multiplies softmax_scale, and v_descale out once more.

    On CUDA kernels read 8 bits for up to 64 rows of queries a kv head (queries of a sequence times
    heads / heads_k), in head dims that are multiples of 16. Other calls on CUDA, and those with
    ``sparse``, copy both caches to q's dtype, whole (without ``cache_batch_idx`` the rows of their
    sequences), or if they are fewer as many pages as ``block_table``, or rows as
    ``cache_batch_idx``, has entries; CUDA calls say so once, and why.
    The copy holds every 8-bit number. What is rounded to q's dtype then: descales of tokens times
    their rows, a k_descale of fewer elements times q, and out once more for such a v_descale.

    **e4m3 q.** Above 64 rows of queries a kv head, as prompts and their chunks have, q in e4m3
    over e4m3 caches takes the attention of e4m3 inputs on every device that has it: nothing is
    copied, and products are those of 8 bits. That costs accuracy: weights are rounded to e4m3, too,
    each by 2^-4 of it at most, so that out is off by 2.5 % in the mean square, or by far less where
    it is a mean of many values that do not cancel. q of 16 bits is never rounded so.
    Other calls with e4m3 q widen it to bf16, which holds every number of it: those of fewer rows,
    over int8, with ``softcap``, ``alibi_slopes``, ``cache_leftpad``, ``rotary_cos``, ``sparse``,
    ``split_size``, ``num_splits`` above 1, or a v_descale of tokens, and those whose sequences have
    room for many more keys than the caches hold. So do, on CUDA, pages of rows that are no multiple
    of 8, head dims that are none of 16, or of up to 128 for k and more for v. Where q is widened, a
    q_descale of rows, or of heads beside a k_descale of tokens, multiplies q, which is rounded to
    bf16 once more. On the CPU descales that are not positive and finite are refused where weights
    are rounded.

    Nothing is read back by the host, so that CUDA graphs may replay the call with other contents of
    the index tensors. There is no backward.

    Returns:
        out (batch, seqlen_q, heads, dim_v) or (total_q, heads, dim_v), and as asked softmax_lse,
        fp32 (fp64 for fp64 inputs) (batch, heads, seqlen_q) or (heads, total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: see :mod:`flash_cute.call.validate.kvcache`.
        RuntimeError: an argument requires gradients, in grad mode.

    Example::

        import torch
        from flash_cute import flash_attn_with_kvcache

        k_cache, v_cache = torch.zeros(2, 2, 1024, 8, 64).unbind()
        lengths = torch.tensor([500, 300], dtype=torch.int32)  # tokens that are there
        q, k, v = torch.randn(3, 2, 1, 8, 64).unbind()  # one more of each sequence
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        lengths += 1

    In 8 bits, with a descale for each token and head::

        k_cache, v_cache = torch.zeros(2, 2, 1024, 8, 64).to(torch.float8_e4m3fn).unbind()
        k_descale, v_descale = torch.ones(2, 2, 1024, 8).unbind()
        out = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, k_descale=k_descale,
            v_descale=v_descale,
        )

    A chunk of 100 queries of a prompt, in e4m3 as its cache::

        k_cache, v_cache = torch.randn(2, 2, 1024, 8, 64).to(torch.float8_e4m3fn).unbind()
        q = torch.randn(2, 100, 8, 64)
        q_descale = q.abs().amax() / 448
        out = flash_attn_with_kvcache(
            (q / q_descale).to(torch.float8_e4m3fn), k_cache, v_cache, cache_seqlens=lengths,
            causal=True, q_descale=q_descale,
        )
    """
    refused: list[Exception] = []
    is_default = (
        cu_seqlens_q is max_seqlen_q is cu_seqlens_k_new is page_table is None
        and sink is s_aux is learnable_sink is sparse is q_descale is k_descale is v_descale is None
        and check_indices is False
        and type(return_softmax_lse) is type(rotary_interleaved) is bool
        and not others
        and is_plain(softmax_scale, causal, window_size, softcap, alibi_slopes, 0)
        and are_counts(num_splits, split_size)
    )
    if is_default:
        # As in flash_attn_func: a call that the op refuses goes on to the validation below.
        try:
            results = _call_op_unchecked(
                (q, k_cache, v_cache),
                (k, v, rotary_cos, rotary_sin, rotary_seqlens),
                (cache_seqlens, cache_batch_idx, cache_leftpad, block_table),
                softmax_scale, causal, rotary_interleaved, (num_splits, split_size),
            )  # fmt: skip
            if results is not None:
                return results if return_softmax_lse else results[0]
        except (RuntimeError, TypeError, ValueError) as error:
            if not is_refusal(error):
                raise
            refused.append(error.with_traceback(None))
    spellings.check_extra_kwargs(flash_attn_with_kvcache, others)
    sink = spellings.sink(sink, s_aux, learnable_sink)
    left, right = spellings.sides(window_size)
    max_seqlen_q = spellings.integer(max_seqlen_q)
    if page_table is not None:
        if block_table is not None:
            raise ValueError("block_table and page_table are given; they are names of one argument")
        block_table = page_table
    if cu_seqlens_q is not None and max_seqlen_q is None:
        raise ValueError("max_seqlen_q is None; cu_seqlens_q needs the longest sequence's length")
    for name, flag in (
        ("rotary_interleaved", rotary_interleaved),
        ("return_softmax_lse", return_softmax_lse),
        ("check_indices", check_indices),
    ):
        validate.flag(name, flag)
    descales = (q_descale, k_descale, v_descale)
    is_quantized = quantized.is_quantized(k_cache, v_cache, *descales)
    given = (q, k, v, rotary_cos, rotary_sin)
    if is_quantized and isinstance(q, Tensor) and q.dtype == validate_kvcache.E4M3:
        wide = q.new_empty(0, dtype=validate_kvcache.wide_dtype(q))
        cast = (q, *autocast.cast_as(wide, *given[1:]))
    else:
        cast = autocast.cast(*given) if is_quantized else autocast.cast_as(k_cache, *given)
    q, k, v, rotary_cos, rotary_sin = cast
    q, k, v = spellings.copy_if_last_dim_strided(q, k, v)
    longest_q = 0 if cu_seqlens_q is None or max_seqlen_q is None else max_seqlen_q
    used: Any = cache_seqlens
    call = FwdKvcacheCall(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, used, cache_batch_idx,
        cache_leftpad, block_table, cu_seqlens_q, longest_q, cu_seqlens_k_new, rotary_seqlens,
        softmax_scale, causal, left, right, softcap, alibi_slopes, sink, rotary_interleaved,
        num_splits, split_size,
    )  # fmt: skip
    call = spellings.with_reals(call)
    call = _validated(call, max_seqlen_q, is_quantized, descales)
    if check.wanted(q):
        if cu_seqlens_q is None and block_table is None:
            check.dense(q, k_cache)
        check.padding("cu_seqlens_q", cu_seqlens_q, q)
        check.padding("cu_seqlens_k_new", cu_seqlens_k_new, k)
    if not check_indices:
        check.over_a_cache(q, cu_seqlens_q, max_seqlen_q, k, cu_seqlens_k_new)
    if check_indices or check.wanted(q):
        check.cache(call)
        if is_quantized:
            quantized_kvcache.check_values(call, *descales)
    if refused:
        _check_vectors(call)
        raise refused.pop()
    if not (sparse is None or isinstance(sparse, Sparse)):
        raise TypeError(
            f"sparse is {validate.kind_of(sparse)}; expected a flash_cute.Sparse, "
            "which Sparse.blocks makes of a BlockMask's tensors"
        )
    if is_quantized:
        out, softmax_lse = quantized_kvcache.attend(call, *descales, sparse)
    elif sparse is not None:
        out, softmax_lse = sparse_kvcache.attend(call, sparse)
    else:
        out, softmax_lse = _attend(call)
    return (out, softmax_lse) if return_softmax_lse else out


def _call_op_unchecked(
    caches: tuple[Tensor, Tensor, Tensor],
    joining: tuple[Any, ...],
    places: tuple[Any, ...],
    softmax_scale: float | None,
    causal: bool,
    rotary_interleaved: bool,
    splits: tuple[int, int],
) -> tuple[Tensor, Tensor] | None:
    """The op without anything around it, of q and caches, what joins these, and where it lies; None
    where validation has to look at the call."""
    if not is_direct(*caches, *places, *joining) or needs_grad(*caches):
        return None
    q, k_cache, v_cache = caches
    if q.dtype != k_cache.dtype:  # of 8 bits, or refused
        return None
    score = (softmax_scale, causal, -1, -1, 0.0, None, None)
    k, v, rotary_cos, rotary_sin, rotary_seqlens = joining
    if k is v is rotary_cos is rotary_sin is rotary_seqlens is None:
        with internals.below_autograd():
            return ops.attend_kvcache(*caches, *places, None, 0, *score, *splits)
    if k is None or v is None or not are_rows(k, k, v):
        return None
    k_begins, v_begins = k_cache.data_ptr(), v_cache.data_ptr()
    apart = k_begins + k_cache.nbytes <= v_begins or v_begins + v_cache.nbytes <= k_begins
    if not (apart and k_cache.is_contiguous() and v_cache.is_contiguous()):
        return None
    if k_cache.is_neg() or v_cache.is_neg():
        return None
    rows, sequences = (k, v, rotary_cos, rotary_sin), (None, 0, None, rotary_seqlens)
    return ops.fwd_kvcache(*caches, *rows, *places, *sequences, *score, rotary_interleaved, *splits)


def _validated(
    call: FwdKvcacheCall,
    max_seqlen_q: int | None,
    is_quantized: bool,
    descales: tuple[Descale, Descale, Descale],
) -> FwdKvcacheCall:
    """The call after all checks but those of values; one length for all becomes a tensor."""
    q, used = call.q, call.cache_seqlens
    dtypes = quantized.Q_DTYPES if is_quantized else validate.DTYPES
    batch = validate_kvcache.check(call, validate_options.OF_FUNCTIONS, is_quantized, dtypes)
    if is_quantized:
        quantized.check_descales(call, batch, *descales)
    if call.cu_seqlens_q is None and max_seqlen_q is not None:
        validate.length("max_seqlen_q", max_seqlen_q)
        if max_seqlen_q not in (0, q.shape[1]):
            raise ValueError(
                f"max_seqlen_q is {max_seqlen_q}, but q has {q.shape[1]} rows a sequence; it goes "
                "with cu_seqlens_q"
            )
    if not (used is None or isinstance(used, Tensor)):
        used = torch.full((batch,), used, dtype=torch.int32, device=q.device)
    if q.is_cuda:
        validate_kvcache.cuda(q, call.v_cache, call.sink)
    return call._replace(cache_seqlens=used)


def _attend(call: FwdKvcacheCall) -> tuple[Tensor, Tensor]:
    """out and softmax_lse of a valid call that the op takes as it is."""
    if plan_log.is_on():
        plan_log.cache(call)
    try:
        return run_kvcache(call)
    except NotImplementedError:
        raise
    except RuntimeError as error:
        if is_refusal(error):
            _check_vectors(call)
        raise


def _check_vectors(call: FwdKvcacheCall) -> None:
    """Words for the one reason of an op's refusal that has a remedy; to look for it takes long."""
    if call.q.is_cuda:
        rotated = call.rotary_cos is not None
        validate_kvcache.vectors(None if rotated else call.q, call.k_cache, call.v_cache)
