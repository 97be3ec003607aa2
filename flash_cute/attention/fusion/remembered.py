"""Caches trials: of layers that differ only in their weights one is tried.

Their classes, numbers, objects and kinds of parameters must be equal. Only a layer's number,
``layer_idx``, may differ, if the trial did not read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from torch import nn

from flash_cute import _torch_internals as internals

_NUMBER = "layer_idx"
_VALUES = (bool, int, float, str, type(None))
_OWN = frozenset(vars(nn.Module()))


class TrialCache:
    """Results of trials, by the kind of block."""

    def __init__(self) -> None:
        self.found: dict[Any, list[tuple[Any, bool, Any]]] = {}  # layer_idx, if it was read, result
        self.is_read = False

    def result(self, name: str, block: nn.Module, tried: Callable[[], Any]) -> Any:
        """The result of an equal block, or of a new trial of this one."""
        kind, numbers = _kind(block)
        key = (name, kind)
        for others, depends, result in self.found.get(key, ()):
            if numbers == others or not depends:
                return result
        self.is_read = False
        result = tried()
        if kind is not None:
            self.found.setdefault(key, []).append((numbers, self.is_read, result))
        return result


_HERE: ContextVar[TrialCache | None] = ContextVar("remembered", default=None)


@contextmanager
def caching_trials() -> Iterator[None]:
    """Inside, :func:`once` tries equal blocks once."""
    token = _HERE.set(TrialCache())
    try:
        yield
    finally:
        _HERE.reset(token)


def once(name: str, block: nn.Module, tried: Callable[[], Any]) -> Any:
    """The result of a trial, or that of an equal block."""
    here = _HERE.get()
    return tried() if here is None else here.result(name, block, tried)


def watch(block: nn.Module) -> nn.Module:
    """A copy for trials that records whether ``layer_idx`` is read."""
    for part in block.modules():
        if _NUMBER in vars(part):
            kind: Any = type(part)
            part.__class__ = _watched(kind)
    return block


@lru_cache(256)
def _watched(base: Any) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        here = _HERE.get()
        if name == _NUMBER and here is not None:
            here.is_read = True
        return base.__getattribute__(self, name)

    names = {"__getattribute__": __getattribute__, "__module__": base.__module__}
    return type(base.__name__, (base,), names)


def _kind(block: nn.Module) -> tuple[Any, Any]:
    """A key that equal blocks share, None if no other can be equal; and its ``layer_idx``."""
    parts, numbers = [], []
    for name, part in block.named_modules():
        if internals.has_hooks(part) or list(part.buffers(recurse=False)):
            return None, None
        state = [(key, _value(x)) for key, x in vars(part).items() if key not in _OWN]
        numbers += [x for key, x in state if key == _NUMBER]
        rest = tuple(x for x in state if x[0] != _NUMBER)
        weights = tuple(
            (key, type(p), p.shape, p.dtype, p.device, p.requires_grad)
            for key, p in part.named_parameters(recurse=False)
        )
        parts.append((name, type(part), rest, weights))
    return tuple(parts), tuple(numbers)


def _value(x: Any) -> Any:
    """A key of x: numbers and text by value, anything else by identity."""
    return (type(x), x) if type(x) in _VALUES else id(x)
