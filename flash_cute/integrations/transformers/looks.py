"""What layers of a model look up in tensors that all of them are given, looked up once a forward.

Looking waits for the GPU: a later layer takes what an earlier one found in the same tensors.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flash_cute import _torch_internals as internals


@dataclass(frozen=True)
class Look:
    """What a layer looks at: tensors, how often each was written, and the layer's number.

    Those of inference mode do not know that they were written: later layers alone, which belong to
    the same forward, look at the same.
    """

    tensors: list[weakref.ref[Tensor]]
    versions: list[int | None]
    layer: int | None

    @classmethod
    def at(cls, tensors: list[Tensor], layer: int | None) -> Look | None:
        """None if nobody could know that it is the same again."""
        versions = [None if x.is_inference() else internals.version(x) for x in tensors]
        if None in versions and layer is None:
            return None
        return cls([weakref.ref(x) for x in tensors], versions, layer)

    def is_behind(self, before: Look) -> bool:
        """Whether it finds what the one before did."""
        theirs, mine = ([reference() for reference in x.tensors] for x in (before, self))
        if self.versions != before.versions or len(theirs) != len(mine):
            return False
        if None in self.versions and not _is_later(self.layer, before.layer):
            return False
        return all(x is y for x, y in zip(theirs, mine, strict=True))


def _is_later(layer: int | None, before: int | None) -> bool:
    return layer is not None and before is not None and layer > before


def found_before(look: Look | None) -> tuple[bool, Any]:
    """Whether a layer before has looked at the same; what it found."""
    for i, (before, found) in enumerate(_recent.entries if look is not None else ()):
        if look is not None and look.is_behind(before):
            _recent.entries[i] = (look, found)
            return True, found
    return False, None


def keep(look: Look | None, found: Any) -> None:
    if look is not None:
        _recent.entries = [(look, found), *_recent.entries][:_MOST_KEPT]


class _Recent(threading.local):
    """What layers of this thread have looked at last, the newest first."""

    def __init__(self) -> None:
        self.entries: list[tuple[Look, Any]] = []


_recent = _Recent()
_MOST_KEPT = 4  # layers of a model have masks of two or three kinds
