"""Finds values and modules that torch does not see: in plain attributes, lists, tuples, dicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_REGISTERED = ("_parameters", "_buffers", "_modules")


def plain_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(attribute, value) of a module's plain attributes, and of the entries of lists, tuples, sets
    and dicts in them."""
    left = [(name, x) for name, x in vars(module).items() if name not in _REGISTERED]
    seen: set[int] = set()
    while left:
        name, value = left.pop()
        if not isinstance(value, (list, tuple, set, dict)):
            yield name, value
        elif id(value) not in seen:
            seen.add(id(value))
            left += [(name, x) for x in (value.values() if isinstance(value, dict) else value)]


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path of the attribute, module) of modules in plain attributes, and of their children, each
    once. Some may be registered in the model under another name."""
    left = list(model.named_modules())
    seen: set[nn.Module] = set()
    while left:
        path, module = left.pop(0)
        for name, value in plain_values(module):
            if not isinstance(value, nn.Module):
                continue
            new = [part for part in value.modules() if part not in seen]
            seen.update(new)
            places = [(f"{path}.{name}" if path else name, part) for part in new]
            yield from places
            left += places
