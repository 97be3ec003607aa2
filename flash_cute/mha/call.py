"""Calls of the ops, and of their out overloads, for the functions of :mod:`flash_cute.mha`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import ops
from flash_cute.call import validate
from flash_cute.call.rng import rng_of_call
from flash_cute.call.sizes import batch_of, longest_keys, longest_queries
from flash_cute.call.validate import ops as validate_ops
from flash_cute.call.validate import options as validate_options
from flash_cute.call.validate.rng import check_generator
from flash_cute.ops.typed import BwdCall, FwdCall, VarlenBwdCall, VarlenFwdCall

_NAMES = validate_options.OF_OPS._replace(dropout_p="p_dropout", alibi_slopes="alibi_slopes_")

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Backward = tuple[Tensor, Tensor, Tensor, Tensor]


def unbounded(side: int) -> int:
    """A side of the window, with -1 (unbounded) for negative numbers."""
    return -1 if isinstance(side, int) and side < 0 else side


def validated(call: Any) -> Any:
    """The call, whose shapes are valid, after a check of its options."""
    validate_options.check(call, batch_of(call), _NAMES)
    if call.q.is_cuda:
        validate.cuda(call.q, call.v)
    return call


@torch.no_grad()
def forward(
    call: FwdCall | VarlenFwdCall, out_: Tensor | None, gen_: torch.Generator | None
) -> Forward:
    """Runs a forward call after its checks."""
    q, k, v = call.q, call.k, call.v
    validate.flag("return_softmax", call.return_softmax)
    if out_ is not None:
        _buffers({"out_": (out_, (*q.shape[:-1], v.shape[-1]))}, {"q": q, "k": k, "v": v})
    if gen_ is not None:
        _generator(gen_, q, call.dropout_p)
    rng = rng_of_call(q, call.dropout_p, gen_, None)
    call = call._replace(rng=rng, allow_tf32=ops.allow_tf32(q))
    op = ops.OP_OF[type(call)]
    if out_ is None:
        with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):  # as out overloads do
            out, softmax_lse, _, softmax = op(*call)
    else:
        out, (lse_shape, softmax_shape) = out_, _statistics(call)
        softmax_lse = q.new_empty(lse_shape, dtype=validate_ops.statistic_dtype(q))
        softmax = q.new_empty(softmax_shape) if call.return_softmax else None
        ops.OUT_OF[op](*call, out=out, softmax_lse=softmax_lse, softmax=softmax)
    state = q.new_zeros(2, dtype=torch.int64) if rng is None else rng
    seed, offset = state.unbind()
    return out, q, k, v, softmax_lse, seed, offset, q.new_empty(0) if softmax is None else softmax


def _statistics(call: FwdCall | VarlenFwdCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of softmax_lse and of the probabilities."""
    *lead, rows, heads, _ = call.q.shape
    return (*lead, heads, rows), (batch_of(call), heads, longest_queries(call), longest_keys(call))


@torch.no_grad()
def backward(
    call: BwdCall | VarlenBwdCall,
    given: dict[str, Tensor | None],
    philox: tuple[Tensor | None, Tensor | None],
) -> Backward:
    """Runs a backward call; ``given`` are its buffers by name, in the order of its results."""
    q, k, v, dout, out, softmax_lse = (
        call.q, call.k, call.v, call.dout, call.out, call.softmax_lse
    )  # fmt: skip
    validate_ops.forward_results(q, v, out, softmax_lse, dout, None)
    validate.contiguous_last("dout", dout)
    validate.contiguous_last("out", out)
    if not softmax_lse.is_contiguous():
        raise ValueError("softmax_lse is not contiguous; call softmax_lse.contiguous()")
    read = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": softmax_lse}
    shapes = {"dq_": q.shape, "dk_": k.shape, "dv_": v.shape}
    _buffers({x: (y, tuple(shapes[x])) for x, y in given.items() if y is not None}, read)
    rng = None if call.dropout_p == 0 else _state_of(q, *philox)
    call = call._replace(rng=rng, allow_tf32=ops.allow_tf32(q))
    op = ops.OP_OF[type(call)]
    if all(x is None for x in given.values()):
        dq, dk, dv, _, softmax_d, *_ = op(*call)
        return dq, dk, dv, softmax_d
    dq, dk, dv = (q.new_empty(shapes[x]) if y is None else y for x, y in given.items())
    softmax_d = torch.empty_like(softmax_lse, memory_format=torch.contiguous_format)
    ops.OUT_OF[op](*call, dq=dq, dk=dk, dv=dv, softmax_d=softmax_d)
    return dq, dk, dv, softmax_d


def _buffers(given: dict[str, tuple[Tensor, tuple[int, ...]]], read: dict[str, Tensor]) -> None:
    """Checks the shapes of tensors for results, and that they do not alias other tensors."""
    for name, (x, shape) in given.items():
        validate_ops.buffer(name, x, shape, read["q"].dtype, read["q"].device)
        validate.contiguous_last(name, x)
    if not torch.compiler.is_compiling():  # torch 2.10 cannot trace it; the op checks at run time
        validate_ops.check_no_aliasing({name: x for name, (x, _) in given.items()}, read)


def _generator(gen_: torch.Generator, q: Tensor, dropout_p: float) -> None:
    check_generator("gen_", gen_, q.device)
    if dropout_p != 0 and torch.compiler.is_compiling():
        raise NotImplementedError(
            "gen_ is given, which cannot be traced; leave it None, or call outside of the "
            "compiled function"
        )


def _state_of(q: Tensor, philox_seed: Tensor | None, philox_offset: Tensor | None) -> Tensor:
    """The dropout state from the seed and the offset that forward returned."""
    parts = []
    for name, x in (("philox_seed", philox_seed), ("philox_offset", philox_offset)):
        if x is None:
            raise ValueError(f"{name} is None; with dropout give what forward returned")
        validate.tensor(name, x)
        if x.dtype != torch.int64:
            raise TypeError(f"{name} has dtype {x.dtype}; expected torch.int64")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; they must agree")
        if x.numel() != 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected one element")
        parts.append(x.reshape(1))
    return torch.cat(parts)
