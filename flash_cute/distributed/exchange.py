"""The ops of ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): all-to-alls between shares of tokens
and shares of heads, whose gradients are the all-to-alls back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute.distributed import comm, layouts
from flash_cute.distributed.communicating import (
    agreeing_on_backward,
    agreeing_on_call,
    call,
    differentiable,
    make_op,
)
from flash_cute.distributed.groups import Groups, groups_of
from flash_cute.distributed.plan import Plan, plan_of


@make_op("cp_exchange")
def exchange(x: Tensor, to_heads: bool, plan: str, asked: str = "") -> Tensor:
    """(batch, rows, heads, dim) of a rank's tokens to (batch, all rows, heads / ranks, dim) of its
    share of heads, over the ranks that share them; or the way back. ``asked``: of backward."""
    whole = plan_of(plan)
    with agreeing_on_backward(whole, asked, x):
        return (_to_heads if to_heads else _to_tokens)((x,), whole, groups_of(whole))[0]


@make_op("cp_exchange_results")
def exchange_results(
    out: Tensor, lse: Tensor, to_heads: bool, plan: str, asked: str = ""
) -> tuple[Tensor, Tensor]:
    """:func:`exchange` of out and of lse (batch, heads, rows): in one op, so that ranks of which
    some have a gradient of one of them alone send the same."""
    whole = plan_of(plan)
    lse = lse.transpose(1, 2).unsqueeze(-1)
    with agreeing_on_backward(whole, asked, out, lse):
        out, lse = (
            (_to_heads if to_heads else _to_tokens)((x,), whole, groups_of(whole))[0]
            for x in (out, lse)
        )
    return out, lse.squeeze(-1).transpose(1, 2).contiguous()


@make_op("cp_exchange_qkv")
def exchange_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    copies: int,
    plan: str,
    asked: str = "",
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    rng: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`exchange` of q, k and v to heads, in one message. ``asked`` is that of
    ``cp_attention``; slopes, sinks and the random state are only compared between ranks.

    With ``copies`` > 1 each head of k and v is repeated so often, and both are returned in fp32, so
    that autograd keeps the copies' gradients in fp32 until they are added up.
    """
    whole = plan_of(plan)
    with agreeing_on_call(whole, asked, (q, k, v), alibi_slopes=alibi_slopes, sink=sink, rng=rng):
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
        q, k, v = _to_heads((q, k, v), whole, groups_of(whole))
    return (q, k, v) if copies == 1 else (q, k.float(), v.float())


