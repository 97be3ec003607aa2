"""Restored weights are not kept for backward: they are restored again there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Restore = Callable[[], Tensor]
Recent = dict[int, tuple["weakref.ref[Tensor]", Restore]]
_recent: ContextVar[Recent | None] = ContextVar("recently restored weights", default=None)


def note_restored(weight: Tensor, restore: Restore) -> Tensor:
    """Remembers, inside ``weights_restored_in_backward``, how a weight can be had again."""
    recent = None if torch.compiler.is_compiling() else _recent.get()
    if recent is not None:
        recent[weight.untyped_storage().data_ptr()] = weakref.ref(weight), restore
    return weight


@contextmanager
def weights_restored_in_backward() -> Iterator[None]:
    """Inside, what autograd saves of a restored weight, or of a view of one, is its recipe."""
    recent: Recent = {}

    def save(tensor: Tensor) -> Any:
        known = recent.get(tensor.untyped_storage().data_ptr())
        if known is None or known[0]() is None:  # of another tensor that has had this address
            return tensor
        return known[1], tensor.size(), tensor.stride(), tensor.storage_offset()

    def load(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        restore, size, stride, offset = saved
        return restore().as_strided(size, stride, offset)

    token = _recent.set(recent)
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, load):
            yield
    finally:
        _recent.reset(token)
