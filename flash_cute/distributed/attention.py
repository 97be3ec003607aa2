"""``cp_attention``: attention of tokens that several ranks share."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call import validate
from flash_cute.call.rng import rng_of_call
from flash_cute.call.validate import options as validate_options
from flash_cute.distributed import comm, cp_ops, description, exchange, layouts
from flash_cute.distributed.communicating import call
from flash_cute.distributed.context import ContextParallel, check_plan, context_of
from flash_cute.distributed.dtensor import Wrap, from_local, to_local
from flash_cute.distributed.layouts import kept
from flash_cute.distributed.local import unrounded
from flash_cute.distributed.plan import Plan, plan_of
from flash_cute.distributed.strategies import STRATEGIES
from flash_cute.functional import flash_attn_func, flash_attn_varlen_func
from flash_cute.ops import autocast
from flash_cute.ops.autograd import refuse_tangents
from flash_cute.ops.typed import FwdCall

QKV = tuple[Tensor, Tensor, Tensor]
Random = tuple[torch.Generator | None, Tensor | None]


def cp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool | None = None,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    sink: Tensor | None = None,
    generator: torch.Generator | None = None,
    rng: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """This rank's rows of :func:`flash_cute.flash_attn_func` over the tokens of all ranks.

    Every rank calls it, with its own tokens. It is exact: masks, ALiBi and documents go by the
    positions of tokens in the whole batch, wherever these lie. Gradients are exact, too; those of
    ``sink`` are this rank's part: the sum over ranks is the gradient, as it is of all parameters.

    Args:
        q: (batch, rows, heads, dim), or (rows, heads, dim) of packed documents: this rank's tokens
            in the plan's order (:meth:`ContextParallel.shard`). DTensors that are sharded along
            tokens are taken as well, and give one.
        k: as q, with heads_k heads, which divide heads.
        v: as k, with its own head dim.
        plan: of this batch (:meth:`ContextParallel.plan`).
        dropout_p: over several ranks it needs strategy "ulysses"; what is dropped is the same for
            any number of ranks, and what ``flash_attn_func`` drops.
        causal, window_size: the mask; None is the plan's.
        alibi_slopes: fp32 (heads,), or of each batch entry, or document, (batch, heads). All ranks
            give the same values, and those of ``sink``.
        rng, generator: of dropout; the first rank's is everybody's. ``rng`` must be given inside of
            torch.compile.
        return_lse: also return the log-sum-exp, of a rank's rows; on all ranks, or on none.

    The other arguments are those of :func:`flash_cute.flash_attn_func`.

    Returns:
        out as q with v's head dim; with ``return_lse`` (out, lse), lse (batch, heads, rows) or
        (heads, rows).

    Raises:
        TypeError, ValueError, NotImplementedError: by name; and ValueError if ranks differ in
            shapes, dtypes, options, plans, values of slopes and sinks, or tensors that want
            gradients. All ranks raise the same message. The host does not wait for values on a
            GPU: a later call, or backward, raises the error.
        RuntimeError: of a call or of backward that not all ranks make, within the group's timeout.

    Example::

        import torch
        from flash_cute.distributed import ContextParallel, cp_attention

        cp = ContextParallel()  # once, under torchrun; without it, of one rank
        plan = cp.plan(cu_seqlens=[0, 700, 1000], causal=True)
        q, k, v = torch.randn(3, 1000, 8, 64).unbind()
        q, k, v = (cp.shard(x, plan, dim=0) for x in (q, k, v))
        out = cp_attention(q, k, v, plan, window_size=(255, 0))
    """
    here = _constant(plan.key) if torch.compiler.is_compiling() else _on_rank(check_plan(plan))
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": plan.causal if causal is None else causal,
        "window_size": plan.window_size if window_size is None else window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
        "sink": sink,
    }
    random = (generator, rng)
    cp, qkv, wrap = here.cp, (q, k, v), None
    if torch.compiler.is_compiling():
        qkv, wrap = _local(cp, q, k, v)
        asked = description.of_options(options, return_lse, qkv)  # makes numbers constants
        if here.asks:
            wrong = cp_ops.problem_in_graph(
                lambda: _check(here, qkv, options, random, return_lse), *qkv, *options.values(), rng
            )
            if wrong is not None:
                return _refused(here, qkv, return_lse, wrong)
        else:
            _check(here, qkv, options, random, return_lse)
        out, lse = _attend(here, qkv, options, random, return_lse, asked)
    else:
        problem, what = None, ""
        same = {"alibi_slopes": alibi_slopes, "sink": sink}
        try:
            qkv, wrap = _local(cp, q, k, v)
            _check(here, qkv, options, random, return_lse)
            if cp.asks:
                asked = description.of_options(options, return_lse, qkv)
                what = description.of_attention(asked, plan, qkv, same)
        except Exception as error:  # whatever it is, the other ranks must not wait
            problem = error
        with cp.agreeing(what, problem):
            out, lse = _attend(here, qkv, options, random, return_lse, "")
            cp.compare(same)
    out = from_local(out, wrap)
    return (out, lse) if return_lse else out


def _refused(
    here: PlanOnRank, qkv: QKV, return_lse: bool, problem: tuple[str, str]
) -> Tensor | tuple[Tensor, Tensor]:
    """The results in a graph of a call that is refused: all ranks raise when the graph runs."""
    q, _, v = qkv
    out = cp_ops.refuse(q, v.shape[-1], *problem, here.context)
    return (out, out.select(-1, 0).float().transpose(-1, -2)) if return_lse else out


class PlanOnRank:
    """The facts of a plan and of this rank that a call needs.

    Attributes:
        cp, rank, rows: the ContextParallel, this rank, and the number of its tokens.
        asks, context: whether calls are compared, and the name by which ops find the ranks.
        total, key, packed, ranks, inner, outer, strategy, lengths: the plan's.
    """

    def __init__(self, plan: Plan) -> None:
        self.cp = context_of(plan)
        self.rank = self.cp.rank
        self.asks, self.context = self.cp.asks, plan.context
        self.rows = plan.rows(self.rank)
        self.total, self.key, self.packed = plan.total, plan.key, plan.packed
        self.lengths, self.ranks = plan.lengths, plan.ranks
        self.inner, self.outer, self.strategy = plan.inner, plan.outer, plan.strategy


_on_rank = kept(PlanOnRank)


@internals.constant_in_graphs
def _constant(key: str) -> PlanOnRank:
    """The facts as constants of a graph, not inputs: each plan has a graph of its own, by its
    key."""
    return _on_rank(plan_of(key))


def _local(cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> tuple[QKV, Wrap]:
    """This rank's q, k and v in the call's dtype, and how to wrap the result."""
    *qkv, wrap = to_local(cp, q, k, v)
    q, k, v = autocast.cast(*qkv)
    return (q, k, v), wrap


def _attend(
    plan: PlanOnRank,
    qkv: QKV,
    options: dict[str, Any],
    random: Random,
    return_lse: bool,
    asked: str,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse); lse may be None without ``return_lse``. ``asked`` is a text that the ops compare
    between ranks."""
    q, k, v = (x[None] for x in qkv) if plan.packed else qkv
    lse: Tensor | None
    if plan.inner > 1 or plan.ranks == 1:
        rng = _randomness(plan.cp, q, options["dropout_p"], random)
        out, lse = _over_heads(plan, q, k, v, options, rng, return_lse, asked)
    else:
        out, lse = _over_tokens(plan, q, k, v, options, asked)
    if plan.packed:
        out, lse = out[0], None if lse is None else lse[0]
    return out, lse


