"""The one way from every public attention function to its op: what a call asks for, as values, and
:func:`attend`, which validates them, runs one op and orders its results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import accept, check, ops, plan_log, validate
from flash_cute.packed import PackedAttention
from flash_cute.rng import rng_of_call
from flash_cute.validate import ops as validate_ops
from flash_cute.validate import options as validate_options

OUT_OF = {
    ops.fwd: torch.ops.flash_cute.fwd.out,
    ops.varlen_fwd: torch.ops.flash_cute.varlen_fwd.out,
}
Result = Any  # out, or the tuple that a call asks for
_NUMBERS = (int, float)


class Score(NamedTuple):
    """What happens to the scores q k^T before the softmax."""

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sink: Tensor | None


class Dropout(NamedTuple):
    """Which probabilities are dropped; at most one of generator and rng is given."""

    p: float
    generator: torch.Generator | None
    rng: Tensor | None


class Wanted(NamedTuple):
    """The results beside out."""

    lse: bool
    probs: bool
    rng: bool
    max_logits: bool


class Varlen(NamedTuple):
    """Sequences of different lengths, as the varlen ops take them after q, k and v."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    zero_tensors: bool = False
    block_table: Tensor | None = None


def needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call of these has a gradient."""
    return (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()


def is_plain(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    *switches: bool,
) -> bool:
    """Whether scores are scaled, and masked by ``causal`` at most, and every switch is off. False,
    too, where an argument is of a kind that validation has to look at, and in graphs."""
    return (
        not torch.compiler.is_compiling()  # numbers may be known to data alone
        and (softmax_scale is None or type(softmax_scale) is float)
        and type(causal) is bool
        and type(window_size) is tuple
        and type(softcap) in _NUMBERS
        and type(dropout_p) in _NUMBERS
        and softcap == dropout_p == 0
        and alibi_slopes is None
        and window_size == (-1, -1)
        and all(switch is False for switch in switches)
    )


def is_direct(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> bool:
    """Whether such a call may go straight to its op: plain tensors of one device, and nothing
    around the call that has to see it."""
    if not (type(q) is type(k) is type(v) is Tensor):  # fakes and other kinds are validated
        return False
    device = q.device
    for x in (k, v, *others):  # one on meta would have the op's fake run
        if x is not None and (type(x) is not Tensor or x.device != device):
            return False
    return (
        (q.is_cuda or q.is_cpu)
        and not torch.is_autocast_enabled(device.type)
        and not (check.is_on() or plan_log.is_on())
        and not ops.transformed()
        and not internals.in_context_parallel()
    )


def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    score: Score,
    dropout: Dropout,
    wanted: Wanted,
    deterministic: bool,
    packed: Tensor | None = None,
    out: Tensor | None = None,
) -> Result:
    """Attention of q, k and v whose shapes are valid; the rest is validated here.

    ``packed`` is the tensor that they are views of, ``out`` the one to fill.
    """
    q, k, v = qkv
    score = score._replace(window_size=accept.window(score.window_size))
    _validate(q, v, varlen, score, dropout, wanted, deterministic)
    grad = needs_grad(q, k, v)
    if score.sink is not None and score.sink.requires_grad:
        grad = torch.is_grad_enabled()
    if plan_log.is_on():
        plan_log.attention(
            q, k, v, varlen or (), grad, causal=score.causal, window_size=score.window_size,
            softmax_scale=score.softmax_scale or 1.0, softcap=score.softcap > 0,
            alibi=score.alibi_slopes is not None, dropout=dropout.p > 0,
            deterministic=deterministic,
        )  # fmt: skip
    rng = rng_of_call(q, *dropout)
    op = ops.fwd if varlen is None else ops.varlen_fwd
    args = (
        *(varlen or ()), score.softmax_scale, score.causal, *score.window_size, score.softcap,
        score.alibi_slopes, score.sink, dropout.p, rng, deterministic, wanted.probs,
        wanted.max_logits, ops.allow_tf32(q),
    )  # fmt: skip
    is_eager = not torch.compiler.is_compiling() and not ops.transformed()
    row_max = probs = None
    if out is not None:
        if grad or wanted.probs:
            raise ValueError(
                "out is given; it goes with tensors that require no grad, or torch.no_grad(), and "
                "without return_attn_probs"
            )
        softmax_lse, row_max = _into(out, op, qkv, args, wanted)
    elif not grad and is_eager:
        # Straight to the kernel: without gradients the Python autograd formula is only a detour.
        with internals.below_autograd():
            out, softmax_lse, row_max, probs = op(q, k, v, *args)
    elif packed is not None and packed.requires_grad and is_eager and not wanted.max_logits:
        separate_q = q if packed.shape[-3] == 2 else None
        out, softmax_lse, probs = PackedAttention.apply(packed, separate_q, score.sink, op, args)
    else:
        out, softmax_lse, row_max, probs = op(q, k, v, *args)
    results = [out]
    if wanted.lse or wanted.probs:
        results.append(softmax_lse)
    if wanted.probs:
        results.append(probs)
    if wanted.rng:
        results.append(rng)
    if row_max is not None:
        results.append(row_max.detach().amax((0, 2) if varlen is None else 1))
    return tuple(results) if len(results) > 1 else out


def _validate(
    q: Tensor,
    v: Tensor,
    varlen: Varlen | None,
    score: Score,
    dropout: Dropout,
    wanted: Wanted,
    deterministic: bool,
) -> None:
    validate.whole_sequences()
    validate.flag("return_attn_probs", wanted.probs)
    validate.flag("return_lse", wanted.lse)
    validate.flag("return_rng", wanted.rng)
    validate.flag("return_max_logits", wanted.max_logits)
    if varlen is not None:
        validate.flag("zero_tensors", varlen.zero_tensors)
    batch = q.shape[0] if varlen is None else varlen.cu_seqlens_q.shape[0] - 1
    softmax_scale, causal, window_size, softcap, alibi_slopes, sink = score
    validate_options.check(
        q, batch, dropout.p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, sink,
    )  # fmt: skip
    if q.is_cuda:
        validate.cuda(q, v, sink)


def _into(
    out: Tensor, op: Any, qkv: tuple[Tensor, Tensor, Tensor], args: tuple, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """Attention into ``out``, by the op's out overload; softmax_lse and row_max if wanted."""
    q, k, v = qkv
    validate_ops.buffer("out", out, (*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    validate.contiguous_last("out", out)
    if not torch.compiler.is_compiling():
        validate_ops.apart({"out": out}, {"q": q, "k": k, "v": v})
    *lead, rows, heads, _ = q.shape
    softmax_lse, row_max = (
        q.new_empty((*lead, heads, rows), dtype=validate_ops.statistic_dtype(q)) if asked else None
        for asked in (wanted.lse, wanted.max_logits)
    )
    OUT_OF[op](q, k, v, *args, out=out, softmax_lse=softmax_lse, row_max=row_max)
    return softmax_lse, row_max
