"""transformers' attention interface."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from flash_cute.call import validate
from flash_cute.core.padding import offsets, packing
from flash_cute.functional import dense_varlen as functional
from flash_cute.functional import kvcache
from flash_cute.integrations.transformers import blocks, chosen_blocks
from flash_cute.integrations.transformers.documents import Documents, of_numbers, of_positions
from flash_cute.kernels import support

Options = dict[str, Any]
_NOT_GIVEN: Any = "not given"  # by the layer, which then does not know its window

# Arguments that would change the result but are not supported, and other libraries' names of
# supported ones.
_REFUSED = (
    "position_bias", "sinks", "attention_similarity", "indices", "score_mod",
    "head_mask", "layer_head_mask", "alibi", "attn_bias", "attention_bias", "topk_indices",
)  # fmt: skip
_NAMES = {
    "softmax_scale": "scaling", "scale": "scaling", "causal": "is_causal", "dropout_p": "dropout",
    "window_size": "sliding_window", "sink": "s_aux", "learnable_sink": "s_aux",
    "cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k",
    "max_seqlen_q": "max_length_q", "max_seqlen_k": "max_length_k", "page_table": "block_table",
}  # fmt: skip


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = _NOT_GIVEN,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    block_table: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        module: the layer; its ``is_causal`` is used if the argument is None.
        query: (batch, heads, seqlen_q, dim); ``key`` and ``value`` (batch, heads_k, seqlen_k, ..).
        attention_mask: what :func:`flash_cute.integrations.transformers.mask` returned.
        sliding_window: w > 0: a query sees the last w keys, including its own; if the layer is not
            causal also the next w - 1.
        s_aux: (heads,), logits of attention sinks.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: sequences laid end to end.
        block_table, k_cache, v_cache: pages of continuous batching; key and value are appended.
        position_ids: (batch or 1, seqlen_q); a token whose position is not above the previous one
            begins a new document, in any row of the batch, with padding or without. Ignored if
            ``cu_seq_lens_q``, pages or a mask of document numbers are given.
        seq_idx: the number of each token's document, used as ``position_ids`` is.
        block_indices: int (batch, heads_k, seqlen_q, k), the blocks of keys that each query sees,
            -1 for none, as the indexer of MiniMax-M3 chooses them. ``module.indexer.block_size`` or
            ``module.config.index_block_size`` is the number of keys in a block. Every call waits
            for the GPU once.
        others: ignored if they do not concern attention; others raise an error that names them.

    Returns:
        (batch, seqlen_q, heads, dim_v), and None for the weights. Padded rows are 0, or attend to
        the sequence's keys.

    Raises:
        NotImplementedError, TypeError, ValueError: biases, masks of 4 dimensions, weights as a
            result; other names of arguments, or incomplete groups of them; documents that begin
            behind a cache; blocks of keys with documents or pages; and flash_cute's own errors.

    Example::

        import torch
        from flash_cute.integrations.transformers import attention

        q = torch.randn(1, 8, 100, 64)
        k, v = torch.randn(2, 1, 4, 100, 64).unbind()  # 4 heads of keys, each for 2 of queries
        layer = torch.nn.Identity()  # the layer that calls; a model gives itself
        out, _ = attention(layer, q, k, v, None, is_causal=True, sliding_window=None)
        assert out.shape == (1, 100, 8, 64)
    """
    _refuse(attention_mask, others)
    q, k, v = _in_one_dtype(module, *(x.transpose(1, 2) for x in (query, key, value)))
    has_blocks = attention_mask is not None and blocks.is_mask(attention_mask)
    if is_causal is None:  # PaliGemma's layers say False, and their masks are causal
        is_causal = has_blocks or getattr(module, "is_causal", True)
    causal = bool(is_causal)
    window = _window(module, attention_mask, sliding_window, causal, k.shape[1])
    if getattr(attention_mask, "is_full", False):
        attention_mask = None
    if deterministic is None:
        deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    score: Options = {
        "softmax_scale": scaling,
        "causal": causal,
        "window_size": window,
        "softcap": 0.0 if softcap is None else softcap,
        "sink": s_aux,
    }
    training: Options = {"dropout_p": dropout, "deterministic": deterministic}
    if block_indices is not None:
        chosen_blocks.refuse_with(
            block_table=block_table, k_cache=k_cache, v_cache=v_cache, cu_seq_lens_q=cu_seq_lens_q,
            cu_seq_lens_k=cu_seq_lens_k,
        )  # fmt: skip
    if any(x is not None for x in (block_table, k_cache, v_cache)):
        pages = (k_cache, v_cache, block_table, cu_seq_lens_k)
        return _paged(q, k, v, pages, attention_mask, score, training), None
    layer, numbers, images = getattr(module, "layer_idx", None), None, None
    if attention_mask is not None and has_blocks:
        images = blocks.found(attention_mask, q.shape[1], layer)
        attention_mask = images.padding
    elif attention_mask is not None and attention_mask.dtype == torch.int32:
        numbers, attention_mask = attention_mask, None
    sequences = _sequences(
        (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k), attention_mask
    )
    if sequences is not None:
        _refuse_packed(images)
        return _packed(q, k, v, sequences, score | training), None
    if numbers is not None:
        documents = of_numbers(numbers, layer)
    else:
        seqlen_k = k.shape[1] if attention_mask is None else attention_mask.shape[1]
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask != 0
        documents = of_positions(
            position_ids, seq_idx, mask, len(q), q.shape[1], seqlen_k, causal, layer
        )
    if block_indices is not None:
        chosen_blocks.refuse_with(documents=documents, images=images)
        seqlen_k = k.shape[1] if attention_mask is None else attention_mask.shape[1]
        sparse = chosen_blocks.sparse_of(module, block_indices, attention_mask, seqlen_k)
        k, v = k[:, :seqlen_k], v[:, :seqlen_k]  # a static cache has room for more
        return functional.flash_attn_func(q, k, v, sparse=sparse, **score, **training), None
    if documents is not None:
        _refuse_packed(images)
        return _of_documents(q, k, v, documents, score | training), None
    if images is not None:
        return _with_images(q, k, v, images, score, training), None
    if attention_mask is None:
        return _dense(q, k, v, score, training), None
    return _padded(q, k, v, attention_mask, score, training), None


