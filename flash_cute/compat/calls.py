"""Helpers of :mod:`flash_cute.compat`: flash-attn's errors, and conversions of its arguments and
results."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_cute import check
from flash_cute.call import spellings, validate
from flash_cute.call.validate import ops as validate_ops

F = TypeVar("F", bound=Callable[..., Any])


class ArgumentValueError(ValueError, RuntimeError):
    """A ValueError of flash_cute, where flash-attn raises RuntimeError."""


class ArgumentTypeError(TypeError, RuntimeError):
    """A TypeError of flash_cute, where flash-attn raises RuntimeError."""


def raises_as_flash_attn(function: F) -> F:
    """Makes errors RuntimeErrors, too, except Python's own, such as missing arguments."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except RuntimeError:  # NotImplementedError is one
            raise
        except ValueError as error:
            raise ArgumentValueError(str(error)) from error
        except TypeError as error:
            raise ArgumentTypeError(str(error)) from error

    return call  # type: ignore[return-value]


def window(x: Any) -> Any:
    """The window with -1 for every negative bound. Validation refuses what is not a pair."""
    x = spellings.window(x)
    if not isinstance(x, tuple):
        return x
    return tuple(
        max(side, -1) if isinstance(side, int) and not isinstance(side, bool) else side
        for side in x
    )


def sides(left: Any, right: Any) -> tuple[int, int]:
    """:func:`window` of two arguments."""
    for name, side in (("window_size_left", left), ("window_size_right", right)):
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"{name} is {validate.kind_of(side)}; expected an int")
        if not validate.allowed(side <= validate.INT64_MAX):
            raise ValueError(f"{name} is {validate.shown(side)}; expected an int that fits int64")
    return max(left, -1), max(right, -1)


def kv_heads(qkv: Tensor, num_heads_q: int | None) -> int:
    """The number of heads of k in qkv (batch, seqlen, num_heads_q + 2 heads_k, dim)."""
    if num_heads_q is None:
        raise ValueError("num_heads_q is None; qkv of 4 dimensions needs it")
    validate.count("num_heads_q", num_heads_q, 1)
    rest = qkv.shape[2] - num_heads_q
    if rest < 2 or rest % 2:
        raise ValueError(
            f"num_heads_q is {num_heads_q}; qkv has {qkv.shape[2]} heads, and the others must be "
            "an even number above 0: half are k's, half v's"
        )
    return rest // 2


def softcap(x: Any) -> Any:
    """The softcap, with 0 (off) for negative ones."""
    is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return 0.0 if is_number and x < 0 else x


def detached(x: Tensor | None) -> Tensor | None:
    """The slopes, detached: flash-attn gives them no gradient, even if they require it."""
    return x.detach() if isinstance(x, Tensor) else x


def contiguous(block_table: Tensor | None) -> Tensor | None:
    """The table with contiguous rows: flash-attn accepts any strides."""
    return block_table.contiguous() if isinstance(block_table, Tensor) else block_table


def flash_attn_lse(softmax_lse: Tensor) -> Tensor:
    """lse with FlashAttention-2's +inf for rows without keys, instead of -inf."""
    return softmax_lse.masked_fill(softmax_lse == -torch.inf, torch.inf)


def flash_cute_lse(softmax_lse: Tensor) -> Tensor:
    """The inverse of :func:`flash_attn_lse`: -inf for rows without keys."""
    return softmax_lse.masked_fill(softmax_lse == torch.inf, -torch.inf)


def store(name: str, given: Tensor | None, result: Tensor) -> Tensor:
    """``result``, copied to the tensor ``given`` for it if there is one."""
    if given is None:
        return result
    validate_ops.output(name, given, result)
    return given.copy_(result)


def select_cache_rows(
    cache_batch_idx: Tensor | None, page_table: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """cache_batch_idx and block_table: FlashAttention-3's ``cache_batch_idx`` selects rows of a
    block_table."""
    if not (isinstance(page_table, Tensor) and isinstance(cache_batch_idx, Tensor)):
        return cache_batch_idx, contiguous(page_table)
    return None, page_table[cache_batch_idx.long()].contiguous()


def check_page_bounds(
    k_cache: Tensor, k: Tensor | None, cache_seqlens: Any, block_table: Tensor | None
) -> None:
    """Refuses lengths beyond the pages of ``block_table``, as flash-attn 2.8.4 does, and on the CPU
    pages that do not exist. It reads lengths, which waits for the GPU; not in graphs, nor for wrong
    shapes, which validation refuses.
    """
    if not (isinstance(block_table, Tensor) and isinstance(cache_seqlens, (int, Tensor))):
        return
    is_of_pages = check.is_readable(k_cache) and k_cache.dim() == 4 and block_table.dim() == 2
    lengths = torch.as_tensor(cache_seqlens)
    if not is_of_pages or lengths.numel() not in (1, len(block_table)) or lengths.numel() == 0:
        return
    page_size = k_cache.shape[1]
    new = k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else 0
    capacity, longest = page_size * block_table.shape[1], int(lengths.max())
    if longest + new > capacity:
        raise ValueError(
            f"cache_seqlens is up to {longest}, and {new} rows are appended: block_table has "
            f"{block_table.shape[1]} pages of {page_size} rows a sequence; give it "
            f"{-(-(longest + new) // max(page_size, 1))} columns"
        )
    if not (k_cache.is_cpu and block_table.is_cpu and lengths.is_cpu):
        return
    starts = page_size * torch.arange(block_table.shape[1])
    is_used = starts < lengths.reshape(-1, 1) + new
    wrong = is_used & ((block_table < 0) | (block_table >= len(k_cache)))
    for b, block in wrong.nonzero()[:1].tolist():
        raise ValueError(
            f"block_table[{b}, {block}] is {int(block_table[b, block])}; there are {len(k_cache)} "
            "pages"
        )


def check_no_metadata(scheduler_metadata: Tensor | None) -> None:
    """Refuses the metadata of FlashAttention-3's own scheduler."""
    if scheduler_metadata is not None and scheduler_metadata.numel():
        raise NotImplementedError(
            "scheduler_metadata is not flash_cute's; pass what its get_scheduler_metadata returns"
        )
