"""Which CUDA kernels the calls of a thread may take, and how these cut their work; so does their
backward, which autograd runs in a thread of its own.

A limit is text: ids of kernels, one a line, and lines ``num_splits=N`` and ``pack_gqa=N``, which
ask for that of forward (``csrc/core/limit.h``). Empty text limits nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_here = threading.local()


def current() -> str:
    """This thread's limit; empty in what torch.compile traces."""
    return "" if torch.compiler.is_compiling() else _of_thread()


def inside(ids: Sequence[str], num_splits: int | None = None, pack_gqa: int | None = None) -> str:
    """The limit that these give inside of the current one; what is not given stays as it is."""
    given = {"num_splits": num_splits, "pack_gqa": pack_gqa}
    asked = [f"{name}={number}" for name, number in given.items() if number is not None]

    def stays(line: str) -> bool:
        name, is_number, _ = line.partition("=")
        return given[name] is None if is_number else not ids

    return "\n".join([*ids, *asked, *filter(stays, _of_thread().splitlines())])


@contextmanager
def limited(limit: str) -> Iterator[None]:
    """Inside, calls of this thread keep to the limit, or raise RuntimeError with the reasons; so
    does their backward, wherever it runs."""
    before = _of_thread()
    _limit(limit)
    try:
        yield
    finally:
        _limit(before)


def again(limit: str) -> AbstractContextManager[None]:
    """The same of the limit that held when a call's forward ran."""
    return nullcontext() if limit == current() else limited(limit)


def _of_thread() -> str:
    return getattr(_here, "limit", "")


def _limit(limit: str) -> None:
    torch.ops.flash_cute.limit_kernels(limit)
    _here.limit = limit
