"""The ops of attention of e4m3 inputs: on the CPU, for tracing, and without CUDA kernels for them.
They have no gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from flash_cute import _torch_internals as internals
from flash_cute.call.validate import fp8 as validate_fp8
from flash_cute.cpu import fp8 as cpu
from flash_cute.native.library import kernels
from flash_cute.ops import fakes
from flash_cute.ops.schema import CALLS, Results, fp8_fwd, fp8_varlen_fwd

_CPU: dict[str, tuple[Any, Callable[[Any], Results]]] = {
    "fp8_fwd": (fp8_fwd, cpu.fwd),
    "fp8_varlen_fwd": (fp8_varlen_fwd, cpu.varlen_fwd),
}
# Before the refusal below is registered in their place. A build may leave out their rows alone.
_HAS_CUDA_OPS = internals.has_kernel("flash_cute::fp8_fwd", "CUDA")
_HAS_CUDA_KERNELS = _HAS_CUDA_OPS and any(id.startswith("fwd_sm90_e4m3_") for id in kernels())


def register(library: torch.library.Library) -> None:
    for name, (op, compute) in _CPU.items():
        torch.library.register_fake(f"flash_cute::{name}", partial(_room, op), lib=library)
        library.impl(name, partial(_checked, op, compute), "CPU")
        if not _HAS_CUDA_OPS:
            library.impl(name, partial(_refuse, op), "CUDA")


@internals.constant_in_graphs
def has_fp8_attention(device: torch.device) -> bool:
    """Whether the ops of e4m3 inputs compute on the device: on the CPU, and on GPUs of compute
    capability 9.0 if the library holds kernels for them. True for meta, where nothing is
    computed."""
    if device.type != "cuda":
        return True
    if not (_HAS_CUDA_KERNELS and torch.cuda.is_available()):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _room(op: Any, *args: Any, **named: Any) -> Results:
    call = CALLS[op](*args, **named)
    fakes.check(validate_fp8.arguments, call)
    q = call.q
    *lead, rows, heads, _ = q.shape
    return (
        q.new_empty((*q.shape[:-1], call.v.shape[-1]), dtype=validate_fp8.out_dtype(call)),
        q.new_empty((*lead, heads, rows), dtype=torch.float32),
    )


def _checked(op: Any, compute: Callable[[Any], Results], *args: Any) -> Results:
    call = CALLS[op](*args)
    validate_fp8.arguments(call)
    with torch.autocast("cpu", enabled=False):
        return compute(call)


def _refuse(op: Any, *args: Any) -> NoReturn:
    validate_fp8.arguments(CALLS[op](*args))
    raise NotImplementedError(
        f"{op}: q is on CUDA, and this build of flash_cute holds no CUDA kernels of attention of "
        "e4m3 inputs; call flash_attn_func or flash_attn_varlen_func, which widen them to 16 bits, "
        "or move the tensors to the CPU"
    )
