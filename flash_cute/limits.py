"""Which CUDA kernels the calls of a thread may take, and their backward, which autograd runs in a
thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_here = threading.local()


def current() -> str:
    """Ids of the kernels that this thread's calls may take, one a line; empty if any, and in what
    torch.compile traces."""
    return "" if torch.compiler.is_compiling() else getattr(_here, "ids", "")


@contextmanager
def limited(ids: str) -> Iterator[None]:
    """Inside, calls of this thread take these kernels, or raise RuntimeError with the reasons; so
    does their backward, wherever it runs."""
    before = current()
    _limit(ids)
    try:
        yield
    finally:
        _limit(before)


def again(ids: str) -> AbstractContextManager[None]:
    """The same of ids that held when a call's forward ran."""
    return nullcontext() if ids == current() else limited(ids)


def _limit(ids: str) -> None:
    torch.ops.flash_cute.limit_kernels(ids)
    _here.ids = ids
