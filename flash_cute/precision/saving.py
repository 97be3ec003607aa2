"""Keeps restored weights out of memory until backward, which restores them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from flash_cute import _torch_internals as internals

Restore = Callable[[], Tensor]
Recent = WeakKeyDictionary[UntypedStorage, tuple[int, Restore]]
_recent: ContextVar[Recent | None] = ContextVar("recently restored weights", default=None)


def note_restored(weight: Tensor, restore: Restore, states: Callable[[], Any]) -> Tensor:
    """Records, inside ``weights_restored_in_backward``, how to restore a weight again, as long as
    ``states()`` of its source is unchanged."""
    recent = None if torch.compiler.is_compiling() else _recent.get()
    if recent is not None:
        before = states()

        def restore_again() -> Tensor:
            if states() != before:
                raise RuntimeError(
                    "packed weights that backward needs were changed or moved since forward, by "
                    "load_state_dict, say"
                )
            return restore()

        recent[weight.untyped_storage()] = version_of(weight), restore_again
    return weight


def version_of(tensor: Tensor) -> int:
    """How often it was written in place; 0 for inference tensors, which do not count it."""
    return 0 if tensor.is_inference() else internals.version(tensor)


@contextmanager
def weights_restored_in_backward() -> Iterator[None]:
    """Inside, autograd saves the recipe of a restored weight, or of a view of one, not its values.

    Any other tensor is saved detached: an op that saves its own output would otherwise make a
    reference cycle with its graph node, which is never freed.
    """
    recent: Recent = WeakKeyDictionary()

    def save(tensor: Tensor) -> Any:
        version = version_of(tensor)
        if tensor.layout is torch.strided:  # others have no storage
            known_version, restore = recent.get(tensor.untyped_storage(), (None, None))
            if version == known_version:
                return restore, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor.detach(), version

    def load(saved: Any) -> Tensor:
        if isinstance(saved[0], Tensor):
            tensor, version = saved  # with hooks torch does not compare versions
            if version_of(tensor) != version:
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
