"""Restored weights are not kept for backward: they are restored again there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals

Restore = Callable[[], Tensor]
Recent = dict[int, tuple["weakref.ref[Tensor]", Restore]]
_recent: ContextVar[Recent | None] = ContextVar("recently restored weights", default=None)


def note_restored(weight: Tensor, restore: Restore, states: Callable[[], Any]) -> Tensor:
    """Remembers, inside ``weights_restored_in_backward``, how a weight can be had again, as long as
    ``states()`` of what it comes from is the same."""
    recent = None if torch.compiler.is_compiling() else _recent.get()
    if recent is not None:
        before = states()

        def again() -> Tensor:
            if states() != before:
                raise RuntimeError(
                    "packed weights that backward needs were changed or moved since forward, by "
                    "load_state_dict, say"
                )
            return restore()

        recent[weight.untyped_storage().data_ptr()] = weakref.ref(weight), again
    return weight


@contextmanager
def weights_restored_in_backward() -> Iterator[None]:
    """Inside, what autograd saves of a restored weight, or of a view of one, is its recipe."""
    recent: Recent = {}

    def save(tensor: Tensor) -> Any:
        known = recent.get(tensor.untyped_storage().data_ptr())
        if known is None or known[0]() is None:  # of another tensor that has had this address
            return tensor, internals.version(tensor)
        return known[1], tensor.size(), tensor.stride(), tensor.storage_offset()

    def load(saved: Any) -> Tensor:
        if isinstance(saved[0], Tensor):
            tensor, version = saved  # hooks keep torch from comparing them
            if internals.version(tensor) != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by "
                    "an inplace operation: clone it before"
                )
            return tensor
        restore, size, stride, offset = saved
        return restore().as_strided(size, stride, offset)

    token = _recent.set(recent)
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, load):
            yield
    finally:
        _recent.reset(token)
