"""A cache of what layers read from tensors that all layers of a model share.

Reading waits for the GPU: later layers of a forward reuse the result of the first one.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flash_cute import _torch_internals as internals


@dataclass(frozen=True)
class CacheKey:
    """A key of the cache: tensors, their versions, and the layer's number.

    Inference tensors have no versions: only later layers, of the same forward, may reuse the
    result.
    """

    tensors: list[weakref.ref[Tensor]]
    versions: list[int | None]
    layer: int | None

    @classmethod
    def at(cls, tensors: list[Tensor], layer: int | None) -> CacheKey | None:
        """The key; None if a later lookup could not recognise it."""
        versions = [None if x.is_inference() else internals.version(x) for x in tensors]
        if None in versions and layer is None:
            return None
        return cls([weakref.ref(x) for x in tensors], versions, layer)

    def is_valid_after(self, before: CacheKey) -> bool:
        """Whether the result of ``before`` is valid for this key."""
        theirs, mine = ([reference() for reference in x.tensors] for x in (before, self))
        if self.versions != before.versions or len(theirs) != len(mine):
            return False
        if None in self.versions and not _is_later(self.layer, before.layer):
            return False
        return all(x is y for x, y in zip(theirs, mine, strict=True))


def _is_later(layer: int | None, before: int | None) -> bool:
    return layer is not None and before is not None and layer > before


def cached_result(key: CacheKey | None) -> tuple[bool, Any]:
    """(whether an earlier layer read the same tensors, its result)."""
    for i, (before, found) in enumerate(_recent.entries if key is not None else ()):
        if key is not None and key.is_valid_after(before):
            _recent.entries[i] = (key, found)
            return True, found
    return False, None


def store(key: CacheKey | None, found: Any) -> None:
    if key is not None:
        _recent.entries = [(key, found), *_recent.entries][:_MOST_KEPT]


class _Recent(threading.local):
    """The most recent keys and results of this thread, the newest first."""

    def __init__(self) -> None:
        self.entries: list[tuple[CacheKey, Any]] = []


_recent = _Recent()
_MOST_KEPT = 4  # layers of a model have masks of two or three kinds
