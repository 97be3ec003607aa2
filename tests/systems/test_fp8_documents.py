"""The examples of the documented interface, word for word but for the package's name."""

from __future__ import annotations

import re
from pathlib import Path

import fresh
import pytest
import torch
from fp8_cases import mlp
from torch import nn

from flash_cute.precision import FP8Config

IMPORTS = """
from flash_cute.precision import (
    create_fp8_trainer,
    convert_model_to_fp8,
    FP8Format,
)
"""
LOOP = """
# 2x speedup on H100/Blackwell hardware
trainer = create_fp8_trainer(model, forward_format=FP8Format.E4M3)
with trainer:
    loss = trainer.training_step(inputs, targets)
    trainer.optimizer_step(optimizer)
"""
CONVERT = """
# Convert existing model to FP8
fp8_model = convert_model_to_fp8(model)
# Model now uses FP8LinearLayer instead of nn.Linear
"""
CONTEXT = """
from flash_cute.precision import FP8TrainingEngine
# Context manager usage
with FP8TrainingEngine(model, fp8_config) as trainer:
    # All operations use FP8 precision
    loss = trainer.training_step(inputs, targets)
    success = trainer.optimizer_step(optimizer)

    # Get training statistics
    stats = trainer.get_training_statistics()
    print(f"Overflows: {stats['overflows']}, Steps: {stats['steps']}")
"""
ERRORS = """
try:
    trainer = create_fp8_trainer(model)
    trainer.setup_fp8_training()
except Exception as e:
    print(f"FP8 training unavailable: {e}")
    # Fallback to standard training
"""
SUMMARY = """
# FP8 Training
fp8_trainer = create_fp8_trainer(model, FP8Format.E4M3, FP8Format.E5M2)
fp8_model = convert_model_to_fp8(model)
"""


@pytest.fixture
def names():
    """What the examples take as given."""
    model = mlp(16, 64, 10)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "inputs": torch.randn(8, 16),
        "targets": torch.randint(10, (8,)),
        "fp8_config": FP8Config(),
    }


def run(example, names):
    exec(IMPORTS + example, names)
    return names


def layers(model):
    return [type(module).__name__ for module in model if not isinstance(module, nn.GELU)]


def test_loop(names):
    before = names["model"][0].weight.clone()
    run(LOOP, names)
    assert 1 < float(names["loss"]) < 4
    assert not torch.equal(names["model"][0].weight, before)
    assert names["trainer"].get_training_statistics()["steps"] == 1


def test_convert(names):
    run(CONVERT, names)
    assert layers(names["fp8_model"]) == ["FP8LinearLayer"] * 2


def test_context(names, capsys):
    run(CONTEXT, names)
    assert names["success"] is True
    assert capsys.readouterr().out == "Overflows: 0, Steps: 1\n"


def test_errors(names, capsys):
    run(ERRORS, names)
    assert layers(names["model"]) == ["FP8LinearLayer"] * 2
    assert capsys.readouterr().out == ""
    run(ERRORS, names | {"model": nn.Conv2d(1, 1, 1)})
    assert capsys.readouterr().out == (
        "FP8 training unavailable: Conv2d has no nn.Linear: nothing to convert to fp8\n"
    )


def test_summary(names):
    run(SUMMARY, names)
    assert names["fp8_model"] is names["model"] is names["fp8_trainer"].model
    assert layers(names["model"]) == ["FP8LinearLayer"] * 2


def test_example_of_the_page(capsys):
    page = Path(__file__).parents[2] / "docs" / "fp8_training.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(example, {})
    assert "'steps': 20, 'overflows': 0" in capsys.readouterr().out


def test_import_of_the_library_leaves_the_package_out():
    code = "import sys, flash_cute; assert 'flash_cute.precision' not in sys.modules"
    fresh.run(code, check=True)
