"""Sparse calls on a GPU that none of its kernels can do: by torch's own products over gathered
tiles, as on the CPU. What lists do not name is not computed here either."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_cute import kernels, ops
from flash_cute.cpu import sparse
from flash_cute.native import limits
from flash_cute.ops.autograd import formula_of, inputs_of, once_differentiable
from flash_cute.ops.typed import FwdCall, VarlenFwdCall

Results = tuple[Tensor, Tensor, Tensor | None, None]


def _formula(op: Any, forward: Any, backward: Any) -> Any:
    """The op's formula, by the CPU's functions for its calls, and for those of its gradient."""

    def compute(call: Any) -> Any:
        with torch.autocast(call.q.device.type, enabled=False):
            return tuple(forward(call, call.tile_lists, call.tile_bits))

    @once_differentiable
    def differentiate(call: Any) -> Any:
        with torch.autocast(call.q.device.type, enabled=False):
            return backward(call, call.tile_lists, call.tile_bits)

    return formula_of(op, compute, differentiate)


_FORMULAS = {
    ops.fwd: _formula(ops.fwd, sparse.fwd, sparse.bwd),
    ops.varlen_fwd: _formula(ops.varlen_fwd, sparse.varlen_fwd, sparse.varlen_bwd),
}


def attend(call: FwdCall | VarlenFwdCall) -> Results:
    """The results of the call's op, with their gradients."""
    op = ops.OP_OF[type(call)]
    results: Results = _FORMULAS[op].apply(*inputs_of(op)(call))
    return results


def stored(x: Tensor) -> Tensor:
    """``x``, or on a GPU its copy if it is expanded: Hopper's kernels read no row twice."""
    return x.contiguous() if x.is_cuda and 0 in x.stride() else x


def is_needed(call: FwdCall | VarlenFwdCall, grad: bool) -> bool:
    """Whether no kernel of the GPU at hand does the sparse call, or its backward; a warning says
    so once. A thread that :func:`flash_cute.kernels.only` limits gets the refusal instead."""
    is_empty = call.q.numel() == 0 or call.k.numel() == 0  # as without lists
    if not call.q.is_cuda or is_empty or limits.current():
        return False
    group_shares = call.tile_lists is None or call.tile_lists.shape[1] in (1, call.k.shape[-2])
    if grad and not group_shares:
        return _say("lists of each query head have no backward kernel")
    for op in ("fwd", "bwd") if grad else ("fwd",):
        why = _why_not(kernels.Problem.of_call(call, op), call.q.device.index)
        if why:
            return _say(why)
    return False


@lru_cache(maxsize=256)
def _why_not(problem: kernels.Problem, gpu: int) -> str:
    found = kernels.supports(problem, gpu)
    if found:
        return ""
    reasons = (line.partition(": ") for line in found.reasons)
    of_lists = [reason for kernel, _, reason in reasons if kernel.endswith("_list")]
    return min(of_lists, key=len, default="the library has no kernel over lists of tiles")


@lru_cache(maxsize=64)
def _say(why: str) -> bool:
    warnings.warn(
        "flash_cute: no kernel does a sparse call, which torch's products over gathered tiles "
        f"compute instead, more slowly: {why}. This is said once",
        stacklevel=6,
    )
    return True
