"""The ops that communicate, except those of :mod:`flash_cute.distributed.exchange`. They are opaque
to torch.compile, so calls trace with fullgraph. ``cp_attention`` is a strategy's forward and
backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call.validate.ops import statistic_dtype
from flash_cute.distributed import agreement, all_gather, comm, layouts
from flash_cute.distributed.communicating import (
    agreeing_on_backward,
    agreeing_on_call,
    call,
    differentiable,
    make_op,
)
from flash_cute.distributed.context import context_named
from flash_cute.distributed.groups import groups_of
from flash_cute.distributed.local import Saved
from flash_cute.distributed.merge import sink_gradient
from flash_cute.distributed.plan import plan_of
from flash_cute.distributed.strategies import over_tokens
from flash_cute.ops import autograd, switches
from flash_cute.ops.typed import FwdCall

OPS = torch.ops.flash_cute


# The arguments of attention that a strategy needs: those of fwd.
_CALL = internals.argument_list(OPS.fwd.default)
_NO_GRADIENTS: Any = FwdCall._make([None] * len(FwdCall._fields))


@make_op("cp_attention", f"(str plan, str asked, {_CALL}) -> (Tensor, Tensor)")
def attention(plan: str, asked: str, *args: Any) -> tuple[Tensor, Tensor]:
    """out and lse of a rank's q (batch, rows, heads, dim) over all ranks' k and v.

    k and v that :func:`exchange_qkv` copied are fp32, and so are their gradients, with numbers of
    q's dtype. ``asked`` is a text of the options, which must be equal on all ranks; with "" nothing
    is compared.
    """
    whole, given = plan_of(plan), FwdCall(*args)
    groups = groups_of(whole)
    same = {"alibi_slopes": given.alibi_slopes, "sink": given.sink}
    with agreeing_on_call(whole, asked, given[:3], **same):
        out, lse = over_tokens(whole).forward(
            whole, groups.outer_rank, groups.outer, _of_one_dtype(given)
        )
    return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(plan: str, asked: str, *args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=statistic_dtype(q))


_SAVED = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse"


@make_op(
    "cp_attention_backward",
    f"(str plan, {_SAVED}, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(
    plan: str, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv of the rank's tokens, and its part of dsink, fp32 (heads,), empty without sink."""
    whole, given = plan_of(plan), FwdCall(*args)
    groups, saved, qkv = groups_of(whole), Saved(dout, dlse, out, lse), given[:3]
    whole_call = _of_one_dtype(given)._replace(
        sink=None, deterministic=switches.deterministic(given.deterministic)
    )
    with agreeing_on_backward(whole, "attention" * (whole.outer > 1), dout, *qkv):
        gradients = over_tokens(whole).backward(
            whole, groups.outer_rank, groups.outer, whole_call, saved
        )
    dq, dk, dv = (x.to(like.dtype).contiguous() for x, like in zip(gradients, qkv, strict=True))
    dsink = _no_sink(given.q)
    if given.sink is not None:
        dsink = sink_gradient(lse, saved.softmax_d(), given.sink)
    return dq, dk, dv, dsink


def _of_one_dtype(given: FwdCall) -> FwdCall:
    q = given.q
    return given._replace(k=given.k.to(q.dtype), v=given.v.to(q.dtype))


def _no_sink(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.float32)


@attention_backward.register_fake
def _(
    plan: str, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    given = FwdCall(*args)
    dsink = _no_sink(given.q)
    if given.sink is not None:
        dsink = given.q.new_empty(given.sink.shape, dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in given[:3]), dsink


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    plan, _, *args = inputs
    given = FwdCall(*args)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given[:3], given.alibi_slopes, given.sink, *output)
    ctx.plan, ctx.given = (
        plan,
        _NO_GRADIENTS._make(None if isinstance(x, Tensor) else x for x in given),
    )
    ctx.owner = plan_of(plan)  # whose groups live until backward


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, slopes, sink, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    given = ctx.given._replace(q=q, k=k, v=v, alibi_slopes=slopes, sink=sink)
    dq, dk, dv, dsink = call(attention_backward, ctx.plan, dout, dlse, out, lse, *given)
    dsink = None if sink is None else dsink.to(sink.dtype)
    return None, None, *_NO_GRADIENTS._replace(q=dq, k=dk, v=dv, sink=dsink)


