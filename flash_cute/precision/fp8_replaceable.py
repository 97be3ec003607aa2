"""Which layers an fp8 layer can replace: those that add nothing to their class in torch."""

from __future__ import annotations

import torch
from torch import nn

from flash_cute import _torch_internals as internals
from flash_cute.core.linear import OptimizedLinear

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
IN_PROJECTIONS = {f"{name}_proj_weight" for name in ("in", "q", "k", "v")} | {"in_proj_bias"}
# Attributes that a subclass may define without changing what its base computes.
METADATA = {
    "__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__annotations_cache__",
    "__annotate__", "__annotate_func__", "__firstlineno__", "__static_attributes__",
    "__constants__", "extra_repr",
}  # fmt: skip


def reason_to_leave(module: nn.Module) -> str | None:
    """Why a linear layer or an attention cannot be replaced: what it adds to torch's class, or a
    feature that fp8 lacks; None if it can."""
    if isinstance(module, nn.MultiheadAttention):
        return reason_to_leave_attention(module)
    if not isinstance(module, nn.Linear):
        return "is not an nn.Linear"
    if module.weight.numel() == 0:
        return "has no weights"
    base = OptimizedLinear if isinstance(module, OptimizedLinear) else nn.Linear
    return addition(module, base, {"weight", "bias"}, set())


def reason_to_leave_attention(module: nn.MultiheadAttention) -> str | None:
    """:func:`reason_to_leave` for an attention and its output layer."""
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "has add_bias_kv or add_zero_attn"
    reason = addition(module, nn.MultiheadAttention, IN_PROJECTIONS, {"out_proj"})
    inner = reason_to_leave(module.out_proj)
    return reason or (inner and f"has an out_proj that {inner}")


def addition(
    module: nn.Module, base: type[nn.Module], parameters: set[str], children: set[str]
) -> str | None:
    """What a module has in addition to these parameters and children, and to its base class."""
    if own := names_below(type(module), base) - METADATA:
        return f"has a class that defines {min(own)}"
    if "forward" in vars(module):
        return "has a forward that is not its class's"
    if internals.has_hooks_of_any_kind(module):
        return "has hooks"
    held = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if own := held.keys() - parameters:
        return f"has a parameter {min(own)}"
    if computed := [x for x in parameters - held.keys() if getattr(module, x, None) is not None]:
        return f"has a {min(computed)} that is not a parameter"
    if own := {name for name, _ in module.named_buffers(recurse=False)}:
        return f"has a buffer {min(own)}"
    if own := {name for name, _ in module.named_children()} - children:
        return f"has a module {min(own)}"
    for name, parameter in held.items():
        if type(parameter) is not nn.Parameter and not internals.is_fake(parameter):
            return f"has a {name} that is a {type(parameter).__name__}"
        if parameter.dtype not in DTYPES or (name == "weight" and parameter.dim() != 2):
            return f"has a {name} of {parameter.dtype} and shape {tuple(parameter.shape)}"
    return None


def names_below(kind: type, base: type) -> set[str]:
    """The attributes that subclasses of ``base`` define in the MRO of ``kind``."""
    order = kind.__mro__
    return {name for each in order[: order.index(base)] for name in vars(each)}
