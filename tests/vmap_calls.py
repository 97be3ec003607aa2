"""Calls under torch.vmap that several test files make, and how many calls of an op they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLES, BATCH, HEADS, HEADS_K, DIM, DIM_V = 3, 2, 4, 2, 16, 8
ROWS_Q, ROWS_K = 9, 13


class Calls(TorchDispatchMode):
    """How many calls of flash_cute's ops arrive below vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "flash_cute"
        return func(*args, **(kwargs or {}))


@contextmanager
def calls_of_the_op(expected: int) -> Iterator[None]:
    """That many are made, and torch does not warn of a loop of its own."""
    with warnings.catch_warnings(), Calls() as calls:
        warnings.simplefilter("error")
        yield
    assert calls.count == expected


def check(
    function: Callable[..., Any], arguments: dict[str, Any], mapped: dict[str, int], calls: int = 1
) -> None:
    """`function(**arguments)` mapped over the named dimensions gives what each sample gives."""
    dims = {name: mapped.get(name) for name in arguments}
    with calls_of_the_op(calls):
        got = torch.vmap(lambda x: present(function(**x)), (dims,))(arguments)
    for i in range(SAMPLES):
        sample = arguments | {name: arguments[name].select(d, i) for name, d in mapped.items()}
        sample = {n: x.contiguous() if n in mapped else x for n, x in sample.items()}
        for x, y in zip(got, present(function(**sample)), strict=True):
            torch.testing.assert_close(x[i], y)


def present(results: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in results if x is not None)


def randn(device: str, *shape: int, samples: int | None = None, dtype=torch.float32):
    """A random tensor, with `SAMPLES` of them at the dimension `samples`."""
    shape = list(shape)
    if samples is not None:
        shape.insert(samples, SAMPLES)
    return torch.randn(shape, device=device).to(dtype)


def dense(device: str, mapped: dict[str, int], names: str) -> dict[str, Any]:
    shapes = {
        "q": (BATCH, ROWS_Q, HEADS, DIM),
        "k": (BATCH, ROWS_K, HEADS_K, DIM),
        "v": (BATCH, ROWS_K, HEADS_K, DIM_V),
        "alibi_slopes": (HEADS,),
        "alibi_batch": (BATCH, HEADS),
        "sink": (HEADS,),
    }
    named = {n: randn(device, *shapes[n], samples=mapped.get(n)) for n in names.split()}
    return {"alibi_slopes" if n == "alibi_batch" else n: x for n, x in named.items()}
