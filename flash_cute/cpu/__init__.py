"""Attention on the CPU: the ops in ATen, tiled with an online softmax.

Memory is linear in the sequence lengths, except for a returned ``softmax``. Half types are computed
in fp32, fp32 and fp64 in themselves, whatever ``allow_tf32``; each result is rounded once. The
functions are registered below autograd: their results never require grad; ``bwd`` and
``varlen_bwd`` return the gradients. Arguments and results are those of the schemas;
:mod:`flash_cute.reference` says what they mean.
"""

from __future__ import annotations

from flash_cute.cpu.backward import bwd, varlen_bwd
from flash_cute.cpu.forward import fwd, varlen_fwd
from flash_cute.cpu.kvcache import combine, fwd_kvcache
from flash_cute.cpu.quantized_kvcache import attend_quantized_kvcache

__all__ = [
    "attend_quantized_kvcache",
    "bwd",
    "combine",
    "fwd",
    "fwd_kvcache",
    "varlen_bwd",
    "varlen_fwd",
]
