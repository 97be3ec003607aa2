"""Limits the CUDA kernels that calls of a thread may run, and sets how forward splits its work. A
limit also holds for the backward of its calls, which autograd runs in another thread.

A limit is text: ids of kernels, one a line, and lines ``num_splits=N`` and ``pack_gqa=N`` for
forward (``csrc/core/limit.h``). Empty text limits nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_thread = threading.local()


def current() -> str:
    """This thread's limit; empty while torch.compile traces."""
    return "" if torch.compiler.is_compiling() else _of_thread()


def merge_with_current(
    ids: Sequence[str], num_splits: int | None = None, pack_gqa: int | None = None
) -> str:
    """This thread's limit, with the parts replaced that are given."""
    given = {"num_splits": num_splits, "pack_gqa": pack_gqa}
    numbers = [f"{name}={number}" for name, number in given.items() if number is not None]

    def is_kept(line: str) -> bool:
        name, is_number, _ = line.partition("=")
        return given[name] is None if is_number else not ids

    return "\n".join([*ids, *numbers, *filter(is_kept, _of_thread().splitlines())])


@contextmanager
def limit_kernels(limit: str) -> Iterator[None]:
    """Inside, calls of this thread obey the limit, or raise RuntimeError with the reasons; so does
    their backward, in any thread."""
    before = _of_thread()
    _set_limit(limit)
    try:
        yield
    finally:
        _set_limit(before)


def restore_limit(limit: str) -> AbstractContextManager[None]:
    """:func:`limit_kernels` for a backward, with the limit of its forward."""
    return nullcontext() if limit == current() else limit_kernels(limit)


def _of_thread() -> str:
    return getattr(_thread, "limit", "")


def _set_limit(limit: str) -> None:
    torch.ops.flash_cute.limit_kernels(limit)
    _thread.limit = limit
