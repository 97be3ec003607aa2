"""Names of the steps of a strategy, for timelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.profiler import record_function


@contextmanager
def named(step: str) -> Iterator[None]:
    """``cp: step`` in torch.profiler, and with a GPU as an NVTX range, which nsys shows."""
    name = f"cp: {step}"
    with record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield
