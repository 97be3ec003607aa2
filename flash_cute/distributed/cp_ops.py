"""The ops that communicate, beside those of :mod:`flash_cute.distributed.exchange`: opaque to
torch.compile, which so traces fullgraph. ``cp_attention`` is a strategy's forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cute.distributed import agreement, all_gather, comm, layouts
from flash_cute.distributed.communicating import (
    asking,
    asking_backward,
    call,
    differentiable,
    op_of,
)
from flash_cute.distributed.context import context_named
from flash_cute.distributed.groups import groups_of
from flash_cute.distributed.local import Saved, statistic_dtype
from flash_cute.distributed.merge import sink_gradient
from flash_cute.distributed.plan import plan_of
from flash_cute.distributed.strategies import over_tokens
from flash_cute.ops import autograd, switches
from flash_cute.ops.typed import FwdCall

OPS = torch.ops.flash_cute


@op_of("cp_attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    window_left: int,
    window_right: int,
    deterministic: bool,
    plan: str,
    asked: str = "",
) -> tuple[Tensor, Tensor]:
    """out and lse of a rank's q (batch, rows, heads, dim) over all ranks' k and v.

    k and v that :func:`exchange_qkv` copied are fp32, and so are their gradients, with numbers of
    q's dtype. What is ``asked`` for, beside tensors and plan, must be equal on all ranks; "" is not
    compared.
    """
    whole = plan_of(plan)
    groups = groups_of(whole)
    with asking(whole, asked, (q, k, v), alibi_slopes=alibi_slopes, sink=sink):
        whole_call = FwdCall(
            q, k.to(q.dtype), v.to(q.dtype), softmax_scale, False, window_left, window_right,
            softcap, alibi_slopes, sink, deterministic=deterministic,
        )  # fmt: skip
        out, lse = over_tokens(whole).forward(whole, groups.outer_rank, groups.outer, whole_call)
    return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=statistic_dtype(q))


@op_of("cp_attention_backward")
def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    window_left: int,
    window_right: int,
    deterministic: bool,
    plan: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv of the rank's tokens, and its part of dsink, fp32 (heads,), empty without sink."""
    whole = plan_of(plan)
    groups = groups_of(whole)
    whole_call = FwdCall(
        q, k.to(q.dtype), v.to(q.dtype), softmax_scale, False, window_left, window_right, softcap,
        alibi_slopes, deterministic=switches.deterministic(deterministic),
    )  # fmt: skip
    saved = Saved(dout, dlse, out, lse)
    with asking_backward(whole, "attention" * (whole.outer > 1), dout, q, k, v):
        gradients = over_tokens(whole).backward(
            whole, groups.outer_rank, groups.outer, whole_call, saved
        )
    dq, dk, dv = (
        x.to(like.dtype).contiguous() for x, like in zip(gradients, (q, k, v), strict=True)
    )
    dsink = sink_gradient(lse, saved.softmax_d(), sink) if sink is not None else _no_sink(q)
    return dq, dk, dv, dsink


def _no_sink(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.float32)


@attention_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    alibi_slopes: Tensor | None, sink: Tensor | None, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dsink = _no_sink(q) if sink is None else q.new_empty(sink.shape, dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsink


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, softcap, left, right, deterministic, plan, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (scale, softcap, left, right, deterministic, plan)
    ctx.owner = plan_of(plan)  # whose groups live until backward


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, slopes, sink, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv, dsink = call(
        attention_backward, dout, dlse, q, k, v, out, lse, slopes, sink, *ctx.options
    )
    return dq, dk, dv, None, None if sink is None else dsink.to(sink.dtype), *[None] * 7


differentiable(attention, autograd.once_differentiable(_differentiate), _keep)


@op_of("cp_gather")
def gather(x: Tensor, plan: str) -> Tensor:
    """(batch, rows, ..) of each rank to (batch, all rows, ..) in the order of the batch."""
    whole = plan_of(plan)
    rows = all_gather.to_rows(x, max(map(layouts.rows, whole.parts)))
    gathered, work = comm.all_gather(rows, groups_of(whole).whole)
    work.wait()
    place = whole.slots(whole.parts, x.device)
    gathered = gathered if place is None else gathered.index_select(0, place)
    return gathered.transpose(0, 1).clone()


@op_of("cp_scatter_sum")
def scatter_sum(x: Tensor, plan: str) -> Tensor:
    """This rank's rows (batch, rows, ..) of the sum over ranks of x (batch, all rows, ..)."""
    whole = plan_of(plan)
    groups = groups_of(whole)
    total = x.to(statistic_dtype(x)).transpose(0, 1).contiguous()
    place = whole.slots(whole.parts, x.device)
    if place is not None:
        longest = max(map(layouts.rows, whole.parts))
        padded = total.new_zeros((whole.ranks * longest, *total.shape[1:]))
        total = padded.index_copy_(0, place, total)
    with asking_backward(whole, "gather", x):
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


@op_of("cp_refuse")
def refuse(x: Tensor, width: int, kind: str, text: str, context: str) -> Tensor:
    """Raises on all ranks, which ask for agreement, what a graph found wrong with this rank's call,
    whose result would be as x, with its last dimension."""
    context_named(context).agree("none", agreement.error_of(kind, text))
    return x.new_empty((*x.shape[:-1], width))


@refuse.register_fake
def _(x: Tensor, width: int, *_: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


def _keep_width(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.width = inputs[0].shape[-1]


def _no_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return dout.new_zeros((*dout.shape[:-1], ctx.width)), None, None, None, None


refuse.register_autograd(_no_gradient, setup_context=_keep_width)
