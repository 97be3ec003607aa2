"""The ops that communicate: opaque to torch.compile, which so traces fullgraph.

A plan goes in as text, and names the :class:`ContextParallel` whose groups are used.
``cp_attention`` is all_gather or ring, forward and backward; the ``cp_exchange`` ops are all-to-all
between shares of tokens and shares of heads (DeepSpeed-Ulysses, arXiv 2309.14509), whose gradients
are the way back. The first op of a graph, and each of backward, asks all ranks first whether they
are there, so that no message waits for a rank that does something else, nor meets another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.distributed import all_gather, comm, description, layouts, ring
from flash_cute.distributed.context import context_named, context_of
from flash_cute.distributed.groups import Groups, groups_of
from flash_cute.distributed.local import Saved, Score, statistic_dtype
from flash_cute.distributed.merge import sink_gradient
from flash_cute.distributed.plan import Plan, plan_of
from flash_cute.ops import autograd, switches

OPS = torch.ops.flash_cute

# By op: the Python function that it runs, and autograd's function of those that have a gradient.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
_FORMULAS: dict[Any, type[torch.autograd.Function]] = {}


def _op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes an op of a function."""

    def make(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(f"flash_cute::{name}", function, mutates_args=())
        _FUNCTIONS[op] = function
        return op

    return make


def _differentiable(op: Any, back: Callable[..., Any], keep: Callable[..., None]) -> None:
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
def _asking(
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
def _asking_backward(plan: Plan, op: str, *tensors: Tensor | None) -> Iterator[None]:
    """Whether all ranks run this part of backward. ``op`` "" is forward, which was asked before."""
    cp = context_of(plan) if op else None
    if cp is None or not cp.asks:
        yield
    else:
        with cp.agreeing(description.of_gradient(op, plan, *tensors)):
            yield


def _strategy(plan: Plan) -> Any:
    return all_gather if plan.strategy == "all_gather" or plan.outer == 1 else ring


@_op("cp_attention")
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
    score = Score(softmax_scale, softcap, alibi_slopes, deterministic)
    with _asking(whole, asked, (q, k, v), alibi_slopes=alibi_slopes, sink=sink):
        k, v = k.to(q.dtype), v.to(q.dtype)
        window = (window_left, window_right)
        out, lse = _strategy(whole).forward(
            whole, groups.outer_rank, groups.outer, (q, k, v), window, score, sink
        )
    return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=statistic_dtype(q))


@_op("cp_attention_backward")
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
    deterministic = switches.deterministic(deterministic)
    score = Score(softmax_scale, softcap, alibi_slopes, deterministic)
    saved = Saved(dout, dlse, out, lse)
    qkv = (q, k.to(q.dtype), v.to(q.dtype))
    with _asking_backward(whole, "attention" * (whole.outer > 1), dout, q, k, v):
        gradients = _strategy(whole).backward(
            whole, groups.outer_rank, groups.outer, qkv, saved, (window_left, window_right), score
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


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, slopes, sink, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv, dsink = call(
        attention_backward, dout, dlse, q, k, v, out, lse, slopes, sink, *ctx.options
    )
    return dq, dk, dv, None, None if sink is None else dsink.to(sink.dtype), *[None] * 7


_differentiable(attention, autograd.once_differentiable(_differentiate), _keep)


@_op("cp_exchange")
def exchange(x: Tensor, to_heads: bool, plan: str, asked: str = "") -> Tensor:
    """(batch, rows, heads, dim) of a rank's tokens to (batch, all rows, heads / ranks, dim) of its
    share of heads, over the ranks that share them; or the way back. ``asked``: of backward."""
    whole = plan_of(plan)
    with _asking_backward(whole, asked, x):
        return (_to_heads if to_heads else _to_tokens)((x,), whole, groups_of(whole))[0]


@_op("cp_exchange_results")
def exchange_results(
    out: Tensor, lse: Tensor, to_heads: bool, plan: str, asked: str = ""
) -> tuple[Tensor, Tensor]:
    """:func:`exchange` of out and of lse (batch, heads, rows): in one op, so that ranks of which
    some have a gradient of one of them alone send the same."""
    whole = plan_of(plan)
    lse = lse.transpose(1, 2).unsqueeze(-1)
    with _asking_backward(whole, asked, out, lse):
        out, lse = (
            (_to_heads if to_heads else _to_tokens)((x,), whole, groups_of(whole))[0]
            for x in (out, lse)
        )
    return out, lse.squeeze(-1).transpose(1, 2).contiguous()


@_op("cp_exchange_qkv")
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
    """:func:`exchange` to heads of all three in one message; ``asked`` as in :func:`attention`, for
    which all heads' slopes, sinks and the random state are here.

    With ``copies`` > 1 each head of k and v is copied as often, and both are given in fp32, so that
    autograd keeps the copies' gradients in fp32 until they are added up.
    """
    whole = plan_of(plan)
    with _asking(whole, asked, (q, k, v), alibi_slopes=alibi_slopes, sink=sink, rng=rng):
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
        q, k, v = _to_heads((q, k, v), whole, groups_of(whole))
    return (q, k, v) if copies == 1 else (q, k.float(), v.float())


@_op("cp_exchange_qkv_back")
def exchange_qkv_back(
    dq: Tensor, dk: Tensor, dv: Tensor, copies: int, plan: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The way back, of their gradients. Those of copies are added up, and rounded to dq's dtype
    once."""
    whole, groups = plan_of(plan), groups_of(plan_of(plan))
    with _asking_backward(whole, "exchange_qkv", dq, dk, dv):
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
    """Tensors (batch, rows, heads, dim) travel beside one another; what pads parts is not read."""
    members = _members(plan, groups)
    longest = max(map(layouts.rows, members))
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
    longest = max(map(layouts.rows, members))
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


def _exchange_back(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    dx = call(exchange, dout.contiguous(), not ctx.to_heads, ctx.plan, "exchange")
    return dx, None, None, None


def _keep_results(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.to_heads, ctx.plan, *_ = inputs


def _results_back(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    dout, dlse = call(
        exchange_results, dout.contiguous(), dlse.contiguous(), not ctx.to_heads, ctx.plan,
        "exchange_results",
    )  # fmt: skip
    return dout, dlse, None, None, None


def _keep_qkv(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.copies, ctx.plan = inputs[3:5]


def _exchange_qkv_back(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    return *call(exchange_qkv_back, dq, dk, dv, ctx.copies, ctx.plan), *[None] * 6


_differentiable(exchange, _exchange_back, _keep_exchange)
_differentiable(exchange_results, _results_back, _keep_results)
_differentiable(exchange_qkv, _exchange_qkv_back, _keep_qkv)


@_op("cp_gather")
def gather(x: Tensor, plan: str) -> Tensor:
    """(batch, rows, ..) of each rank to (batch, all rows, ..) in the order of the batch."""
    whole = plan_of(plan)
    rows = all_gather.to_rows(x, max(map(layouts.rows, whole.parts)))
    gathered, work = comm.all_gather(rows, groups_of(whole).whole)
    work.wait()
    place = whole.slots(whole.parts, x.device)
    gathered = gathered if place is None else gathered.index_select(0, place)
    return gathered.transpose(0, 1).clone()


@_op("cp_scatter_sum")
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
    with _asking_backward(whole, "gather", x):
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


def _sum_back(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
    return scatter_sum(dout, ctx.plan), None


gather.register_autograd(_sum_back, setup_context=_keep_plan)


@_op("cp_refuse")
def refuse(x: Tensor, d_model: int, context: str) -> Tensor:
    """Raises on all ranks, which ask for agreement, that a layer of this rank does not take x."""
    shape = tuple(x.shape)
    expected = f"(batch, seqlen, d_model = {d_model})"
    problem = ValueError(f"hidden_states has shape {shape}; expected {expected}")
    context_named(context).agree("none", problem)
    return torch.empty_like(x)


@refuse.register_fake
def _(x: Tensor, d_model: int, context: str) -> Tensor:
    return torch.empty_like(x)


def _no_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
    return dout, None, None


refuse.register_autograd(_no_gradient)
