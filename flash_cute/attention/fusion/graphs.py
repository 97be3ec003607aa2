"""CUDA graphs of a forward, kept for the most recent kinds of input."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from flash_cute import _torch_internals as internals

T = TypeVar("T")
KEPT = 4
PINNED = 32
_WARM_UPS = 3


class Recent(Generic[T]):
    """A cache of the last ``size`` values by key, and of the last ``PINNED`` pinned ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: OrderedDict[Hashable, T] = OrderedDict()
        self.pinned: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        """The value, marked as used last; None if it is not there."""
        for kept in (self.pinned, self.values):
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
        return None

    def put(self, key: Hashable, value: T, pinned: bool) -> None:
        """Stores a value; drops the least recently used one, pinned or not as the new one is."""
        kept, size = (self.pinned, PINNED) if pinned else (self.values, self.size)
        kept[key] = value
        if len(kept) > size:
            kept.popitem(last=False)

    def clear(self) -> None:
        """Drops all values."""
        self.values.clear()
        self.pinned.clear()


@dataclass(frozen=True)
class Captured:
    """A graph with its input and output buffers."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor

    def replay(self, tensors: list[Tensor]) -> Tensor:
        """The output of the graph for these inputs, as a new tensor."""
        for buffer, x in zip(self.inputs, tensors, strict=True):
            buffer.copy_(x)
        self.graph.replay()
        return self.output.clone()


class Graphs:
    """Captures a model's forward at the first call with each kind of inputs, then replays it.

    Args:
        model: returns one tensor. ``model.frozen()``, if it exists, returns the numbers that a
            graph would freeze, or None if a submodule must be called.
        seqlen: the last ``PINNED`` graphs of inputs of this length are kept, and the last ``KEPT``
            of other lengths.
    """

    def __init__(self, model: nn.Module, seqlen: int) -> None:
        self.model, self.seqlen = model, seqlen
        self.recent: Recent[Captured] = Recent(KEPT)
        self.addresses: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs(copy.deepcopy(self.model, memo), self.seqlen)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "seqlen": self.seqlen, "recent": Recent(KEPT), "addresses": ()}

    def check_call(self, call: dict[str, Any]) -> tuple[str | None, Any]:
        """(reason, None) if a call cannot be one launch, else (None, what its graph freezes)."""
        reason = self._refusal(call)
        frozen = None if reason is not None else self._frozen()
        if reason is None and frozen is None:
            reason = "a part of the model was changed, and is called"
        return reason, frozen

    def _refusal(self, call: dict[str, Any]) -> str | None:
        tensors, _ = flatten(call)
        if torch.compiler.is_compiling():
            return "it is compiled"
        if not tensors or not all(x.is_cuda for x in tensors):
            return "an input is not on CUDA"
        if torch.is_grad_enabled() and any(
            x.requires_grad for x in (*tensors, *self.model.parameters())
        ):
            return "a gradient is wanted"
        if any(drops(module) for module in self.model.modules()):
            return "dropout is active"
        if internals.has_hooks(self.model):
            return "the model has hooks, which are called"
        return "it is being captured" if torch.cuda.is_current_stream_capturing() else None

    def _frozen(self) -> Any:
        return self.model.frozen() if hasattr(self.model, "frozen") else ()  # type: ignore[operator]

    def run(self, call: dict[str, Any], seqlen: int, frozen: Any) -> Tensor:
        """model(**call), of seqlen tokens, by one graph; ``frozen`` is :meth:`check_call`'s."""
        tensors, rest = flatten(call)
        state = (*self.model.parameters(), *self.model.buffers())
        addresses = tuple(x.data_ptr() for x in state)
        if addresses != self.addresses:  # captured graphs read the old addresses
            self.recent.clear()
            self.addresses = addresses
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        precision = torch.backends.cuda.matmul.fp32_precision
        kinds = tuple((x.shape, x.dtype, x.device) for x in tensors)
        key = (rest, kinds, autocast, precision, frozen)
        captured = self.recent.get(key)
        with torch.cuda.device(tensors[0].device):
            if captured is None:
                captured = self._capture(call)
                self.recent.put(key, captured, pinned=seqlen == self.seqlen)
            return captured.replay(tensors)

    def _capture(self, call: dict[str, Any]) -> Captured:
        with torch.inference_mode(False), torch.no_grad():
            buffers: list[Tensor] = []

            def own(x: Tensor) -> Tensor:
                buffers.append(torch.empty_like(x).copy_(x))
                return buffers[-1]

            static = replace(call, own)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self.model(**static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # No autocast cache: its tensors may be freed while the graph still reads them.
            with (
                torch.autocast("cuda", cache_enabled=False, **_autocast()),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                output = self.model(**static)
        return Captured(graph, buffers, output)


def _autocast() -> dict[str, Any]:
    enabled = torch.is_autocast_enabled("cuda")
    return {"enabled": enabled, "dtype": torch.get_autocast_dtype("cuda")}


def drops(module: Any) -> bool:
    """Whether a module has active dropout."""
    if isinstance(module, nn.MultiheadAttention):
        return module.training and module.dropout > 0
    p = getattr(module, "attention_dropout", getattr(module, "p", 0.0))
    return module.training and isinstance(p, (int, float)) and p > 0


def flatten(value: Any) -> tuple[list[Tensor], Any]:
    """The tensors in nested tuples, lists and dicts, and a comparable key of everything else."""
    tensors: list[Tensor] = []

    def take(x: Tensor) -> str:
        tensors.append(x)
        return "a tensor"

    return tensors, _frozen(replace(value, take))


def replace(value: Any, change: Any) -> Any:
    """A copy with each tensor x replaced by ``change(x)``."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(replace(x, change) for x in value)
    if isinstance(value, dict):
        return {name: replace(x, change) for name, x in value.items()}
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_frozen(x) for x in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(x)) for name, x in value.items())
    return value
