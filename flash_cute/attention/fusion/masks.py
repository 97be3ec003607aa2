"""The three mask arguments of torch's encoder layers, read once a call."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals


@dataclass(frozen=True)
class Visible:
    """The keys that queries see.

    Args:
        causal: query i sees keys up to i.
        bias: (batch or 1, heads or 1, seqlen, seqlen), added to scores, -inf hides; None adds none.
        order: int64 (batch, seqlen): the keys of each sequence, those that take part first; None if
            all do. With an order ``bias`` is None and ``causal`` False.
        lengths: int32 (batch,): how many keys of each sequence take part.
        mask, padding: as they were given.
    """

    causal: bool = False
    bias: Tensor | None = None
    order: Tensor | None = None
    lengths: Tensor | None = None
    mask: Tensor | None = None
    padding: Tensor | None = None


def read(
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> Visible:
    """The three arguments of torch's encoder layers, as one value.

    Args:
        mask: (seqlen, seqlen) or (batch * heads, seqlen, seqlen); bool, True hides, or added.
        padding: (batch, seqlen); bool, True hides, or added.
        is_causal: ``mask`` is the causal one, which is not read then.
        shape: (batch, seqlen, heads).
        dtype: of the scores' bias.

    Raises:
        TypeError, ValueError: a mask has a dtype or shape that is not listed above.
    """
    known = None if torch.compiler.is_compiling() else _read.get()
    if known is None:
        return _visible_by(mask, padding, is_causal, shape, dtype)
    key = (id(mask), id(padding), is_causal, shape, dtype)
    if key not in known:
        known[key] = _visible_by(mask, padding, is_causal, shape, dtype)
    return known[key]


@contextmanager
def read_once() -> Iterator[None]:
    """Inside, each mask is read once; none of them may be freed or changed."""
    token = _read.set({})
    try:
        yield
    finally:
        _read.reset(token)


_read: ContextVar[dict[Any, Visible] | None] = ContextVar("masks that were read", default=None)


def _visible_by(
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> Visible:
    batch, seqlen, heads = shape
    _check("src_mask", mask, ((seqlen, seqlen), (batch * heads, seqlen, seqlen)))
    _check("src_key_padding_mask", padding, ((batch, seqlen),))
    causal = is_causal or (mask is not None and is_causal_mask(mask))
    if padding is None and (causal or mask is None):
        return Visible(causal=causal, mask=mask)
    if padding is not None and padding.dtype == torch.bool and not causal and mask is None:
        order = padding.to(torch.uint8).argsort(dim=1, stable=True)
        lengths = padding.logical_not().sum(1, dtype=torch.int32)
        return Visible(order=order, lengths=lengths, padding=padding)
    given = mask
    if causal:
        like = mask if mask is not None else padding
        assert like is not None
        mask = later_keys(like, seqlen)
        given = mask if given is None else given
    bias = None
    if mask is not None:
        bias = _additive(mask, dtype)
        bias = bias.view(batch, heads, seqlen, seqlen) if mask.dim() == 3 else bias[None, None]
    if padding is not None:
        of_keys = _additive(padding, dtype)[:, None, None, :]
        bias = of_keys.expand(batch, 1, seqlen, seqlen) if bias is None else bias + of_keys
    return Visible(bias=bias, mask=given, padding=padding)


def later_keys(like: Tensor, seqlen: int) -> Tensor:
    """The causal mask, bool (seqlen, seqlen): True hides."""
    return torch.ones(seqlen, seqlen, dtype=torch.bool, device=like.device).triu(1)


def is_causal_mask(mask: Tensor) -> bool:
    """Whether a mask hides the keys after each query, and nothing else.

    On the CPU its values are read. On CUDA that synchronises the host, so they are read again only
    if the tensor, its memory or its version changes; torch does not count writes through ``.data``.
    Inside of torch.compile and of a CUDA graph nothing is read: False.
    """
    if mask.dim() != 2 or torch.compiler.is_compiling() or _is_capturing(mask):
        return False
    if mask.is_inference() or not mask.is_cuda:
        return _equals_causal(mask)
    state = (internals.version(mask), mask.data_ptr())
    known, before, answer = _known.get(id(mask), (None, None, False))
    if known is not None and known() is mask and before == state:
        return answer
    answer, key = _equals_causal(mask), id(mask)
    forget = weakref.ref(mask, lambda _: _known.pop(key, None))
    _known[key] = (forget, state, answer)
    return answer


_known: dict[int, tuple[Any, tuple[int, int] | None, bool]] = {}


def _equals_causal(mask: Tensor) -> bool:
    later = torch.ones_like(mask, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, later)
    return torch.equal(mask, torch.zeros_like(mask).masked_fill(later, float("-inf")))


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _check(name: str, mask: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is {type(mask).__name__}; expected a tensor or None")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} has dtype {mask.dtype}; expected torch.bool or floating point")
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; expected {expected}")
