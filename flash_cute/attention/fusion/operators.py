"""Compares the operators of a block's forward with those of a Llama block, and their shapes.

Equal numbers do not rule out another behaviour at other lengths, or at random. So operators are
recorded on the device "meta" at many lengths: an additional mask, dropout, cut of the keys, or
branch shows as an operator that a Llama block lacks, or as another shape.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flash_cute import _torch_internals as internals
from flash_cute.attention.fusion import remembered

Sizes = tuple[int, int]  # batch and tokens
_REFERENCE = (1009, 8209)  # primes, which identify batch and tokens in a shape
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES = ((1, 3), (2, 130), (2, 131101), (3, 67), (1, 1031))
_RUNS: list[tuple[torch.dtype, bool, Sizes]] = [
    *((torch.float32, True, sizes) for sizes in _SIZES),
    *((torch.float32, False, sizes) for sizes in _SIZES[:3]),
    *((dtype, mode, (2, 130)) for dtype in _DTYPES[1:] for mode in (True, False)),
]  # dtype, training, sizes
_COMPUTE = {
    "mm", "addmm", "bmm", "baddbmm", "mul", "add", "pow", "mean", "rsqrt", "sqrt", "div", "neg",
    "cat", "silu", "_softmax", "_safe_softmax", "_fused_rms_norm", "scaled_dot_product_attention",
    "dropout", "rms_norm",
}  # fmt: skip
_VIEWS = {
    "t", "view", "_unsafe_view", "transpose", "permute", "unsqueeze", "squeeze", "split", "slice",
    "split_with_sizes", "expand", "clone", "detach", "alias", "_to_copy", "unbind",
}  # fmt: skip


@dataclass(frozen=True)
class Operator:
    """A recorded call: the shapes of its results (for attention, dropout and norms those of the
    inputs), the numbers among its arguments, and its dropout probability."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    numbers: tuple[float, ...] = ()
    dropout_p: float = 0.0


def difference(block: Any) -> str | None:
    """How a block's operators differ from Llama's, at some length; None if they do not."""
    attn = block.self_attn
    heads = attn.q_proj.out_features // attn.head_dim
    p = float(getattr(attn, "attention_dropout", 0.0))
    blocks = {
        dtype: with_weights(block, partial(torch.empty_like, dtype=dtype, device="meta"))
        for dtype in _DTYPES
    }
    for masked in (True, False):
        reference = record(blocks[torch.float32].eval(), _REFERENCE, masked)
        for dtype, training, sizes in _RUNS if masked else _RUNS[1:6:2]:
            found = record(blocks[dtype].train(training), sizes, masked)
            reason = _unknown(found, p if training else 0.0, (sizes[0], heads, sizes[1], sizes[1]))
            if reason is not None:
                return reason
            wanted = [(x.name, _at(x.shapes, sizes), x.numbers) for x in reference]
            if [(x.name, x.shapes, x.numbers) for x in found] != wanted:
                return "what it computes depends on lengths, on the mode or on the dtype"
    return None


def with_weights(module: nn.Module, make: Callable[[Tensor], Tensor]) -> Any:
    """A copy with each parameter replaced by ``make`` of it."""
    weights = {id(p): nn.Parameter(make(p)) for p in module.parameters()}
    return remembered.watch(copy.deepcopy(module, weights))


def record(block: Any, sizes: Sizes, masked: bool) -> list[Operator]:
    """The operators of one call, without views and copies."""
    weight, (batch, seqlen) = block.self_attn.q_proj.weight, sizes
    kind: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    with nullcontext() if block.training else torch.no_grad():
        x = torch.zeros(batch, seqlen, weight.shape[1], **kind)
        mask = torch.zeros(batch, 1, seqlen, seqlen, **kind) if masked else None
        angles = torch.zeros(1, seqlen, block.self_attn.head_dim, **kind)
        recorder = _Recorder()
        with recorder, _Whole(recorder):
            block(
                hidden_states=x.requires_grad_(block.training), attention_mask=mask,
                position_embeddings=(angles, angles),
            )  # fmt: skip
    return recorder.found


class _Recorder(internals.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operator] = []
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self.is_inside and name not in _VIEWS and func.namespace != "prim":
            self.found.append(Operator(name, _shapes(out), _numbers(args)))
        return out


class _Whole(TorchFunctionMode):
    """Records attention, dropout and norms as one operator each."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SIGNATURES:
            return func(*args, **kwargs)
        named = _SIGNATURES[func].bind(*args, **kwargs)
        named.apply_defaults()
        given = named.arguments
        p = given.get("dropout_p", given.get("p", 0.0) * given.get("training", 0))
        shapes = _shapes(tuple(given.values())[:3])
        numbers = _numbers(given.get(name) for name in ("scale", "is_causal", "eps"))
        self.recorder.found.append(Operator(func.__name__, shapes, numbers, float(p)))
        self.recorder.is_inside = True
        try:
            return func(*args, **kwargs)
        finally:
            self.recorder.is_inside = False


def _sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> None:
    """The signature of F.scaled_dot_product_attention, which has none in Python."""


_SIGNATURES = {
    F.scaled_dot_product_attention: inspect.signature(_sdpa),
    F.dropout: inspect.signature(F.dropout),
    F.rms_norm: inspect.signature(F.rms_norm),
}


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(tuple(x.shape) for x in values if isinstance(x, Tensor))


def _numbers(args: Any) -> tuple[float, ...]:
    return tuple(x for x in args if isinstance(x, (int, float)))


def _unknown(found: list[Operator], p: float, scores: tuple[int, ...]) -> str | None:
    """The first operator that a Llama block lacks; its one dropout has probability p, of scores."""
    for operator in found:
        if operator.name not in _COMPUTE:
            return f"it has the operator {operator.name}, which a Llama block lacks"
        if operator.name == "dropout" and operator.dropout_p and operator.shapes != (scores,):
            return f"it drops elements of a tensor of {operator.shapes}, not of probabilities"
    dropped = [operator.dropout_p for operator in found if operator.dropout_p]
    if dropped != ([p] if p else []):
        return f"it drops with probabilities {dropped}; expected {p}, self_attn.attention_dropout"
    return None


def _at(shapes: tuple[tuple[int, ...], ...], sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """Shapes of the reference call, with another batch and number of tokens."""

    def moved(size: int) -> int:
        factor = 1
        for before, now in zip(_REFERENCE, sizes, strict=True):
            while size and size % before == 0:
                size, factor = size // before, factor * now
        return size * factor

    return tuple(tuple(map(moved, shape)) for shape in shapes)
