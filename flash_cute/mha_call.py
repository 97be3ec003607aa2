"""The one way from the functions of :mod:`flash_cute.mha` to the ops and their out overloads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_cute import ops, validate
from flash_cute.rng import check_generator, rng_of_call
from flash_cute.validate import ops as validate_ops
from flash_cute.validate import options as validate_options

_NAMES = validate_options.OF_OPS._replace(dropout_p="p_dropout", alibi_slopes="alibi_slopes_")

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Backward = tuple[Tensor, Tensor, Tensor, Tensor]


class Score(NamedTuple):
    """What turns q k^T into weights, under the ops' names."""

    alibi_slopes: Tensor | None
    dropout_p: float
    softmax_scale: float | None
    is_causal: bool
    left: int
    right: int
    softcap: float

    def window(self) -> tuple[int, int]:
        left, right = (-1 if isinstance(x, int) and x < 0 else x for x in (self.left, self.right))
        return left, right

    def check(self, q: Tensor, v: Tensor, batch: int, deterministic: bool = False) -> None:
        validate_options.check(
            q, batch, self.dropout_p, self.softmax_scale, self.is_causal, self.window(),
            self.softcap, self.alibi_slopes, deterministic, None, _NAMES,
        )  # fmt: skip
        if q.is_cuda:
            validate.cuda(q, v)

    def arguments(self, rng: Tensor | None) -> tuple[Any, ...]:
        """As ops take them; there is no sink."""
        return (
            self.softmax_scale, self.is_causal, *self.window(), self.softcap, self.alibi_slopes,
            None, self.dropout_p, rng,
        )  # fmt: skip


@torch.no_grad()
def forward(
    op: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    sequences: tuple[Any, ...],
    score: Score,
    out_: Tensor | None,
    return_softmax: bool,
    gen_: torch.Generator | None,
    lse_shape: tuple[int, ...],
    softmax_shape: tuple[int, ...],
) -> Forward:
    """What both functions of forward do after their checks; ``op`` is a packet with overloads."""
    q, k, v = qkv
    validate.flag("return_softmax", return_softmax)
    if out_ is not None:
        _buffers({"out_": (out_, (*q.shape[:-1], v.shape[-1]))}, {"q": q, "k": k, "v": v})
    if gen_ is not None:
        _generator(gen_, q, score.dropout_p)
    rng = rng_of_call(q, score.dropout_p, gen_, None)
    args = (
        *qkv, *sequences, *score.arguments(rng), False, return_softmax, False, ops.allow_tf32(q),
    )  # fmt: skip
    if out_ is None:
        with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):  # as with buffers
            out, softmax_lse, _, softmax = op.default(*args)
    else:
        out = out_
        softmax_lse = q.new_empty(lse_shape, dtype=validate_ops.statistic_dtype(q))
        softmax = q.new_empty(softmax_shape) if return_softmax else None
        op.out(*args, out=out, softmax_lse=softmax_lse, softmax=softmax)
    state = q.new_zeros(2, dtype=torch.int64) if rng is None else rng
    seed, offset = state.unbind()
    return out, q, k, v, softmax_lse, seed, offset, q.new_empty(0) if softmax is None else softmax


@torch.no_grad()
def backward(
    op: Any,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    sequences: tuple[Any, ...],
    score: Score,
    given: dict[str, Tensor | None],
    deterministic: bool,
    philox: tuple[Tensor | None, Tensor | None],
) -> Backward:
    """The same of backward; ``given`` are its buffers by name, in the order of its results."""
    dout, q, k, v, out, softmax_lse = saved
    validate_ops.of_forward(q, v, out, softmax_lse, dout, None)
    validate.contiguous_last("dout", dout)
    validate.contiguous_last("out", out)
    if not softmax_lse.is_contiguous():
        raise ValueError("softmax_lse is not contiguous; call softmax_lse.contiguous()")
    read = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": softmax_lse}
    shapes = {"dq_": q.shape, "dk_": k.shape, "dv_": v.shape}
    _buffers({x: (y, tuple(shapes[x])) for x, y in given.items() if y is not None}, read)
    rng = None if score.dropout_p == 0 else _state_of(q, *philox)
    args = (
        *saved, *sequences, None, *score.arguments(rng), deterministic, ops.allow_tf32(q),
    )  # fmt: skip
    if all(x is None for x in given.values()):
        dq, dk, dv, _, softmax_d = op.default(*args)
        return dq, dk, dv, softmax_d
    dq, dk, dv = (q.new_empty(shapes[x]) if y is None else y for x, y in given.items())
    softmax_d = torch.empty_like(saved[5], memory_format=torch.contiguous_format)
    op.out(*args, dq=dq, dk=dk, dv=dv, softmax_d=softmax_d)
    return dq, dk, dv, softmax_d


def _buffers(given: dict[str, tuple[Tensor, tuple[int, ...]]], read: dict[str, Tensor]) -> None:
    """Tensors for results, with the shapes that they must have, fit, and lie apart from others."""
    for name, (x, shape) in given.items():
        validate_ops.buffer(name, x, shape, read["q"].dtype, read["q"].device)
        validate.contiguous_last(name, x)
    if not torch.compiler.is_compiling():  # torch 2.10 cannot trace it, and the op asks as it runs
        validate_ops.apart({name: x for name, (x, _) in given.items()}, read)


def _generator(gen_: torch.Generator, q: Tensor, dropout_p: float) -> None:
    check_generator("gen_", gen_, q.device)
    if dropout_p != 0 and torch.compiler.is_compiling():
        raise NotImplementedError(
            "gen_ is given, which cannot be traced; leave it None, or call outside of the "
            "compiled function"
        )


def _state_of(q: Tensor, philox_seed: Tensor | None, philox_offset: Tensor | None) -> Tensor:
    """The state that forward returned in two parts."""
    parts = []
    for name, x in (("philox_seed", philox_seed), ("philox_offset", philox_offset)):
        if x is None:
            raise ValueError(f"{name} is None; with dropout it is what forward returned")
        validate.tensor(name, x)
        if x.dtype != torch.int64:
            raise TypeError(f"{name} has dtype {x.dtype}; expected torch.int64")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; they must agree")
        if x.numel() != 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected one element")
        parts.append(x.reshape(1))
    return torch.cat(parts)
