"""The ops that communicate: opaque to torch.compile, which so traces fullgraph.

A plan goes in as text, and names the :class:`ContextParallel` whose groups are used.
``cp_attention`` is all_gather or ring, forward and backward; ``cp_exchange`` is one all-to-all
between shares of tokens and shares of heads (DeepSpeed-Ulysses, arXiv 2309.14509), whose gradient
is the way back. ``cp_spread`` is the same of kv heads that several ranks need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute.distributed import all_gather, comm, layouts, ring
from flash_cute.distributed.context import context_named, context_of
from flash_cute.distributed.groups import Groups, groups_of
from flash_cute.distributed.local import Saved, Score, statistic_dtype
from flash_cute.distributed.merge import sink_gradient
from flash_cute.distributed.plan import Plan, plan_of, slots
from flash_cute.ops import switches

OPS = torch.ops.flash_cute


def _agree(plan: Plan, asked: str, *tensors: Tensor) -> None:
    """In a graph the first op asks all ranks what :func:`cp_attention` asks them outside of one."""
    if asked:
        shapes = ", ".join(f"[{len(x)}, -1, {x.shape[2]}, {x.shape[3]}] {x.dtype}" for x in tensors)
        context_of(plan).agree(f"{asked} of {shapes}, plan {plan.digest}, {plan!r}")


def _strategy(plan: Plan) -> Any:
    return all_gather if plan.strategy == "all_gather" or plan.outer == 1 else ring


@torch.library.custom_op("flash_cute::cp_attention", mutates_args=())
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

    k and v of :func:`spread` are fp32, and so are their gradients, with numbers of q's dtype. What
    is ``asked`` for, beside tensors and plan, must be equal on all ranks; "" is not compared.
    """
    whole = plan_of(plan)
    _agree(whole, asked, q, k, v)
    k, v = k.to(q.dtype), v.to(q.dtype)
    groups = groups_of(whole)
    score = Score(softmax_scale, softcap, alibi_slopes, deterministic)
    out, lse = _strategy(whole).forward(
        whole, groups.outer_rank, groups.outer, (q, k, v), (window_left, window_right), score, sink
    )
    return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=statistic_dtype(q))


@torch.library.custom_op("flash_cute::cp_attention_backward", mutates_args=())
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
    dq, dk, dv, dsink = attention_backward(
        dout, dlse, q, k, v, out, lse, slopes, sink, *ctx.options
    )
    return dq, dk, dv, None, None if sink is None else dsink.to(sink.dtype), *[None] * 7


attention.register_autograd(_differentiate, setup_context=_keep)


@torch.library.custom_op("flash_cute::cp_exchange", mutates_args=())
def exchange(x: Tensor, to_heads: bool, plan: str, asked: str = "") -> Tensor:
    """(batch, rows, heads, dim) of a rank's tokens to (batch, all rows, heads / ranks, dim) of its
    share of heads, over the ranks that share them; or the way back. ``asked`` as in
    :func:`attention`."""
    whole = plan_of(plan)
    _agree(whole, asked, x)
    groups = groups_of(whole)
    return (_to_heads if to_heads else _to_tokens)(x, whole, groups)


def _members(plan: Plan, groups: Groups) -> tuple[layouts.Runs, ...]:
    first = groups.outer_rank * plan.inner
    return plan.parts[first : first + plan.inner]


