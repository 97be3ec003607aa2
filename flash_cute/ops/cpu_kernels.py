"""The ops on the CPU: they check their arguments, as C++ does for CUDA, then compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flash_cute import _torch_internals as internals
from flash_cute import cpu
from flash_cute.cpu.forward import fwd_without_lse
from flash_cute.ops.schema import DEFAULTS, OPS, Results, attend_kvcache, bind, fwd_kvcache
from flash_cute.validate import kvcache as validate_kvcache
from flash_cute.validate import ops as validate_ops


def register(library: torch.library.Library) -> None:
    internals.settle_vector_math()
    functions: dict[str, Callable[..., Results]] = {
        "fwd": cpu.fwd,
        "bwd": cpu.bwd,
        "varlen_fwd": cpu.varlen_fwd,
        "varlen_bwd": cpu.varlen_bwd,
    }
    for name, function in functions.items():
        op = getattr(OPS, name).default
        kernel = _checked(op, function)
        library.impl(name, kernel, "CPU")
        out_alone = _checked(op, fwd_without_lse) if name == "fwd" else kernel
        library.impl(f"{name}.out", _into(op, kernel, out_alone), "CPU")
    library.impl("fwd_kvcache", partial(_kvcache, fwd_kvcache), "CPU")
    library.impl("attend_kvcache", partial(_kvcache, attend_kvcache), "CPU")
    library.impl("combine", _combine, "CPU")


def _checked(op: Any, function: Callable[..., Results]) -> Callable[..., Results]:
    """The kernel of a functional op."""

    def kernel(*args: Any) -> Results:
        validate_ops.arguments(bind(op, args))
        if not torch.is_autocast_enabled("cpu"):  # the usual case, and a context takes 10 us
            return function(*args)
        with torch.autocast("cpu", enabled=False):
            return function(*args)

    return kernel


def _into(
    op: Any, kernel: Callable[..., Results], out_alone: Callable[..., Results]
) -> Callable[..., None]:
    """The kernel of an out overload: computes, by ``out_alone`` if no more than that is asked for,
    then copies into the tensors given."""
    names = internals.results(op)

    def out_kernel(*args: Any, **given: Any) -> None:
        bound = bind(op, args)
        is_out_alone = all(x is None for name, x in given.items() if name != "out")
        compute = out_alone if is_out_alone and "out" in given else kernel
        results = validate_ops.outputs(bound, given, names, lambda x: compute(*x.values()))
        for name, result in results.items():
            if result is not None and given.get(name) is not None:
                given[name].copy_(result)

    return out_kernel


def _kvcache(op: Any, *args: Any) -> Results:
    bound = DEFAULTS[fwd_kvcache] | bind(op, args)
    validate_kvcache.op_arguments(bound)
    with torch.autocast("cpu", enabled=False):
        return cpu.fwd_kvcache(**bound)


def _combine(*args: Any) -> Results:
    validate_kvcache.partials(*args)
    return cpu.combine(*args)
