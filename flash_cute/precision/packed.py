"""Modules that store rounded weights and restore them to the model's dtype at each use."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.precision.quantize import Layout, Rounded, restore, round_rows
from flash_cute.precision.saving import note_restored
from flash_cute.precision.settings import PrecisionFormat


def as_matrix(weight: Tensor) -> Tensor:
    """A weight as (rows, cols): its first dim by the rest, or, if that is 1, the rest by the last
    dim."""
    return weight.flatten(1) if weight.shape[0] > 1 else weight.reshape(-1, weight.shape[-1])


def as_bytes(state: Any) -> Tensor:
    """Plain values as a uint8 tensor of their JSON: state dicts hold only tensors."""
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def from_bytes(state: Any, name: str, keys: set[str]) -> dict[str, Any]:
    """The inverse of :func:`as_bytes`; ValueError unless it holds exactly these keys."""
    try:
        values = json.loads(bytes(state.cpu().tolist()))
        if not isinstance(values, dict) or values.keys() != keys:
            raise ValueError(f"it has {values}, and must have {', '.join(sorted(keys))}")
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is not the state of a packed weight: {error}") from None
    return values


class RestoredWeight(Tensor):
    """A weight restored from packed codes at each access: ops take it as a tensor, and writing to
    it, which would be lost, raises RuntimeError. So do writes to its ``data``."""

    __torch_function__ = internals.plain_torch_function  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        return self.detach().as_subclass(RestoredWeight)

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse_write(self)


def _refuse_write(weight: Tensor, *_: Any, **__: Any) -> Any:
    raise RuntimeError(
        f"this weight of shape {tuple(weight.shape)} is restored from packed codes at each access: "
        "what is written to it is lost; change the model and pack it again"
    )


def _writers() -> list[str]:
    """Names of the tensor methods that write to the tensor."""
    harmless = {"requires_grad_", "detach_", "rename_", "share_memory_"}
    named = {x for x in dir(Tensor) if x.endswith("_") and not x.startswith("_")} - harmless
    operators = {x for x in dir(Tensor) if x.startswith("__i") and hasattr(Tensor, f"__{x[3:]}")}
    return sorted({*named, *operators, "__setitem__"})


for _name in _writers():
    setattr(RestoredWeight, _name, _refuse_write)


class PackedRows(nn.Module):
    """Rows of a weight in one layout: the buffers ``codes`` and ``steps``."""

    codes: Tensor
    steps: Tensor

    def __init__(self, rounded: Rounded) -> None:
        super().__init__()
        self.layout, self.zero, self.exponent = rounded.layout, rounded.zero, rounded.exponent
        self.register_buffer("codes", rounded.codes)
        self.register_buffer("steps", rounded.steps)

    def rounded(self, rows: Tensor | None = None) -> Rounded:
        """All rows, or those of an index."""
        codes, steps = self.codes, self.steps
        if rows is not None:
            codes = codes.index_select(0, rows)
            steps = steps.index_select(0, rows) if steps.dim() > 1 else steps
        return Rounded(self.layout, codes, steps, self.zero, self.exponent)

    def description(self) -> list[Any]:
        """The layout, which the buffers do not have, as plain values."""
        form, group = self.layout.format.value, self.layout.group
        return [form, group, self.zero, self.exponent]


class PackedWeight(nn.Module):
    """A weight in blocks of rows, each in a layout of its own.

    ``PackedWeight(weight, [(rows, layout), ...])`` rounds; ``packed()`` returns the weight, in its
    shape and dtype. ``.to(dtype)`` changes the dtype of the returned weight, not what is stored.
    """

    def __init__(self, weight: Tensor, blocks: list[tuple[int, Layout]]) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        matrix = as_matrix(weight.detach())
        self.cols = matrix.shape[1]
        parts = matrix.split([rows for rows, _ in blocks])
        self.blocks = nn.ModuleList(
            PackedRows(round_rows(part, layout))
            for part, (_, layout) in zip(parts, blocks, strict=True)
        )
        self.register_load_state_dict_pre_hook(_shape_blocks_as_saved)

    def forward(self, original: Tensor | None = None) -> Tensor:
        """The weight. The argument is for torch's parametrizations, and is not used."""
        parts = [restore(block.rounded(), self.cols, self.dtype) for block in self._rows()]
        weight = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self.shape)
        if type(weight) is Tensor and not torch.compiler.is_compiling():
            weight = weight.as_subclass(RestoredWeight)
        return note_restored(weight, self.forward, self._states)

    def _states(self) -> list[tuple[int, int]]:
        """(id, version) of each buffer, which changes if it is replaced or written."""
        return [(id(x), 0 if x.is_inference() else internals.version(x)) for x in self.buffers()]

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of a weight of one block: (*ids.shape, cols). Like nn.Embedding it refuses ids below
        0 or too large, by index_select."""
        (block,) = self._rows()
        found = restore(block.rounded(ids.flatten()), self.cols, self.dtype)
        return found.view(*ids.shape, self.cols)

    def layouts(self) -> list[tuple[int, Layout]]:
        """Each block's rows and layout."""
        return [(len(block.codes), block.layout) for block in self._rows()]

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def get_extra_state(self) -> Tensor:
        blocks = [block.description() for block in self._rows()]
        return as_bytes({"shape": list(self.shape), "blocks": blocks})

    def set_extra_state(self, state: Tensor) -> None:
        """Does nothing: the hook before loading has set the layouts."""

    def _rows(self) -> list[PackedRows]:
        return [block for block in self.blocks if isinstance(block, PackedRows)]

    def _apply(self, fn: Any, recurse: bool = True) -> PackedWeight:
        """Moves between devices. A change of dtype affects only the restored weight."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        for block in self._rows():
            for name, buffer in list(block.named_buffers()):
                moved = fn(buffer)
                same = moved.dtype == buffer.dtype
                setattr(block, name, moved if same else buffer.to(moved.device))
        return self


def _shape_blocks_as_saved(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading: gives the blocks the saved layouts."""
    saved = state.get(f"{prefix}_extra_state")
    if not isinstance(module, PackedWeight) or saved is None:
        return
    saved = from_bytes(saved, f"{prefix}_extra_state", {"shape", "blocks"})
    if saved["shape"] != list(module.shape):
        raise ValueError(
            f"{prefix}: a weight of shape {saved['shape']} was saved, not {list(module.shape)}"
        )
    device, rows, blocks = next(module.buffers()).device, 0, []
    for number, (form, group, zero, exponent) in enumerate(saved["blocks"]):
        layout, place = Layout(PrecisionFormat(form), group), f"{prefix}blocks.{number}."
        if missing := [x for x in ("codes", "steps") if f"{place}{x}" not in state]:
            raise ValueError(f"{place}{missing[0]} is not in the state")
        codes, steps = (
            torch.empty_like(state[f"{place}{name}"], device=device) for name in ("codes", "steps")
        )
        if codes.nbytes + steps.nbytes != layout.nbytes(len(codes), module.cols):
            raise ValueError(f"{place}codes is {tuple(codes.shape)}, which is not {layout}")
        rows += len(codes)
        blocks.append(PackedRows(Rounded(layout, codes, steps, zero, exponent)))
    if rows * module.cols != module.shape.numel():
        raise ValueError(f"{prefix}blocks have {rows} rows of a weight of {list(module.shape)}")
    module.blocks = nn.ModuleList(blocks)


class PackedEmbedding(nn.Module):
    """nn.Embedding over a PackedWeight: only rows that are looked up are restored. It keeps the
    attributes of the original layer: ``num_embeddings``, ``embedding_dim``, ..."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    packed: PackedWeight

    @classmethod
    def take_over(cls, embedding: nn.Embedding, packed: PackedWeight) -> None:
        """Changes the embedding itself to a packed one: other references to it stay valid."""
        del embedding.weight
        embedding.__class__ = cls  # type: ignore[assignment]
        embedding.packed = packed

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"

    @property
    def weight(self) -> Tensor:
        return self.packed()

    def forward(self, input: Tensor) -> Tensor:
        return self.packed.lookup(input)
