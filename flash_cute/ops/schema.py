"""The ops by name, and their arguments, as ``csrc/library.cpp`` declares them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flash_cute.native.library  # noqa: F401  loads the ops
from flash_cute import _torch_internals as internals
from flash_cute.ops import typed

Results = tuple[Tensor | None, ...]  # of an op; None for optional results of other calls

OPS = torch.ops.flash_cute
fwd = OPS.fwd.default
bwd = OPS.bwd.default
varlen_fwd = OPS.varlen_fwd.default
varlen_bwd = OPS.varlen_bwd.default
fwd_kvcache = OPS.fwd_kvcache.default
attend_kvcache = OPS.attend_kvcache.default
fp8_fwd = OPS.fp8_fwd.default
fp8_varlen_fwd = OPS.fp8_varlen_fwd.default
attend_quantized_kvcache = OPS.attend_quantized_kvcache.default
combine = OPS.combine.default
# The out overload of each op.
OUT_OF = {
    fwd: OPS.fwd.out,
    bwd: OPS.bwd.out,
    varlen_fwd: OPS.varlen_fwd.out,
    varlen_bwd: OPS.varlen_bwd.out,
}

# The class of each op's calls: a call has the op's arguments as its fields, in their order.
CALLS: dict[Any, Any] = {
    fwd: typed.FwdCall,
    bwd: typed.BwdCall,
    varlen_fwd: typed.VarlenFwdCall,
    varlen_bwd: typed.VarlenBwdCall,
    fwd_kvcache: typed.FwdKvcacheCall,
    attend_kvcache: typed.AttendKvcacheCall,
    fp8_fwd: typed.Fp8FwdCall,
    fp8_varlen_fwd: typed.Fp8VarlenFwdCall,
    attend_quantized_kvcache: typed.AttendQuantizedKvcacheCall,
    combine: typed.CombineCall,
}
CALLS |= {OUT_OF[op]: CALLS[op] for op in OUT_OF}
OP_OF = {CALLS[op]: op for op in OUT_OF}  # by the class of the call


def over_cache(call: Any) -> typed.FwdKvcacheCall:
    """A call of any op over a cache as one of ``fwd_kvcache``, without its descales."""
    fields = typed.FwdKvcacheCall._fields
    return typed.FwdKvcacheCall(**{n: x for n, x in call._asdict().items() if n in fields})


def written_arguments(op: Any) -> list[str]:
    """Names of the arguments that the op writes into."""
    infos = {argument.name: argument.alias_info for argument in internals.arguments(op)}
    return [name for name, info in infos.items() if info is not None and info.is_write]
