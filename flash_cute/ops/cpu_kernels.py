"""The ops on the CPU: they check their arguments, as C++ does for CUDA, then compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flash_cute import _torch_internals as internals
from flash_cute import cpu
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.call.validate import ops as validate_ops
from flash_cute.call.validate import quantized_kvcache
from flash_cute.call.validate.options import OF_OPS
from flash_cute.cpu import sparse
from flash_cute.cpu.forward import fwd_without_lse
from flash_cute.ops.schema import CALLS, OPS, Results, over_cache
from flash_cute.ops.typed import AttendKvcacheCall, AttendQuantizedKvcacheCall, FwdKvcacheCall


def register(library: torch.library.Library) -> None:
    internals.warm_up_mkl_vector_math()
    functions: dict[str, tuple[Callable[[Any], Results], Callable[..., Results]]] = {
        "fwd": (cpu.fwd, sparse.fwd),
        "bwd": (cpu.bwd, sparse.bwd),
        "varlen_fwd": (cpu.varlen_fwd, sparse.varlen_fwd),
        "varlen_bwd": (cpu.varlen_bwd, sparse.varlen_bwd),
    }
    for name, (function, of_lists) in functions.items():
        op = getattr(OPS, name).default
        compute = _checked(function, of_lists)
        out_alone = _checked(fwd_without_lse, of_lists) if name == "fwd" else compute
        library.impl(name, _functional(op, compute), "CPU")
        library.impl(f"{name}.out", _into(op, compute, out_alone), "CPU")
    library.impl("fwd_kvcache", _fwd_kvcache, "CPU")
    library.impl("attend_kvcache", _attend_kvcache, "CPU")
    library.impl("attend_quantized_kvcache", _attend_quantized_kvcache, "CPU")
    library.impl("combine", _combine, "CPU")


def _checked(
    function: Callable[[Any], Results], of_lists: Callable[..., Results]
) -> Callable[[Any], Results]:
    """A function that checks a call and computes it by ``function``, or by ``of_lists`` if
    sparse."""

    def run(call: Any) -> Results:
        if call.tile_lists is None:
            return function(call)
        return of_lists(call, call.tile_lists, call.tile_bits)

    def compute(call: Any) -> Results:
        validate_ops.arguments(call)
        if not torch.is_autocast_enabled("cpu"):  # the usual case, and a context takes 10 us
            return run(call)
        with torch.autocast("cpu", enabled=False):
            return run(call)

    return compute


def _functional(op: Any, compute: Callable[[Any], Results]) -> Callable[..., Results]:
    """The kernel of a functional op."""
    call_of = CALLS[op]
    return lambda *args: compute(call_of(*args))


def _into(
    op: Any, compute: Callable[[Any], Results], out_alone: Callable[[Any], Results]
) -> Callable[..., None]:
    """The kernel of an out overload: computes, by ``out_alone`` if only out is given, then copies
    the results into the tensors given."""
    names, call_of = internals.results(op), CALLS[op]

    def out_kernel(*args: Any, **given: Any) -> None:
        is_out_alone = all(x is None for name, x in given.items() if name != "out")
        computed = out_alone if is_out_alone and "out" in given else compute
        results = validate_ops.outputs(call_of(*args), given, names, computed)
        for name, result in results.items():
            if result is not None and given.get(name) is not None:
                given[name].copy_(result)

    return out_kernel


def _fwd_kvcache(*args: Any) -> Results:
    return _kvcache(FwdKvcacheCall(*args))


def _attend_kvcache(*args: Any) -> Results:
    return _kvcache(over_cache(AttendKvcacheCall(*args)))


def _attend_quantized_kvcache(*args: Any) -> Results:
    call = AttendQuantizedKvcacheCall(*args)
    quantized_kvcache.check_op(over_cache(call), call.k_descale, call.v_descale)
    with torch.autocast("cpu", enabled=False):
        return cpu.attend_quantized_kvcache(call)


def _kvcache(call: FwdKvcacheCall) -> Results:
    validate_kvcache.check(call, OF_OPS)
    with torch.autocast("cpu", enabled=False):
        return cpu.fwd_kvcache(call)


def _combine(*args: Any) -> Results:
    validate_kvcache.partials(*args)
    return cpu.combine(*args)
