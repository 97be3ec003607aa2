"""Tensors that sizes and a device alone decide: made once, and kept for later calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals

F = TypeVar("F", bound=Callable[..., Tensor | tuple[Tensor | None, ...]])

_RESULTS = 32
_BYTES = 2**28

_kept: OrderedDict[Any, tuple[Any, list[int]]] = OrderedDict()
_lock = Lock()


def made_once(function: F) -> F:
    """Keeps the results of ``function``, a tensor or several, by its arguments, of which one is a
    device: the 32 used last, and no more than 256 MB, of all functions and devices together.

    Each stream has its own. With a tensor among the arguments or a device by its name, in a graph,
    in a transform and among fake tensors the function is called as it is: a graph, say, must own
    what it reads. Results must not be changed; one that was is made anew.
    """

    @wraps(function)
    def made(*args: Any, **named: Any) -> Any:
        given = (*args, *named.values())
        where = None if any(isinstance(x, Tensor) for x in given) else _place(given)
        if where is None:
            return function(*args, **named)
        key = (function, where, args, *named.items())
        with _lock:
            result, versions = _kept.get(key, (None, None))
            if result is not None and versions == _versions(result):
                _kept.move_to_end(key)
                return result
        # Other calls may have gradients, and modes that compare a forward with its recomputation.
        with internals.outside_of_modes(), torch.inference_mode(False), torch.no_grad():
            result = function(*args, **named)
        with _lock:
            _kept[key] = result, _versions(result)
            _kept.move_to_end(key)
            while len(_kept) > _RESULTS or sum(_bytes(x) for x, _ in _kept.values()) > _BYTES:
                _kept.popitem(last=False)
        return result

    return made  # type: ignore[return-value]


def _place(given: tuple[Any, ...]) -> Any:
    """The device and the stream of tensors that are made now; None if they may not be kept."""
    device = next((x for x in given if isinstance(x, torch.device)), None)
    if device is None or torch.compiler.is_compiling() or internals.transformed():
        return None
    new = torch.empty(0, device=device)
    if type(new) is not Tensor:
        return None
    if not new.is_cuda:
        return new.device
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(new.device)


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def _versions(result: Any) -> list[int]:
    return [internals.version(x) for x in _tensors(result)]


def _bytes(result: Any) -> int:
    return sum(x.nbytes for x in _tensors(result))
