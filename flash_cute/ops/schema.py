"""The ops by name, and their arguments, as ``csrc/library.cpp`` declares them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import flash_cute.library  # noqa: F401  loads the ops
from flash_cute import _torch_internals as internals

Results = tuple[Tensor | None, ...]  # of an op; None is what was not asked for

OPS = torch.ops.flash_cute
fwd = OPS.fwd.default
bwd = OPS.bwd.default
varlen_fwd = OPS.varlen_fwd.default
varlen_bwd = OPS.varlen_bwd.default
fwd_kvcache = OPS.fwd_kvcache.default
attend_kvcache = OPS.attend_kvcache.default
combine = OPS.combine.default
OUT_OVERLOADS = (OPS.fwd.out, OPS.bwd.out, OPS.varlen_fwd.out, OPS.varlen_bwd.out)

# Arguments of every op in order, with their defaults: reading a schema takes long.
DEFAULTS: dict[Any, dict[str, Any]] = {
    op: {argument.name: argument.default_value for argument in internals.arguments(op)}
    for op in (
        fwd, bwd, varlen_fwd, varlen_bwd, fwd_kvcache, attend_kvcache, combine, *OUT_OVERLOADS
    )
}  # fmt: skip


def bind(op: Any, args: Sequence[Any], named: dict[str, Any] | None = None) -> dict[str, Any]:
    """The op's arguments by name, defaults filled in from its schema."""
    bound = dict(DEFAULTS[op])
    bound.update(zip(bound, args, strict=False))
    bound.update(named or {})
    return bound


def written(op: Any) -> list[str]:
    """Names of the arguments that the op writes into."""
    infos = {argument.name: argument.alias_info for argument in internals.arguments(op)}
    return [name for name, info in infos.items() if info is not None and info.is_write]
