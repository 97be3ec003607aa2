"""``cp_attention``: attention of tokens that several ranks share."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_cute import validate
from flash_cute.distributed import comm, cp_ops, layouts
from flash_cute.distributed.context import ContextParallel, context_of
from flash_cute.distributed.dtensor import from_local, to_local
from flash_cute.distributed.local import unrounded
from flash_cute.distributed.plan import Plan
from flash_cute.functional import flash_attn_func, flash_attn_varlen_func
from flash_cute.ops import autocast
from flash_cute.ops.typed import FwdCall
from flash_cute.rng import rng_of_call
from flash_cute.validate import options as validate_options


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
    """What :func:`flash_cute.flash_attn_func` would give of all ranks' tokens: this rank's rows.

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
        dropout_p: needs strategy "ulysses"; then what is dropped is the same for any number of
            ranks, and what ``flash_attn_func`` drops.
        causal, window_size: the mask; None is the plan's.
        alibi_slopes: fp32 (heads,), or of each batch entry, or document, (batch, heads).
        rng, generator: of dropout; the first rank's is everybody's. ``rng`` must be given inside of
            torch.compile.
        return_lse: also return the log-sum-exp, of a rank's rows.

    The other arguments are those of :func:`flash_cute.flash_attn_func`.

    Returns:
        out as q with v's head dim; with ``return_lse`` (out, lse), lse (batch, heads, rows) or
        (heads, rows).

    Raises:
        TypeError, ValueError, NotImplementedError: by name; and ValueError if ranks differ in
            shapes, dtypes, options or plans. All ranks raise the same message.

    Example::

        plan = cp.plan(cu_seqlens=[0, 700, 1000], causal=True)
        q, k, v = (cp.shard(x, plan, dim=0) for x in (q, k, v))      # (1000, heads, dim) before
        out = cp_attention(q, k, v, plan, window_size=(255, 0))
    """
    cp = context_of(plan)
    validate.whole_sequences()
    q, k, v, wrap = to_local(cp, q, k, v)
    q, k, v = autocast.cast(q, k, v)
    causal = plan.causal if causal is None else causal
    window_size = plan.window_size if window_size is None else window_size
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
        "sink": sink,
    }
    arguments = (plan, cp, q, k, v, options, generator, rng, return_lse)
    if torch.compiler.is_compiling():
        out, lse = _attend(*arguments, _asked(options))
    else:
        problem = None
        try:
            _check(plan, cp, q, k, v, options)
        except (TypeError, ValueError, NotImplementedError) as error:
            problem = error
        with cp.agreeing(_description(plan, q, k, v, options), problem):
            out, lse = _attend(*arguments, "")
    out = from_local(out, wrap)
    return (out, lse) if return_lse else out


def _attend(
    plan: Plan,
    cp: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    generator: torch.Generator | None,
    rng: Tensor | None,
    return_lse: bool,
    asked: str,
) -> tuple[Tensor, Tensor | None]:
    """out and, if it is asked for, lse. ``asked`` is what ops are to compare over ranks."""
    if plan.packed:
        q, k, v = q[None], k[None], v[None]
    lse: Tensor | None
    if plan.inner > 1 or plan.strategy == "ulysses":
        randomness = _randomness(cp, q, options["dropout_p"], generator, rng)
        out, lse = _over_heads(plan, cp, q, k, v, options, randomness, return_lse, asked)
    else:
        out, lse = _over_tokens(plan, q, k, v, options, asked)
    if plan.packed:
        out, lse = out[0], None if lse is None else lse[0]
    return out, lse


def _over_tokens(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], asked: str
) -> tuple[Tensor, Tensor]:
    """All_gather or ring, of all heads."""
    left, right = options["window_size"]
    right = 0 if options["causal"] else right
    scale = options["softmax_scale"]
    q, k, v = (x if validate.has_rows(x) else x.contiguous() for x in (q, k, v))
    return cp_ops.call(
        cp_ops.attention, q, k, v, options["alibi_slopes"], options["sink"],
        None if scale is None else float(scale), float(options["softcap"]), left, right,
        bool(options["deterministic"]), plan.key, asked,
    )  # fmt: skip


def _over_heads(
    plan: Plan,
    cp: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    rng: Tensor | None,
    return_lse: bool,
    asked: str,
) -> tuple[Tensor, Tensor | None]:
    """Ulysses, with a ring of tokens outside if there is one."""
    share, ranks = _share_of_heads(plan, cp), plan.inner
    copies = math.lcm(k.shape[2], ranks) // k.shape[2]  # each rank has whole groups then
    heads = q.shape[2] // ranks
    # Copies have gradients of their own: they are added up in fp32 where that can be had.
    spreads = copies > 1 and not options["dropout_p"] and unrounded(q, v)
    if copies > 1 and not spreads:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    if spreads:
        k = cp_ops.call(cp_ops.spread, k, copies, plan.key, asked)
        v = cp_ops.call(cp_ops.spread, v, copies, plan.key, "")
        q, asked = cp_ops.call(cp_ops.exchange, q, True, plan.key), ""
    elif ranks > 1:
        q, k, v = cp_ops.call(cp_ops.exchange_qkv, q, k, v, plan.key, asked)
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
    out = cp_ops.call(cp_ops.exchange, out, False, plan.key)
    if not return_lse:
        return out, None
    lse = cp_ops.call(cp_ops.exchange, lse.transpose(1, 2).unsqueeze(-1), False, plan.key)
    return out, lse.squeeze(-1).transpose(1, 2)


def _whole(
    plan: Plan, share: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any],
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
    offsets = torch.tensor(layouts.offsets(lengths), dtype=torch.int32, device=q.device)
    longest = max(lengths)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = flash_attn_varlen_func(
        q, k, v, offsets, offsets, longest, longest, **options, rng=rng, return_lse=True
    )
    return out.unflatten(0, (batch, seqlen)), lse.unflatten(1, (batch, seqlen)).transpose(0, 1)


def _share_of_heads(plan: Plan, cp: ContextParallel) -> int:
    return cp.rank % plan.inner


def _randomness(
    cp: ContextParallel,
    q: Tensor,
    dropout_p: float,
    generator: torch.Generator | None,
    rng: Tensor | None,
) -> Tensor | None:
    """The first rank's state."""
    if torch.compiler.is_compiling():
        if dropout_p and rng is None:
            raise NotImplementedError(
                "dropout_p is given without rng, which ranks cannot agree on inside of "
                "torch.compile: give rng, the same on every rank"
            )
        return rng
    rng = rng_of_call(q, dropout_p, generator, rng)
    if rng is not None and cp.size > 1:
        rng = rng.clone()
        comm.settle()
        dist.broadcast(rng, dist.get_global_rank(cp.group, 0), group=cp.group)
    return rng