@make_op("cp_exchange_qkv_back")
def exchange_qkv_back(
    dq: Tensor, dk: Tensor, dv: Tensor, copies: int, plan: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The way back, of their gradients. Those of copies are added up, and rounded to dq's dtype
    once."""
    whole, groups = plan_of(plan), groups_of(plan_of(plan))
    with agreeing_on_backward(whole, "exchange_qkv", dq, dk, dv):
        if copies == 1:
            dq, dk, dv = _to_tokens((dq, dk, dv), whole, groups)
            return dq, dk, dv
        (dq,) = _to_tokens((dq,), whole, groups)
        dk, dv = _to_tokens((dk, dv), whole, groups)
    dk, dv = (x.unflatten(2, (-1, copies)).sum(3).to(dq.dtype) for x in (dk, dv))
    return dq, dk, dv


def _members(plan: Plan, groups: Groups) -> tuple[layouts.Runs, ...]:
    first = groups.outer_rank * plan.inner
    return plan.parts[first : first + plan.inner]


def _to_heads(tensors: tuple[Tensor, ...], plan: Plan, groups: Groups) -> list[Tensor]:
    """Tensors (batch, rows, heads, dim) are sent in one message, whose padding is not read."""
    members = _members(plan, groups)
    longest = layouts.most_rows(members)
    first, heads = tensors[0], [x.shape[2] // plan.inner for x in tensors]
    widths = [n * x.shape[3] for n, x in zip(heads, tensors, strict=True)]
    send = first.new_empty((plan.inner, longest, len(first), sum(widths)))
    parts = send[:, : first.shape[1]].split(widths, -1)
    for x, n, part in zip(tensors, heads, parts, strict=True):
        by_rank = x.unflatten(2, (plan.inner, n)).permute(2, 1, 0, 3, 4)
        part.unflatten(-1, (n, -1)).copy_(by_rank)  # (ranks, rows, batch, heads, dim)
    received, work = comm.all_to_all(send.flatten(0, 1), groups.inner)
    work.wait()
    place = plan.slots(members, first.device)
    received = received if place is None else received.index_select(0, place)
    received = received.transpose(0, 1)
    return [
        x.unflatten(-1, (n, -1)).contiguous()
        for n, x in zip(heads, received.split(widths, -1), strict=True)
    ]


def _to_tokens(tensors: tuple[Tensor, ...], plan: Plan, groups: Groups) -> list[Tensor]:
    """The way back, of (batch, all rows, heads / ranks, dim)."""
    members = _members(plan, groups)
    longest = layouts.most_rows(members)
    rows = torch.cat([x.flatten(2) for x in tensors], -1).transpose(0, 1)
    place = plan.slots(members, rows.device)
    send = rows.contiguous()
    if place is not None:
        shape = (plan.inner * longest, *rows.shape[1:])
        send = rows.new_empty(shape).index_copy_(0, place, send)
    received, work = comm.all_to_all(send, groups.inner)
    work.wait()
    mine = layouts.rows(members[groups.inner_rank])
    by_rank = received.unflatten(0, (plan.inner, longest))[:, :mine]  # (ranks, rows, batch, ..)
    by_rank = by_rank.permute(2, 1, 0, 3)
    parts = by_rank.split([x.shape[2] * x.shape[3] for x in tensors], -1)
    return [
        part.unflatten(-1, (x.shape[2], -1)).flatten(2, 3).contiguous()
        for x, part in zip(tensors, parts, strict=True)
    ]


def _fake_exchange(x: Tensor, to_heads: bool, plan: str, copies: int = 1) -> Tensor:
    whole = plan_of(plan)
    groups = groups_of(whole)
    members = _members(whole, groups)
    batch, _, heads, dim = x.shape
    if to_heads:
        rows = sum(map(layouts.rows, members))
        return x.new_empty((batch, rows, heads * copies // whole.inner, dim))
    rows = layouts.rows(members[groups.inner_rank])
    return x.new_empty((batch, rows, heads * whole.inner, dim))


@exchange.register_fake
def _(x: Tensor, to_heads: bool, plan: str, asked: str = "") -> Tensor:
    return _fake_exchange(x, to_heads, plan)


@exchange_results.register_fake
def _(
    out: Tensor, lse: Tensor, to_heads: bool, plan: str, asked: str = ""
) -> tuple[Tensor, Tensor]:
    out = _fake_exchange(out, to_heads, plan)
    return out, lse.new_empty((out.shape[0], out.shape[2], out.shape[1]))


@exchange_qkv.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, copies: int, plan: str, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    q, k, v = (_fake_exchange(x, True, plan, n) for x, n in ((q, 1), (k, copies), (v, copies)))
    return (q, k, v) if copies == 1 else (q, k.float(), v.float())


@exchange_qkv_back.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, copies: int, plan: str) -> tuple[Tensor, ...]:
    dq, dk, dv = (_fake_exchange(x, False, plan) for x in (dq, dk, dv))
    shape = (*dk.shape[:2], dk.shape[2] // copies)
    return dq, *(dq.new_empty((*shape, x.shape[3])) for x in (dk, dv))


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.to_heads, ctx.plan, *_ = inputs
    ctx.owner = plan_of(ctx.plan)  # whose groups live until backward


def _exchange_back(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    dx = call(exchange, dout.contiguous(), not ctx.to_heads, ctx.plan, "exchange")
    return dx, None, None, None


def _keep_results(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.to_heads, ctx.plan, *_ = inputs
    ctx.owner = plan_of(ctx.plan)


def _results_back(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    dout, dlse = call(
        exchange_results, dout.contiguous(), dlse.contiguous(), not ctx.to_heads, ctx.plan,
        "exchange_results",
    )  # fmt: skip
    return dout, dlse, None, None, None


def _keep_qkv(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.copies, ctx.plan = inputs[3:5]
    ctx.owner = plan_of(ctx.plan)


def _exchange_qkv_back(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    return *call(exchange_qkv_back, dq, dk, dv, ctx.copies, ctx.plan), *[None] * 6


differentiable(exchange, _exchange_back, _keep_exchange)
differentiable(exchange_results, _results_back, _keep_results)
differentiable(exchange_qkv, _exchange_qkv_back, _keep_qkv)
