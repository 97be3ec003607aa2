"""Names of the steps of a strategy, for timelines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.autograd.profiler import record_function

from flash_cute import _torch_internals as internals

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def named(step: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """``cp: step`` in torch.profiler, while that runs, and with a GPU as an NVTX range, which nsys
    shows: calls of the function that is decorated."""
    name = f"cp: {step}"

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        def on_gpus(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
            if not torch.cuda.is_initialized():
                return function(*args, **named)
            torch.cuda.nvtx.range_push(name)
            try:
                return function(*args, **named)
            finally:
                torch.cuda.nvtx.range_pop()

        @functools.wraps(function)
        def call(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
            if not internals.is_profiled():
                return on_gpus(*args, **named)
            with record_function(name):
                return on_gpus(*args, **named)

        return call

    return decorate
