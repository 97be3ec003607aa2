"""Numbers that adaptive precision reports: each by its definition, from what is really held."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from precision_models import encoder, error, model_bytes, perceptron, reachable_bytes
from torch import nn

from flash_cute.precision import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
    analyze_precision_opportunities,
    create_ultra_precision_module,
)
from flash_cute.precision.sensitivity import entropy


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()


@pytest.mark.parametrize("mode", QuantizationMode)
@pytest.mark.parametrize("strategy", AllocationStrategy)
def test_outputs_are_as_far_off_as_the_layers(strategy, mode):
    """Errors of layers add up as squares; ReLU keeps their share of the output. Each layer's is
    that of levels from the least to the largest weight, uniform between them: 1 / (2^bits - 1)."""
    model, x = perceptron(layers=2), noise(64, 192)
    config = PrecisionConfig(
        target_memory_reduction=0.55, allocation_strategy=strategy, quantization_mode=mode
    )
    small = create_ultra_precision_module(model, config)
    layers = small.get_precision_stats().layers
    together = math.sqrt(sum(layer.relative_error**2 for layer in layers.values()))
    assert 0.6 * together < error(small(x), model(x)) < 1.3 * together
    for layer in layers.values():
        parts = [(rows, layout.format.bits) for rows, layout in layer.blocks]
        rows = sum(rows for rows, _ in parts)
        mean_square = sum(n / rows * (2**bits - 1.0) ** -2 for n, bits in parts)
        assert layer.relative_error <= 1.05 * math.sqrt(mean_square)
    assert reachable_bytes(small) <= 0.45 * model_bytes(model)


@pytest.mark.parametrize("target", [0.3, 0.6])
def test_bytes_and_bits_are_those_of_the_storages(target: float):
    model = encoder()
    small = create_ultra_precision_module(model, PrecisionConfig(target_memory_reduction=target))
    stats = small.get_precision_stats()
    weights = {name: w for name, w in model.named_parameters() if w.dim() > 1}
    assert stats.layers.keys() == weights.keys()
    for name, layer in stats.layers.items():
        weight = weights[name]
        assert sum(rows for rows, _ in layer.blocks) == len(weight)
        nbytes = sum(layout.nbytes(rows, weight.shape[1]) for rows, layout in layer.blocks)
        assert layer.nbytes == nbytes and layer.bits == pytest.approx(8 * nbytes / weight.numel())
        assert layer.entropy == pytest.approx(entropy(weight))
    others = sum(p.nbytes for p in model.parameters() if p.dim() == 1)
    assert stats.stored_bytes == others + sum(layer.nbytes for layer in stats.layers.values())
    assert stats.stored_bytes == reachable_bytes(small) and stats.base_bytes == model_bytes(model)
    saved = 1 - stats.stored_bytes / stats.base_bytes
    assert stats.memory_savings_ratio == saved >= target
    assert dataclasses.replace(stats, base_bytes=0, stored_bytes=0).memory_savings_ratio == 0


def test_savings_are_the_most_that_one_percent_allows():
    """By steps of 5 %: the next higher target is off by more, or cannot be met."""
    model, x = encoder(), noise(2, 9, 64)
    found = analyze_precision_opportunities(model, x)
    target = found["config"].target_memory_reduction
    assert round(target * 100) % 5 == 0 and found["measured_error"] <= 0.01
    more = dataclasses.replace(found["config"], target_memory_reduction=target + 0.05)
    assert error(create_ultra_precision_module(model, more, calibration=x)(x), model(x)) > 0.01
    rows = found["recommendations"]
    assert [row["saved_bytes"] for row in rows] == sorted(
        (row["saved_bytes"] for row in rows), reverse=True
    )
    for row in rows:
        weight = model.get_parameter(row["layer"])
        assert row["saved_bytes"] == 2 * weight.numel() - round(row["bits"] * weight.numel() / 8)
        assert row["saved_bytes"] > 0 and 0 < row["expected_error"] < 0.01
    assert found["base_bytes"] == model_bytes(model)
    ratio = found["potential_savings"] / found["base_bytes"]
    assert found["potential_savings_ratio"] == ratio >= target


def test_static_scales_of_inputs_are_bytes_of_the_budget():
    """A budget that weights alone would fill to the last byte."""
    model, chosen = perceptron(width=64), {"base_precision": PrecisionFormat.INT8}
    static = chosen | {"quantization_mode": QuantizationMode.STATIC}
    config = PrecisionConfig(target_memory_reduction=0.3, **static)
    stats = create_ultra_precision_module(model, config).get_precision_stats()
    scales = 4 * sum(isinstance(module, nn.Linear) for module in model.modules())
    full = 1 - (stats.stored_bytes - scales) / stats.base_bytes
    for target in (full, full - 1 / stats.base_bytes, full - (scales - 1) / stats.base_bytes):
        config = PrecisionConfig(target_memory_reduction=target, **static)
        held = reachable_bytes(create_ultra_precision_module(model, config))
        assert held <= (1 - target) * stats.base_bytes + 1e-6
    config = PrecisionConfig(target_memory_reduction=full, **chosen)  # no scale is held
    assert reachable_bytes(create_ultra_precision_module(model, config)) > 0.95 * (1 - full) * (
        stats.base_bytes
    )