differentiable(attention, autograd.once_differentiable(_differentiate), _keep)


@make_op("cp_gather")
def gather(x: Tensor, plan: str) -> Tensor:
    """(batch, rows, ..) of each rank to (batch, all rows, ..) in the order of the batch."""
    whole = plan_of(plan)
    rows = all_gather.to_rows(x, layouts.most_rows(whole.parts))
    gathered, work = comm.all_gather(rows, groups_of(whole).whole)
    work.wait()
    place = whole.slots(whole.parts, x.device)
    gathered = gathered if place is None else gathered.index_select(0, place)
    return gathered.transpose(0, 1).clone()


@make_op("cp_scatter_sum")
def scatter_sum(x: Tensor, plan: str) -> Tensor:
    """This rank's rows (batch, rows, ..) of the sum over ranks of x (batch, all rows, ..)."""
    whole = plan_of(plan)
    groups = groups_of(whole)
    total = x.to(statistic_dtype(x)).transpose(0, 1).contiguous()
    place = whole.slots(whole.parts, x.device)
    if place is not None:
        longest = layouts.most_rows(whole.parts)
        padded = total.new_zeros((whole.ranks * longest, *total.shape[1:]))
        total = padded.index_copy_(0, place, total)
    with agreeing_on_backward(whole, "gather", x):
        mine, work = comm.reduce_scatter(total, groups.whole)
    work.wait()
    return mine[: whole.rows(groups.rank)].transpose(0, 1).to(x.dtype, copy=True)


@gather.register_fake
def _(x: Tensor, plan: str) -> Tensor:
    return x.new_empty((len(x), plan_of(plan).total, *x.shape[2:]))


@scatter_sum.register_fake
def _(x: Tensor, plan: str) -> Tensor:
    whole = plan_of(plan)
    return x.new_empty((len(x), whole.rows(groups_of(whole).rank), *x.shape[2:]))


def _keep_plan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.plan = inputs
    ctx.owner = plan_of(ctx.plan)


def _sum_back(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
    return scatter_sum(dout, ctx.plan), None


gather.register_autograd(_sum_back, setup_context=_keep_plan)


def problem_in_graph(check: Callable[[], Any], *tensors: Any) -> tuple[str, str] | None:
    """Kind and text of what a check raises while a graph is made. So that the text is one of the
    graph, the sizes that it may tell are numbers once the check has failed."""
    problem = None
    for _ in range(2):
        try:
            check()
        except (TypeError, ValueError, NotImplementedError) as error:
            problem = error
        if problem is None:
            return None
        for x in tensors:
            for n in x.shape if isinstance(x, Tensor) else ():
                len(range(n))
    assert problem is not None
    return f"{type(problem).__name__}", f"{problem.args[0]}"


@make_op("cp_refuse")
def refuse(x: Tensor, width: int, kind: str, text: str, context: str) -> Tensor:
    """Raises on all ranks the error that a graph found in this rank's call. Its fake has the shape
    of the call's result: x with a last dimension of ``width``."""
    context_named(context).agree("none", agreement.error_of(kind, text))
    return x.new_empty((*x.shape[:-1], width))


@refuse.register_fake
def _(x: Tensor, width: int, *_: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


def _keep_width(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.width = inputs[0].shape[-1]


def _zero_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return dout.new_zeros((*dout.shape[:-1], ctx.width)), None, None, None, None


refuse.register_autograd(_zero_gradient, setup_context=_keep_width)