def _refuse(attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    for name in _REFUSED:
        if others.get(name) is not None:
            raise NotImplementedError(
                f"{name} is given, which flash_cute does not compute; use "
                "attn_implementation='sdpa' or 'eager'"
            )
    for name, here in _NAMES.items():
        if others.get(name) is not None:
            raise TypeError(f"{name} is given, which layers of transformers call {here}; use that")
    if others.get("output_attentions"):
        raise ValueError(
            "output_attentions is True, and flash_cute keeps no attention weights; use "
            "attn_implementation='eager'"
        )
    if attention_mask is None or blocks.is_mask(attention_mask):
        return
    if attention_mask.dim() != 2:
        raise NotImplementedError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; flash_cute takes (batch, "
            "seqlen), 1 for tokens that take part; use attn_implementation='sdpa' for others"
        )


def _refuse_packed(images: blocks.Blocks | None) -> None:
    if images is not None:
        raise NotImplementedError(
            "tokens that see each other in both directions, as images do, in packed documents; "
            "give each document a row of the batch, or use attn_implementation='sdpa'"
        )


def _window(
    module: torch.nn.Module,
    attention_mask: Tensor | None,
    sliding_window: int | None,
    causal: bool,
    seqlen_k: int,
) -> tuple[int, int]:
    """(left, right): the mask's if it has one, else the layer's."""
    band = getattr(attention_mask, "band", None)
    if band is not None:
        return band
    if sliding_window is _NOT_GIVEN:
        width = getattr(getattr(module, "config", None), "sliding_window", None)
        if torch.compiler.is_compiling() and width is not None and seqlen_k > width:
            raise NotImplementedError(
                f"{type(module).__name__} does not pass its sliding window to attention, and a "
                "graph cannot look it up; use attn_implementation='sdpa' with torch.compile"
            )
        sliding_window = None
    if sliding_window is not None and not sliding_window >= 1:
        raise ValueError(
            f"sliding_window is {sliding_window}; expected None, or how many keys a query sees, at "
            "least 1 (itself)"
        )
    side = -1 if sliding_window is None else sliding_window - 1
    return side, 0 if causal else side


def _in_one_dtype(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """fp32 queries of a layer with half precision weights (norms in fp32) are cast to those."""
    target = q.dtype
    if q.dtype == torch.float32 and not torch.is_autocast_enabled(q.device.type):
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_is_quantized"):
            target = config.dtype
        else:
            weights = (x.dtype for x in module.parameters() if x.dtype in validate.DTYPES)
            target = next(weights, q.dtype)
    return q.to(target), k.to(target), v.to(target)


def _dense(q: Tensor, k: Tensor, v: Tensor, score: Options, training: Options) -> Tensor:
    if q.shape[1] < k.shape[1] and _is_inference(q, k, v, score, training):
        return kvcache.flash_attn_with_kvcache(q, k, v, **score)
    return functional.flash_attn_func(q, k, v, **score, **training)


def _sequences(given: tuple, padding: Tensor | None) -> tuple | None:
    """cu_seqlens and max_seqlens of q and k, if a call gives them; a missing max_seqlen is
    computed, which waits for the GPU."""
    cu_q, cu_k, longest_q, longest_k = given
    if all(x is None for x in given):
        return None
    if cu_q is None or cu_k is None:
        raise ValueError(
            "only some of cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k are given; "
            "expected both offsets, or none of the four"
        )
    if padding is not None:
        raise ValueError(
            "cu_seq_lens_q and an attention_mask with padding are given; offsets are of tokens "
            "without padding: leave attention_mask out"
        )
    if longest_q is None or longest_k is None:
        if torch.compiler.is_compiling():
            raise ValueError("max_length_q or max_length_k is None; graphs need both")
        found = (int(x.diff().max()) if len(x) > 1 else 0 for x in (cu_q, cu_k))
        longest_q, longest_k = (
            y if x is None else x for x, y in zip((longest_q, longest_k), found, strict=True)
        )
    return cu_q, cu_k, longest_q, longest_k


def _packed(q: Tensor, k: Tensor, v: Tensor, sequences: tuple, options: Options) -> Tensor:
    """Sequences laid end to end."""
    cu_q, cu_k, longest_q, longest_k = sequences
    q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
    out = functional.flash_attn_varlen_func(
        q_rows, k_rows, v_rows, cu_q.int(), cu_k.int(), longest_q, longest_k, **options
    )
    return out.view(*q.shape[:-1], v.shape[-1])


def _of_documents(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, options: Options
) -> Tensor:
    """Attention within each document; keys beyond the number of queries are unused cache."""
    seqlen = q.shape[1]
    q_rows, k_rows, v_rows = (documents.rows(x[:, :seqlen]) for x in (q, k, v))
    longest = documents.longest
    out = functional.flash_attn_varlen_func(
        q_rows, k_rows, v_rows, documents.offsets, documents.offsets, longest, longest, **options
    )
    return documents.unpacked(out, len(q), seqlen)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, score: Options, training: Options
) -> Any:
    """Attention without the keys that ``mask`` (batch, seqlen) hides.

    A causal layer's queries are its last tokens, without padding; queries of other layers all take
    part, except under a window, which counts tokens. With ``return_lse`` also the log-sum-exps
    (batch, seqlen_q, heads) of a causal layer.
    """
    batch, seqlen_k = mask.shape
    if seqlen_k > k.shape[1]:
        raise ValueError(f"attention_mask has {seqlen_k} entries a sequence, and keys {k.shape[1]}")
    k, v = k[:, :seqlen_k], v[:, :seqlen_k]  # a static cache has room for more
    seqlen_q = q.shape[1]
    has_window = score["window_size"][0] >= 0
    starts = getattr(mask, "starts", None)
    if starts is not None and _is_inference(q, k, v, score, training):
        return kvcache.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=seqlen_k, cache_leftpad=starts, **score
        )
    if has_window and not score["causal"] and seqlen_q != seqlen_k:
        raise NotImplementedError("a window with padding is not supported for other tokens' keys")
    keys = packing(mask, k)
    k_rows, v_rows = (_pack(keys, x) for x in (k, v))
    if score["causal"] or has_window:
        queries = keys if seqlen_q == seqlen_k else packing(mask[:, -seqlen_q:], q)
        q_rows, used, cu_q = _pack(queries, q), queries.lengths, queries.offsets
    else:
        q_rows, used, cu_q = q.flatten(0, 1), None, offsets(batch, seqlen_q, q.device)
    result = functional.flash_attn_varlen_func(
        q_rows, k_rows, v_rows, cu_q, keys.offsets, seqlen_q, seqlen_k,
        seqused_q=used, seqused_k=keys.lengths, **score, **training,
    )  # fmt: skip
    if used is None:
        return result.reshape(batch, seqlen_q, *result.shape[-2:])
    if training.get("return_lse"):
        out, lse = result
        return queries.unpack(out), queries.unpack(lse.t())
    return queries.unpack(result)


