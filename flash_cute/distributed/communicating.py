"""How the ops that communicate are made, called, and compared between ranks.

A plan is an argument of them, as text that names the :class:`ContextParallel` whose groups are
used. The first op of a graph, and each op of backward, first checks that all ranks run it, so that
no rank waits for a message that never comes, or receives that of another op.
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

# By op: the Python function that it runs, and the autograd function of ops with a gradient.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
_FORMULAS: dict[Any, type[torch.autograd.Function]] = {}


def make_op(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Makes an op that runs a function. Without ``schema`` its annotations are the schema."""

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
    """Calls the op. If no mode or subclass of torch could see the call, it passes the dispatcher
    by, which takes some 50 us with a gradient."""
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
def agreeing_on_call(
    plan: Plan, options: str, qkv: tuple[Tensor, ...], **same: Tensor | None
) -> Iterator[None]:
    """Checks inside that all ranks make this call, which :func:`cp_attention` checks itself outside
    of graphs: there ``options`` is "". ``same`` are tensors of equal values on all ranks."""
    cp = context_of(plan) if options else None
    if cp is None or not cp.asks:
        yield
        return
    with cp.agreeing(description.of_attention(options, plan, qkv, same)):
        yield
        cp.compare(same)


@contextmanager
def agreeing_on_backward(plan: Plan, op: str, *tensors: Tensor | None) -> Iterator[None]:
    """Checks inside that all ranks run this op of backward; "" is forward, checked before."""
    cp = context_of(plan) if op else None
    if cp is None or not cp.asks:
        yield
    else:
        with cp.agreeing(description.of_gradient(op, plan, *tensors)):
            yield