def _check(
    plan: Plan, cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> None:
    """What this rank can tell by itself."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        validate.tensor(name, x)
        rank = 3 if plan.packed else 4
        layout = "(rows, heads, dim)" if plan.packed else "(batch, rows, heads, dim)"
        if x.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {layout} by the plan")
        rows, expected = x.shape[-3], plan.rows(cp.rank)
        if rows != expected:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, {rows} tokens; by the plan this rank has "
                f"{expected} of {plan.total}: cp.shard(x, plan)"
            )
    q4, k4, v4 = (x[None] if plan.packed else x for x in (q, k, v))
    rows_first = (x if x.stride(-1) == 1 else x.contiguous() for x in (q4, k4, v4))
    validate.dense(*rows_first)
    batch = len(plan.lengths) if plan.packed else len(q)
    call = FwdCall(
        q, k, v, options["softmax_scale"], options["causal"],
        *validate_options.sides(options["window_size"]), options["softcap"],
        options["alibi_slopes"], options["sink"], options["dropout_p"], None,
        options["deterministic"],
    )  # fmt: skip
    validate_options.check(call, batch)
    if q.is_cuda:
        validate.cuda(q, v, options["sink"])
    if options["dropout_p"] and plan.strategy != "ulysses" and plan.ranks > 1:
        raise NotImplementedError(
            f"dropout_p is {options['dropout_p']} and the plan's strategy {plan.strategy}: what is "
            "dropped would depend on the number of ranks; dropout needs strategy='ulysses'"
        )
    if q.shape[-2] % plan.inner:
        raise ValueError(
            f"q has {q.shape[-2]} heads, which {plan.inner} ranks share: they must divide them; "
            "strategies 'all_gather' and 'ring' take any number"
        )


def _asked(options: dict[str, Any]) -> str:
    """The options, as ops of a graph compare them."""
    named = ", ".join(
        f"{name} {'a tensor' if isinstance(x, Tensor) else x}" for name, x in options.items()
    )
    return f"cp_attention, {named}"


def _description(plan: Plan, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> str:
    """What must be equal on all ranks."""

    def kind(x: Any) -> str:
        if not isinstance(x, Tensor):
            return str(x)
        shape = list(x.shape)
        if x.dim() >= 3:
            shape[-3] = -1  # ranks may have different numbers of tokens
        grad = torch.is_grad_enabled() and x.requires_grad
        return f"{shape} {x.dtype} {x.device.type}" + " with grad" * grad

    tensors = ", ".join(f"{n} {kind(x)}" for n, x in (("q", q), ("k", k), ("v", v)))
    rest = ", ".join(f"{name} {kind(x)}" for name, x in options.items())
    return f"cp_attention of {tensors}, {rest}, plan {plan.digest}"
