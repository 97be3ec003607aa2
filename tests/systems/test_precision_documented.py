"""The two documented examples of adaptive precision, as they are printed."""

from __future__ import annotations

import inspect
from dataclasses import fields

import fresh
import torch
from precision_models import encoder, reachable_bytes

from flash_cute import precision


def test_create_ultra_precision_module(capsys):
    base_model, input_data = encoder(), torch.randn(2, 9, 64).half()
    from flash_cute.precision import (
        AllocationStrategy,
        PrecisionConfig,
        create_ultra_precision_module,
    )

    # Create adaptive precision model for 30% quality improvement
    config = PrecisionConfig(
        allocation_strategy=AllocationStrategy.ENTROPY_BASED,
        target_memory_reduction=0.4,  # 40% memory reduction target
        entropy_threshold=1.5,
    )

    adaptive_model = create_ultra_precision_module(model=base_model, config=config)

    # Forward pass with entropy-based precision allocation
    output = adaptive_model(input_data)
    stats = adaptive_model.get_precision_stats()
    print(f"Memory savings: {stats.memory_savings_ratio:.1%}")

    assert isinstance(adaptive_model, precision.UltraPrecisionModule)
    assert output.shape == (2, 9, 64) and reachable_bytes(adaptive_model) == stats.stored_bytes
    assert 40 <= float(capsys.readouterr().out.split()[-1].rstrip("%")) < 43


def test_analyze_precision_opportunities(capsys):
    my_transformer, sample_sequence = encoder(), torch.randn(2, 9, 64).half()
    from flash_cute.precision import analyze_precision_opportunities

    # Analyze precision opportunities in your model
    opportunities = analyze_precision_opportunities(
        model=my_transformer, sample_input=sample_sequence
    )

    print(f"Potential memory savings: {opportunities['potential_savings']}")
    print(f"Recommended optimizations: {len(opportunities['recommendations'])}")

    savings, count = (int(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert savings > 50_000 and count == 8


def test_signatures_and_defaults():
    create = inspect.signature(precision.create_ultra_precision_module).parameters
    assert list(create)[:3] == ["model", "config", "device"]
    analyze = inspect.signature(precision.analyze_precision_opportunities).parameters
    assert list(analyze) == ["model", "sample_input", "device"]
    assert {field.name: field.default for field in fields(precision.PrecisionConfig)} == {
        "base_precision": precision.PrecisionFormat.FP16,
        "allocation_strategy": precision.AllocationStrategy.ENTROPY_BASED,
        "quantization_mode": precision.QuantizationMode.DYNAMIC,
        "entropy_threshold": 1.5,
        "target_memory_reduction": 0.4,
        "gradient_weight": 0.3,
        "activation_weight": 0.4,
    }


def test_flash_cute_does_not_import_it():
    code = "import sys, flash_cute; assert 'flash_cute.precision' not in sys.modules"
    fresh.run(code, check=True)
