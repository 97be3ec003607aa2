"""transformers' mask interface, in forms that need no score matrix.

Models request a mask once a forward, and pass it to every layer:

- None: only the causal mask or the window, which layers know themselves;
- bool (batch, seqlen_k): padding. An attribute ``starts`` means that it is only on the left,
  ``is_full`` that there is none;
- int32 (batch, seqlen): the number of each token's sequence, from 1 on;
- int32 (batch, 2, seqlen_k): padding, and the number of each token's block, whose tokens see each
  other in both directions (:mod:`.blocks`).

An attribute ``band`` is the window as (left, right), for layers that do not know theirs. Graphs
have no such attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cute.integrations.transformers import blocks, mask_functions


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> Tensor | None:
    """transformers' mask interface: queries ``q_offset + [0, q_length)`` and keys ``kv_offset +
    [0, kv_length)`` by ``mask_function``, which is causal if it is None, without the padding of
    ``attention_mask`` (batch, keys). ``config`` is the model's.

    Raises:
        NotImplementedError: the mask is neither a band nor padding nor sequences laid end to end;
            in a graph, a static cache without ``attention_mask``.
        ValueError: padding between tokens, under a window.

    Example::

        import torch
        from flash_cute.integrations.transformers import mask

        padding = torch.arange(100) < torch.tensor([[100], [60]])
        kept = mask(2, 100, 100, attention_mask=padding)  # causal, as by default
    """
    if attention_mask is not None and blocks.is_mask(attention_mask):
        return attention_mask  # an earlier result
    if mask_function is None:
        mask_function = mask_functions.named("causal_mask_function")
    is_traced = torch.compiler.is_compiling()
    numbers, is_before_blocks = None, False
    if not is_traced:
        is_before_blocks = mask_functions.is_window_before_blocks(mask_function)
        mask_function, numbers = mask_functions.without_blocks(mask_function)
    if use_vmap and numbers is None:
        raise _refused("a mask function of the model's own (or_mask_function, and_mask_function)")
    names = {mask_function.__name__} if is_traced else set(mask_functions.names(mask_function))
    unknown = names - (mask_functions.BANDS | {mask_functions.SEQUENCES})
    if unknown and not is_traced:
        raise _refused(", ".join(sorted(unknown)))
    if is_traced and "or_mask" in names:
        raise _refused("block_sequence_ids in a graph: call the model without torch.compile")
    is_causal = mask_functions.BIDIRECTIONAL not in names
    # PaliGemma's layers say that they are not causal: its masks are of blocks, if only of none.
    is_told = is_causal and getattr(config, "use_bidirectional_attention", None) is True
    if is_told and is_traced:
        raise _refused("a prompt of PaliGemma in a graph: call the model without torch.compile")
    if is_told and numbers is None:
        numbers = torch.full((1, int(q_offset) + q_length), blocks.NONE)
    if is_traced and attention_mask is None and isinstance(q_offset, Tensor):
        raise NotImplementedError(
            "a static cache without attention_mask: a graph does not know how much of the cache is "
            "in use; give attention_mask (batch, tokens so far)"
        )
    if is_traced:
        if "and_mask" in names and attention_mask is None:
            return _numbers(mask_function, batch_size, q_length, device)
    elif mask_functions.SEQUENCES in names:
        sequences = _numbers(mask_function, batch_size, q_length, device)
        return _with_band(sequences, mask_functions.band(mask_function), kv_length)
    if is_causal and not (is_traced and isinstance(q_offset, Tensor)):
        end = int(q_offset) + q_length
        attention_mask = _seen(attention_mask, batch_size, kv_length, kv_offset, end, device)
    elif attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
    if is_traced:
        return attention_mask
    band = mask_functions.band(mask_function)
    if attention_mask is not None:
        attention_mask = _padding(attention_mask, kv_length, band is not None)
    if numbers is not None:
        seen = kv_length if attention_mask is None else attention_mask.shape[1]
        numbers = numbers[:, end - seen : end].expand(batch_size, -1).to(device)
        has_blocks = q_length > 1 and bool((numbers[:, -q_length:] >= 0).any())
        if has_blocks and is_before_blocks and band is not None and kv_length > band[0] + 1:
            raise _refused("a prompt that sees itself beyond the sliding window of a layer")
        if has_blocks or (is_told and q_length > 1):
            return _with_band(blocks.mask(attention_mask, numbers), band, kv_length)
    if attention_mask is None and band is not None and kv_length > band[0]:
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        attention_mask.is_full = True  # type: ignore[attr-defined]
    return None if attention_mask is None else _with_band(attention_mask, band, kv_length)


def _with_band(mask: Tensor, band: tuple[int, int] | None, kv_length: int) -> Tensor:
    if band is not None and kv_length > band[0]:
        mask.band = band  # type: ignore[attr-defined]
    return mask


def _seen(
    padding: Tensor | None,
    batch: int,
    kv_length: int,
    kv_offset: int,
    end: int,
    device: torch.device | str,
) -> Tensor | None:
    """The padding of the keys before ``end``, the last query: a static cache has more keys."""
    seen = min(kv_length, end - kv_offset)
    if padding is not None:  # its last entry is the last token's; it may be an earlier result
        return padding[:, :end][:, -seen:]
    if seen == kv_length:
        return None
    return torch.ones(batch, seen, dtype=torch.bool, device=device)


def _padding(padding: Tensor, kv_length: int, has_window: bool) -> Tensor | None:
    """The padding; None without any. Waits for the GPU once a forward, as transformers does."""
    steps = padding.diff(dim=1)
    rises, falls = steps & padding[:, 1:], steps & padding[:, :-1]
    is_full, is_left, has_gaps = torch.stack(
        [
            padding.all(),
            ~falls.any() & padding[:, -1].all(),
            (rises.sum(1) + padding[:, 0] > 1).any(),
        ]
    ).tolist()
    if is_full and padding.shape[1] == kv_length:
        return None
    if has_gaps and has_window:
        raise ValueError(
            "attention_mask has padding between tokens, which the sliding window of a layer would "
            "count; pad on one side, or use attn_implementation='eager'"
        )
    padding = padding.contiguous()
    if is_left:
        padding.starts = (~padding).sum(1, dtype=torch.int32)  # type: ignore[attr-defined]
    return padding


def _numbers(mask_function: Callable[..., Any], batch: int, seqlen: int, device: Any) -> Tensor:
    """The sequence of each token: a query that does not see the previous key begins a new one."""
    tokens = torch.arange(seqlen, device=device)
    batches = torch.arange(batch, device=device)[:, None]
    joined = mask_function(batches, torch.zeros_like(batches), tokens, (tokens - 1).clamp(min=0))
    begins = ~joined.expand(batch, seqlen)
    begins = torch.cat([torch.ones_like(begins[:, :1]), begins[:, 1:]], 1)
    return begins.cumsum(1, dtype=torch.int32)


def _refused(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"flash_cute does not compute this mask: {what}. It takes causal masks, sliding windows, "
        "padding, sequences laid end to end, images of Gemma 3 and 4, prompts of PaliGemma; use "
        "attn_implementation='sdpa' or 'flex_attention'"
    )
