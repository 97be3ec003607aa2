"""What the modules of :mod:`flash_cute.compat` share: flash-attn's errors, and its values that
mean nothing special here."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_cute import accept
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
    """Every negative bound is unbounded."""
    x = accept.window(x)
    return tuple(max(side, -1) if isinstance(side, int) else side for side in x)


def softcap(x: Any) -> Any:
    """A negative one is off."""
    return 0.0 if isinstance(x, (int, float)) and x < 0 else x


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