def _over_tokens(
    plan: PlanOnRank, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], asked: str
) -> tuple[Tensor, Tensor]:
    """All_gather or ring, of all heads."""
    q, k, v = (x if validate.has_rows(x) else x.contiguous() for x in (q, k, v))
    given = _call_of(q, k, v, options)
    if given.is_causal:
        given = given._replace(is_causal=False, window_size_right=0)
    return call(cp_ops.attention, plan.key, asked, *given)


def _call_of(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> FwdCall:
    return FwdCall(
        q, k, v, options["softmax_scale"], options["causal"],
        *validate_options.sides(options["window_size"]), options["softcap"],
        options["alibi_slopes"], options["sink"], options["dropout_p"], None,
        options["deterministic"],
    )  # fmt: skip


def _over_heads(
    plan: PlanOnRank,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    rng: Tensor | None,
    return_lse: bool,
    asked: str,
) -> tuple[Tensor, Tensor | None]:
    """Ulysses, with a ring of tokens outside if there is one."""
    share, ranks = plan.rank % plan.inner, plan.inner
    copies = math.lcm(k.shape[2], ranks) // k.shape[2]  # each rank has whole groups then
    heads = q.shape[2] // ranks
    # Copies have gradients of their own: they are added up in fp32 where that can be had.
    spreads = copies > 1 and not options["dropout_p"] and unrounded(q, v)
    if copies > 1 and not spreads:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    if ranks > 1:
        same = [None if x is None else x.detach() for x in (*_per_head(options), rng)]
        q, k, v = call(
            exchange.exchange_qkv, q, k, v, copies if spreads else 1, plan.key, asked,
            *(same if asked else ()),
        )  # fmt: skip
        asked = ""
    mine = dict(options)
    for name in ("sink", "alibi_slopes"):
        if mine[name] is not None:
            mine[name] = mine[name].narrow(-1, share * heads, heads).contiguous()
    if plan.outer > 1 or spreads:
        out, lse = _over_tokens(plan, q, k, v, mine, asked)
    else:
        out, lse = _whole(plan, share, q, k, v, mine, rng)
    if ranks == 1:
        return out, lse
    if not return_lse:
        return call(exchange.exchange, out, False, plan.key), None
    return call(exchange.exchange_results, out, lse, False, plan.key)


def _per_head(options: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    return options["alibi_slopes"], options["sink"]


def _whole(
    plan: PlanOnRank, share: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any],
    rng: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of whole documents, of this rank's heads.

    Dropout counts batch * heads + head. So that it counts as for all heads, there are as many
    sequences for each document as ranks, of which only this rank's have tokens.
    """
    is_dropping = options["dropout_p"] > 0
    if not plan.packed and not is_dropping:
        return flash_attn_func(q, k, v, **options, return_lse=True)
    batch, seqlen = q.shape[:2]
    lengths = plan.lengths if plan.packed else plan.lengths * batch
    if is_dropping:
        ranks = plan.inner
        lengths = tuple(n if rank == share else 0 for n in lengths for rank in range(ranks))
        slopes = options["alibi_slopes"]
        if slopes is not None and slopes.dim() == 2:
            options = options | {"alibi_slopes": slopes.repeat_interleave(ranks, 0)}
    offsets = torch.tensor(layouts.offsets(lengths), dtype=torch.int32, device="cpu")
    offsets = offsets.to(q.device, non_blocking=True)  # which waits for no kernel
    longest = max(lengths)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = flash_attn_varlen_func(
        q, k, v, offsets, offsets, longest, longest, **options, rng=rng, return_lse=True
    )
    return out.unflatten(0, (batch, seqlen)), lse.unflatten(1, (batch, seqlen)).transpose(0, 1)


def _randomness(cp: ContextParallel, q: Tensor, dropout_p: float, random: Random) -> Tensor | None:
    """The first rank's state."""
    generator, rng = random
    if torch.compiler.is_compiling():
        return rng if dropout_p else None
    rng = rng_of_call(q, dropout_p, generator, rng)
    if rng is not None and cp.size > 1:
        rng = rng.clone()
        comm.finish_pending_checks()
        dist.broadcast(rng, dist.get_global_rank(cp.group, 0), group=cp.group)
    return rng


def _check(
    plan: PlanOnRank, qkv: QKV, options: dict[str, Any], random: Random, return_lse: Any
) -> None:
    """Checks a call as far as one rank can."""
    validate.whole_sequences()
    q, k, v = qkv
    for name, x in (("q", q), ("k", k), ("v", v)):
        validate.tensor(name, x)
        rank = 3 if plan.packed else 4
        layout = "(rows, heads, dim)" if plan.packed else "(batch, rows, heads, dim)"
        if x.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {layout} by the plan")
        if not validate.allowed(x.shape[-3] == plan.rows):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, {x.shape[-3]} tokens; by the plan this rank "
                f"has {plan.rows} of {plan.total}: cp.shard(x, plan)"
            )
    q4, k4, v4 = (x[None] if plan.packed else x for x in (q, k, v))
    rows_first = (x if x.stride(-1) == 1 else x.contiguous() for x in (q4, k4, v4))
    validate.dense(*rows_first)
    batch = len(plan.lengths) if plan.packed else len(q)
    validate_options.check(_call_of(q, k, v, options), batch)
    validate.flag("return_lse", return_lse)
    rng_of_call(q, 0.0, *random)  # checks them
    if internals.in_forward_mode():
        refuse_tangents((q, k, v, *(x for x in _per_head(options) if x is not None)))
    if q.is_cuda:
        validate.cuda(q, v, options["sink"])
    if options["dropout_p"] and plan.ranks > 1 and not STRATEGIES[plan.strategy].takes_dropout:
        raise NotImplementedError(
            f"dropout_p is {options['dropout_p']} and the plan's strategy {plan.strategy}: what is "
            "dropped would depend on the number of ranks; dropout needs strategy='ulysses'"
        )
    is_drawn = options["dropout_p"] and random[1] is None
    if is_drawn and plan.ranks > 1 and torch.compiler.is_compiling():
        raise NotImplementedError(
            "dropout_p is given without rng, which ranks cannot agree on inside of "
            "torch.compile: give rng, the same on every rank"
        )
    if q.shape[-2] % plan.inner:
        raise ValueError(
            f"q has {q.shape[-2]} heads, which {plan.inner} ranks share: they must divide them; "
            "strategies 'all_gather' and 'ring' take any number"
        )
