"""What the modules of :mod:`flash_cute.compat` share: flash-attn's errors, and its values that
mean nothing special here."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_cute import accept, validate
from flash_cute.validate import ops as validate_ops

F = TypeVar("F", bound=Callable[..., Any])


class ArgumentValueError(ValueError, RuntimeError):
    """A ValueError of flash_cute, where flash-attn raises RuntimeError."""


class ArgumentTypeError(TypeError, RuntimeError):
    """A TypeError of flash_cute, where flash-attn raises RuntimeError."""


def raises_as_flash_attn(function: F) -> F:
    """Errors are RuntimeError too. Those of Python itself, such as missing arguments, stay."""

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
    """Every negative bound is unbounded. What is no pair is refused behind this."""
    x = accept.window(x)
    if not isinstance(x, tuple):
        return x
    return tuple(
        max(side, -1) if isinstance(side, int) and not isinstance(side, bool) else side
        for side in x
    )


def sides(left: Any, right: Any) -> tuple[int, int]:
    """The same of two arguments."""
    for name, side in (("window_size_left", left), ("window_size_right", right)):
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"{name} is {validate.kind_of(side)}; expected an int")
        if not validate.allowed(side <= validate.INT64_MAX):
            raise ValueError(f"{name} is {validate.shown(side)}; expected an int that fits int64")
    return max(left, -1), max(right, -1)


def kv_heads(qkv: Tensor, num_heads_q: int | None) -> int:
    """Heads of k, and of v, in qkv (batch, seqlen, num_heads_q + 2 heads_k, dim)."""
    if num_heads_q is None:
        raise ValueError("num_heads_q is None; qkv of 4 dimensions needs it")
    validate.count("num_heads_q", num_heads_q, 1)
    rest = qkv.shape[2] - num_heads_q
    if rest < 2 or rest % 2:
        raise ValueError(
            f"num_heads_q is {num_heads_q}; qkv has {qkv.shape[2]} heads, and those left for k and "
            "v must be as many for each, and one at least"
        )
    return rest // 2


def softcap(x: Any) -> Any:
    """A negative one is off."""
    is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return 0.0 if is_number and x < 0 else x


def detached(x: Tensor | None) -> Tensor | None:
    """Slopes have no gradient in flash-attn, whether or not they require one."""
    return None if x is None else x.detach()


def outward_lse(softmax_lse: Tensor) -> Tensor:
    """+inf for rows without keys, as FlashAttention-2 has it; flash_cute has -inf."""
    return softmax_lse.masked_fill(softmax_lse == -torch.inf, torch.inf)


def inward_lse(softmax_lse: Tensor) -> Tensor:
    """The way back."""
    return softmax_lse.masked_fill(softmax_lse == torch.inf, -torch.inf)


def into(name: str, given: Tensor | None, result: Tensor) -> Tensor:
    """``result``, in the tensor ``given`` for it if there is one."""
    if given is None:
        return result
    validate_ops.output(name, given, result)
    return given.copy_(result)


def picked(
    cache_batch_idx: Tensor | None, page_table: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The cache's rows and the pages; FlashAttention-3's ``cache_batch_idx`` picks rows of a
    table."""
    if page_table is None:
        return cache_batch_idx, None
    if cache_batch_idx is not None:
        page_table = page_table[cache_batch_idx.long()]
    return None, page_table.contiguous()


def no_metadata(scheduler_metadata: Tensor | None) -> None:
    """Refuses a schedule that was made for FlashAttention-3's kernels."""
    if scheduler_metadata is not None and scheduler_metadata.numel():
        raise NotImplementedError(
            "scheduler_metadata is of other kernels; give what get_scheduler_metadata returns here"
        )
