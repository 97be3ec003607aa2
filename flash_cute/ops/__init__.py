"""``torch.ops.flash_cute``: fakes, autograd formulas and CPU implementations of the ops.

Schemas and CUDA implementations are C++ (``csrc/library.cpp``). ``fwd``, ``bwd``, ``varlen_fwd``
and ``varlen_bwd`` are functional; each has an ``out`` overload that writes into tensors that the
caller gives. ``fwd_kvcache`` writes into the caches it is given, ``attend_kvcache`` and
``attend_quantized_kvcache``, which have no keys to append, ``fp8_fwd`` and ``fp8_varlen_fwd``,
whose inputs are e4m3, and ``combine`` into nothing; none of these has a gradient. Everything is
registered here, before the first call, so that ``torch.compile``, ``torch.export`` and ``opcheck``
see complete ops.
"""

from __future__ import annotations

import torch

from flash_cute._torch_internals import transformed
from flash_cute.native.library import has_cuda_kernels, kernels
from flash_cute.ops import (
    autocast,
    autograd,
    cpu_kernels,
    dequantize,
    fakes,
    flops,
    fp8,
    pooled_softmax,
    quantize,
    sharding,
    tile_lists,
    vmap,
)
from flash_cute.ops.autograd import (
    backward_call,
    call,
    differentiable,
    no_double_backward,
    save_for_backward,
)
from flash_cute.ops.fp8 import has_fp8_attention
from flash_cute.ops.schema import (
    OP_OF,
    OUT_OF,
    attend_kvcache,
    attend_quantized_kvcache,
    bwd,
    combine,
    fp8_fwd,
    fp8_varlen_fwd,
    fwd,
    fwd_kvcache,
    varlen_bwd,
    varlen_fwd,
)
from flash_cute.ops.switches import allow_tf32, deterministic

__all__ = [
    "OP_OF",
    "OUT_OF",
    "allow_tf32",
    "attend_kvcache",
    "attend_quantized_kvcache",
    "backward_call",
    "bwd",
    "call",
    "combine",
    "deterministic",
    "differentiable",
    "fp8_fwd",
    "fp8_varlen_fwd",
    "fwd",
    "fwd_kvcache",
    "has_cuda_kernels",
    "has_fp8_attention",
    "kernels",
    "no_double_backward",
    "save_for_backward",
    "transformed",
    "varlen_bwd",
    "varlen_fwd",
]

_library = torch.library.Library("flash_cute", "IMPL")
for _layer in (
    fakes,
    autograd,
    cpu_kernels,
    vmap,
    autocast,
    flops,
    sharding,
    tile_lists,
    pooled_softmax,
    fp8,
    quantize,
    dequantize,
):
    _layer.register(_library)
