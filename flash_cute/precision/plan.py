"""Chooses a layout for each block of rows of each weight of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from flash_cute import _torch_internals as internals
from flash_cute.core.plain_attributes import plain_modules, plain_values
from flash_cute.hardware.memory import bytes_of
from flash_cute.precision.allocate import BudgetError, Choice, allocate, uniform
from flash_cute.precision.packed import as_matrix
from flash_cute.precision.quantize import Layout, restore, round_rows
from flash_cute.precision.sensitivity import entropy
from flash_cute.precision.settings import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
)

LEAST_SIZE = 64  # weights of fewer numbers are not packed
BLOCKS = 4  # blocks of rows of a weight, of at least BLOCK_ROWS each
BLOCK_ROWS = 64
GROUP = 64  # columns that may share a scale
SAMPLE_ROWS = 32  # rows of a block that errors are measured on
PACKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP16 = torch.finfo(torch.float16)
OWN_FORMATS = {form.dtype: form for form in PrecisionFormat if form.dtype is not None}


@dataclass(frozen=True)
class Plan:
    """Layouts of each weight's blocks, by name, and the error that is expected of the model, in
    the unit of the error weights that it was made with."""

    blocks: dict[str, list[tuple[int, Layout]]]
    error: dict[str, float]


def packable(model: nn.Module) -> dict[str, Tensor]:
    """Weights that can be packed, by name: parameters of two dims or more, in fp16 to fp64. A tied
    weight is there once, by its first name. Left out are weights of layers with parametrizations or
    with tensors that are neither parameters nor buffers, which may derive from them (RNNs, torch's
    old weight_norm, spectral_norm and pruning), and weights that are also in plain lists."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta or isinstance(parameter, UninitializedParameter):
            raise ValueError(f"weights must have values, and {name} has none: initialize it first")
    plain = {module: list(plain_tensors(module)) for module in model.modules()}
    kept = {id(x) for held in plain.values() for x in held}
    for module, held in plain.items():
        if held or isinstance(module, (nn.RNNBase, ParametrizationList)):
            kept |= {id(parameter) for parameter in module.parameters(recurse=False)}
    found: dict[str, Tensor] = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dtype in PACKED
        and parameter.layout is torch.strided
        and parameter.dim() > 1
        and parameter.numel() >= LEAST_SIZE
        and id(parameter) not in kept
    }
    for name, weight in found.items():
        if not weight.detach().isfinite().all():
            raise ValueError(f"weights must be finite, and {name} is not")
    return found


def plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Tensors in a module's plain attributes, or in their lists, tuples and dicts, that are neither
    parameters nor buffers of it or of another module."""
    return (value for _, value in plain_values(module) if isinstance(value, Tensor))


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether its forward only looks rows up, and it has nothing that a replacement would lose."""
    return (
        type(module) is nn.Embedding
        and module.max_norm is None
        and internals.skipped_if_fused(module) is None
        and [name for name, _ in module.named_parameters(remove_duplicate=False)] == ["weight"]
        and not any(True for _ in module.buffers())
        and not any(True for _ in module.children())
    )


def tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return list({id(t): t for t in [*model.parameters(), *model.buffers()]}.values())