def _with_images(
    q: Tensor, k: Tensor, v: Tensor, images: blocks.Blocks, score: Options, training: Options
) -> Tensor:
    """Causal attention, merged with attention of tokens to later ones in the same block."""
    if not score["causal"]:
        raise NotImplementedError("a mask of images is not supported in a layer that is not causal")
    k, v = (x[:, : images.seqlen_k] for x in (k, v))  # a static cache has room for more
    options = training | {"return_lse": True}
    if images.padding is None:
        out, lse = functional.flash_attn_func(q, k, v, **score, **options)
        lse = lse.transpose(1, 2)
    else:
        out, lse = _padded(q, k, v, images.padding, score, options)
    k, v = (x[:, -q.shape[1] :] for x in (k, v))  # of the queries' own tokens
    return blocks.joined(out, lse, q, k, v, images, score | training)


def _pack(packed: Any, x: Tensor) -> Tensor:
    return packed.pack(x.flatten(2)).unflatten(-1, x.shape[2:])


def _paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: tuple,
    attention_mask: Tensor | None,
    score: Options,
    training: Options,
) -> Tensor:
    """One new token a sequence; transformers lays them end to end."""
    k_cache, v_cache, block_table, cu_seq_lens_k = pages
    if any(x is None for x in pages):
        raise ValueError(
            "only some of block_table, k_cache, v_cache and cu_seq_lens_k are given; give all"
        )
    if attention_mask is not None or training["dropout_p"]:
        raise NotImplementedError(
            "block_table is given with attention_mask or dropout; paged calls support neither"
        )
    q_new, k_new, v_new = (x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v))
    lengths = cu_seq_lens_k.diff()[: len(q_new)] - 1  # before the new one
    out = kvcache.flash_attn_with_kvcache(
        q_new, k_cache, v_cache, k_new, v_new, cache_seqlens=lengths.int(),
        block_table=block_table, **score,
    )  # fmt: skip
    return out.view(*q.shape[:-1], v.shape[-1])


def _is_inference(q: Tensor, k: Tensor, v: Tensor, score: Options, training: Options) -> bool:
    """Whether flash_attn_with_kvcache, which needs no copies, can compute it."""
    tensors = [x for x in (q, k, v, score["sink"]) if x is not None]
    if training["dropout_p"] or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    if not q.is_cuda:
        return True
    return support.reads_caches_in_place(q.dtype, q.shape[-1], v.shape[-1], q.get_device())
