"""How the ops that communicate are made, called, and compared between ranks.

A plan goes in as text, and names the :class:`ContextParallel` whose groups are used. The first op
of a graph, and each of backward, asks all ranks first whether they are there, so that no message
waits for a rank that does something else, nor meets another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.distributed import description
from flash_cute.distributed.context import context_of
from flash_cute.distributed.plan import Plan
from flash_cute.ops import autograd

# By op: the Python function that it runs, and autograd's function of those that have a gradient.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
_FORMULAS: dict[Any, type[torch.autograd.Function]] = {}


def op_of(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Makes an op of a function, whose annotations are the schema if none is given."""

    def make(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(
            f"flash_cute::{name}", function, mutates_args=(), schema=schema
        )
        _FUNCTIONS[op] = function
        return op

    return make


def differentiable(op: Any, back: Callable[..., Any], keep: Callable[..., None]) -> None:
    """Gives an op its gradient, for calls of it and for :func:`call`."""

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with internals.below_autograd():
                output = _FUNCTIONS[op](*args)
            keep(ctx, args, output)
            return output

        backward = staticmethod(back)

    op.register_autograd(back, setup_context=keep)
    _FORMULAS[op] = Formula


def call(op: Any, *args: Any) -> Any:
    """The op; without the dispatcher's way to it, some 50 us with a gradient, where nobody else
    could see the call."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    if internals.in_forward_mode():
        autograd.refuse_tangents(tensors)
    if not internals.are_plain(tensors):
        return op(*args)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _FORMULAS[op].apply(*args) if op in _FORMULAS else op(*args)
    with internals.below_autograd():
        return _FUNCTIONS[op](*args)


@contextmanager
def asking(
    plan: Plan, asked: str, qkv: tuple[Tensor, ...], **same: Tensor | None
) -> Iterator[None]:
    """In a graph the first op asks all ranks what :func:`cp_attention` asks them outside of one."""
    cp = context_of(plan) if asked else None
    if cp is None or not cp.asks:
        yield
        return
    with cp.agreeing(description.of_attention(asked, plan, qkv, same)):
        yield
        cp.compare(same)


@contextmanager
def asking_backward(plan: Plan, op: str, *tensors: Tensor | None) -> Iterator[None]:
    """Whether all ranks run this part of backward. ``op`` "" is forward, which was asked before."""
    cp = context_of(plan) if op else None
    if cp is None or not cp.asks:
        yield
    else:
        with cp.agreeing(description.of_gradient(op, plan, *tensors)):
            yield