def held_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors in plain attributes, also of modules in plain lists."""
    hidden = [module for _, module in plain_modules(model)]
    plain = (t for module in [*model.modules(), *hidden] for t in plain_tensors(module))
    return [*tensors(model), *(t for module in hidden for t in tensors(module)), *plain]


def base_bytes(model: nn.Module, base: PrecisionFormat) -> int:
    """Bytes of a model with all floating tensors in ``base``; sparse tensors count by parts."""
    parts = [part for t in tensors(model) for part in internals.parts_of(t.detach())]
    return sum(t.numel() * base.bits // 8 if t.is_floating_point() else t.nbytes for t in parts)


def held_bytes(model: Iterable[Tensor]) -> int:
    """Bytes of all storages of tensors, each once."""
    return bytes_of(model)


def layouts(weight: Tensor, config: PrecisionConfig, floor: int) -> list[Layout]:
    """Ways to store a weight, of ``floor`` bits or more; the first changes it least."""
    base = config.base_precision
    own = OWN_FORMATS.get(weight.dtype)
    widest = own if own is not None and own.bits <= base.bits else base
    forms = [widest] + [
        form
        for form in PrecisionFormat
        if form is not widest and form.bits <= min(base.bits, 12) and form.bits >= floor
    ]
    if widest is PrecisionFormat.FP32:
        forms += [PrecisionFormat.FP16, PrecisionFormat.BF16]
    if not _suits_fp16(weight):
        wide = {PrecisionFormat.FP16: PrecisionFormat.BF16}
        forms = list(dict.fromkeys(wide.get(form, form) for form in forms))
    cols = as_matrix(weight).shape[1]
    grouped = config.quantization_mode is not QuantizationMode.STATIC and cols > GROUP
    small = [form for form in forms if form.is_integer and form.bits <= 8]
    groups = small if grouped and cols % GROUP == 0 else []
    return [Layout(form) for form in forms] + [Layout(form, GROUP) for form in groups]


def _suits_fp16(weight: Tensor) -> bool:
    """Whether fp16 holds the largest value, and no row would become subnormal or 0."""
    if weight.dtype is torch.float16:
        return True
    peaks = as_matrix(weight.detach()).abs().amax(1)
    least = torch.where(peaks > 0, peaks, FP16.max).amin()
    return bool(peaks.amax() <= FP16.max) and bool(least >= FP16.tiny)


def block_rows(weight: Tensor, whole: bool) -> list[int]:
    rows = len(as_matrix(weight))
    count = 1 if whole else max(1, min(BLOCKS, rows // BLOCK_ROWS))
    return [rows * (i + 1) // count - rows * i // count for i in range(count)]


def squared_error(rows: Tensor, layout: Layout) -> float:
    """The squared error of rounding, estimated from evenly spaced rows."""
    sample = rows[:: -(-len(rows) // SAMPLE_ROWS)]
    change = restore(round_rows(sample, layout), rows.shape[1], torch.float32) - sample.float()
    return change.square().sum().item() * len(rows) / len(sample)


@dataclass(frozen=True)
class Table:
    """The weight's name, rows and choices of each block, with errors |dW|^2. It serves any budget
    and any error weights."""

    names: list[str]
    rows: list[int]
    choices: list[list[Choice]]

    def plan(self, config: PrecisionConfig, weights: Mapping[str, float], budget: int) -> Plan:
        """The plan with the least error whose weights take at most ``budget`` bytes."""
        weighted = [
            [Choice(c.layout, c.nbytes, c.error * weights[name]) for c in choices]
            for name, choices in zip(self.names, self.choices, strict=True)
        ]
        pick = uniform if config.allocation_strategy is AllocationStrategy.UNIFORM else allocate
        blocks: dict[str, list[tuple[int, Layout]]] = {}
        error: dict[str, float] = {}
        for name, rows, choice in zip(self.names, self.rows, pick(weighted, budget), strict=True):
            blocks.setdefault(name, []).append((rows, choice.layout))
            error[name] = error.get(name, 0.0) + choice.error
        return Plan(blocks, error)


def tabulate(model: nn.Module, weights: Mapping[str, Tensor], config: PrecisionConfig) -> Table:
    """Rounds samples of each block in every layout that the config allows."""
    embeddings = {id(m.weight) for m in model.modules() if is_plain_embedding(m)}
    by_entropy = config.allocation_strategy is AllocationStrategy.ENTROPY_BASED
    table = Table([], [], [])
    for name, weight in weights.items():
        rich = by_entropy and entropy(weight) > config.entropy_threshold
        floor = math.ceil(config.entropy_threshold) if rich else 1
        allowed = layouts(weight, config, floor)
        sizes = block_rows(weight, id(weight) in embeddings)
        for rows in as_matrix(weight.detach()).split(sizes):
            table.names.append(name)
            table.rows.append(len(rows))
            table.choices.append(
                [
                    Choice(each, each.nbytes(*rows.shape), squared_error(rows, each))
                    for each in allowed
                ]
            )
    return table


def budget_for(model: nn.Module, weights: Mapping[str, Tensor], config: PrecisionConfig) -> int:
    """Bytes that weights may take, so that the whole model meets the target."""
    packed = {id(weight) for weight in weights.values()}
    others = held_bytes(t for t in held_tensors(model) if id(t) not in packed)
    allowed = (1 - config.target_memory_reduction) * base_bytes(model, config.base_precision)
    return math.floor(allowed + 1e-6) - others


def unreachable(model: nn.Module, config: PrecisionConfig, budget: int, least: int) -> ValueError:
    """The error for a target that cannot be met, with the largest that can."""
    base = base_bytes(model, config.base_precision)
    most = config.target_memory_reduction - (least - budget) / max(base, 1)
    return ValueError(
        f"target_memory_reduction={config.target_memory_reduction} cannot be met: this config can "
        f"save at most {max(0.0, math.floor(most * 1e4) / 1e4)} of this model"
    )


def make_plan(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    config: PrecisionConfig,
    error_weights: Mapping[str, float],
) -> Plan:
    """The plan for a config. Raises ValueError if the target cannot be met."""
    budget = budget_for(model, weights, config)
    if config.rounds_inputs and config.quantization_mode is QuantizationMode.STATIC:
        budget -= 4 * sum(1 for _ in model.modules())  # at most one scale per layer
    try:
        return tabulate(model, weights, config).plan(config, error_weights, budget)
    except BudgetError as error:
        raise unreachable(model, config, budget, error.least) from None