def _to_heads(x: Tensor, plan: Plan, groups: Groups) -> Tensor:
    members = _members(plan, groups)
    longest = max(map(layouts.rows, members))
    by_rank = x.unflatten(2, (plan.inner, -1)).movedim(2, 0)  # (ranks, batch, rows, heads, dim)
    send = x.new_zeros((plan.inner, longest, len(x), x.shape[2] // plan.inner, x.shape[3]))
    send[:, : x.shape[1]] = by_rank.transpose(1, 2)
    received, work = comm.all_to_all(send.flatten(0, 1), groups.inner)
    work.wait()
    place = slots(members, plan.lengths, x.device)
    received = received if place is None else received.index_select(0, place)
    return received.transpose(0, 1).contiguous()


def _to_tokens(x: Tensor, plan: Plan, groups: Groups) -> Tensor:
    members = _members(plan, groups)
    longest = max(map(layouts.rows, members))
    rows = x.transpose(0, 1)
    place = slots(members, plan.lengths, x.device)
    send = rows.contiguous()
    if place is not None:
        send = x.new_zeros((plan.inner * longest, *rows.shape[1:])).index_copy_(0, place, rows)
    received, work = comm.all_to_all(send, groups.inner)
    work.wait()
    mine = layouts.rows(members[groups.inner_rank])
    by_rank = received.unflatten(0, (plan.inner, longest))[:, :mine]  # (ranks, rows, batch, ..)
    return by_rank.movedim(0, 2).flatten(2, 3).transpose(0, 1).contiguous()


@exchange.register_fake
def _(x: Tensor, to_heads: bool, plan: str, asked: str = "") -> Tensor:
    whole = plan_of(plan)
    groups = groups_of(whole)
    members = _members(whole, groups)
    batch, _, heads, dim = x.shape
    if to_heads:
        rows = sum(map(layouts.rows, members))
        return x.new_empty((batch, rows, heads // whole.inner, dim))
    rows = layouts.rows(members[groups.inner_rank])
    return x.new_empty((batch, rows, heads * whole.inner, dim))


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.to_heads, ctx.plan, _ = inputs


def _exchange_back(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
    return exchange(dout.contiguous(), not ctx.to_heads, ctx.plan), None, None, None


exchange.register_autograd(_exchange_back, setup_context=_keep_exchange)


@torch.library.custom_op("flash_cute::cp_spread", mutates_args=())
def spread(x: Tensor, copies: int, plan: str) -> Tensor:
    """:func:`exchange` to heads of k or v, each of whose heads ``copies`` shares need; in fp32, so
    that autograd keeps the copies' gradients in fp32 until they are added up."""
    whole = plan_of(plan)
    x = x.repeat_interleave(copies, 2)
    return _to_heads(x, whole, groups_of(whole)).float()


@torch.library.custom_op("flash_cute::cp_spread_backward", mutates_args=())
def spread_backward(dx: Tensor, copies: int, dtype: torch.dtype, plan: str) -> Tensor:
    """The gradient of :func:`spread`, rounded to ``dtype`` once."""
    whole = plan_of(plan)
    of_copies = _to_tokens(dx, whole, groups_of(whole))
    return of_copies.unflatten(2, (-1, copies)).sum(3).to(dtype)


@spread.register_fake
def _(x: Tensor, copies: int, plan: str) -> Tensor:
    whole = plan_of(plan)
    rows = sum(map(layouts.rows, _members(whole, groups_of(whole))))
    heads = x.shape[2] * copies // whole.inner
    return x.new_empty((len(x), rows, heads, x.shape[3]), dtype=torch.float32)


@spread_backward.register_fake
def _(dx: Tensor, copies: int, dtype: torch.dtype, plan: str) -> Tensor:
    whole = plan_of(plan)
    groups = groups_of(whole)
    rows = layouts.rows(_members(whole, groups)[groups.inner_rank])
    heads = dx.shape[2] * whole.inner // copies
    return dx.new_empty((len(dx), rows, heads, dx.shape[3]), dtype=dtype)


def _keep_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.copies, ctx.plan = inputs
    ctx.dtype = x.dtype


def _spread_back(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
    return spread_backward(dx.contiguous(), ctx.copies, ctx.dtype, ctx.plan), None, None


spread.register_autograd(_spread_back, setup_context=_keep_spread)


@torch.library.custom_op("flash_cute::cp_gather", mutates_args=())
def gather(x: Tensor, plan: str, asked: str = "") -> Tensor:
    """(batch, rows, ..) of each rank to (batch, all rows, ..) in the order of the batch; ``asked``
    as in :func:`attention`."""
    whole = plan_of(plan)
    _agree(whole, asked, *[x] * (x.dim() == 4))
    rows = all_gather.to_rows(x, max(map(layouts.rows, whole.parts)))
    gathered, work = comm.all_gather(rows, groups_of(whole).whole)
    work.wait()
    place = slots(whole.parts, whole.lengths, x.device)
    gathered = gathered if place is None else gathered.index_select(0, place)
    return gathered.transpose(0, 1).clone()


@torch.library.custom_op("flash_cute::cp_scatter_sum", mutates_args=())
def scatter_sum(x: Tensor, plan: str) -> Tensor:
    """This rank's rows (batch, rows, ..) of the sum over ranks of x (batch, all rows, ..)."""
    whole = plan_of(plan)
    groups = groups_of(whole)
    total = x.to(statistic_dtype(x)).transpose(0, 1).contiguous()
    place = slots(whole.parts, whole.lengths, x.device)
    if place is not None:
        longest = max(map(layouts.rows, whole.parts))
        padded = total.new_zeros((whole.ranks * longest, *total.shape[1:]))
        total = padded.index_copy_(0, place, total)
    mine, work = comm.reduce_scatter(total, groups.whole)
    work.wait()
    return mine[: whole.rows(groups.rank)].transpose(0, 1).to(x.dtype, copy=True)


@gather.register_fake
def _(x: Tensor, plan: str, asked: str = "") -> Tensor:
    return x.new_empty((len(x), plan_of(plan).total, *x.shape[2:]))


@scatter_sum.register_fake
def _(x: Tensor, plan: str) -> Tensor:
    whole = plan_of(plan)
    return x.new_empty((len(x), whole.rows(groups_of(whole).rank), *x.shape[2:]))


def _keep_plan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.plan, _ = inputs


def _sum_back(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
    return scatter_sum(dout, ctx.plan), None, None


gather.register_autograd(_sum_back, setup_context=_keep_plan)


@torch.library.custom_op("flash_cute::cp_refuse", mutates_args=())
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
