"""Objects that ops and graphs find by name, with the process groups that each uses.

Only this module holds groups, until the interpreter exits: a group has threads as long as anything
refers to it, and gloo's threads abort a process whose interpreter has ended.
"""

from __future__ import annotations

import atexit
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class _Entry(NamedTuple):
    owner: weakref.ref[Any]
    groups: Any


_ENTRIES: dict[str, _Entry] = {}  # by name
_NUMBERS: defaultdict[type, Iterator[int]] = defaultdict(itertools.count)
# Groups that were made for another one, by their ranks, timeout and backend.
_MADE: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()
for _held in (_ENTRIES, _MADE):
    atexit.register(_held.clear)


def register(owner: Any, groups: Any) -> str:
    """Holds an object's groups as long as it lives; returns its name: a text, never symbolic in
    graphs. It is the same on ranks that made equally many objects of the class."""
    kind = type(owner)
    name = f"{kind.__name__}{next(_NUMBERS[kind])}"
    _ENTRIES[name] = _Entry(weakref.ref(owner), groups)
    weakref.finalize(owner, _ENTRIES.pop, name, None)
    return name


def held_by(name: str) -> Any:
    """The groups of a registered object."""
    return _ENTRIES[name].groups


def find(name: str) -> Any:
    """The object with this name; None if it does not exist any more."""
    entry = _ENTRIES.get(name)
    return None if entry is None else entry.owner()


def living(kind: type[T]) -> list[T]:
    """All registered objects of a class, the oldest first."""
    owners = [entry.owner() for entry in list(_ENTRIES.values())]
    return [x for x in owners if isinstance(x, kind)]


def made_for(group: Any) -> dict[tuple[Any, ...], Any]:
    """The groups that were derived from ``group``; they live as long as it does."""
    return _MADE.setdefault(group, {})
