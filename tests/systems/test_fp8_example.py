"""examples/train_fp8.py: what it writes, and that it notices a training that went wrong."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from flash_cute.precision import fp8_linear, fp8_products

pytest.importorskip("matplotlib")

STEPS = 30
TINY = f"--device cpu --steps {STEPS} --layers 1 --width 32 --heads 2 --context 32 --batch 4"


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Runs the example on a tiny model; returns its exit status and its results."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    main = importlib.import_module("train_fp8").main

    def run(*options):
        status = main([*TINY.split(), "--out", str(tmp_path), *options])
        return status, json.loads((tmp_path / "fp8_losses.json").read_text())

    return run


def test_losses_and_plot(example, tmp_path, capsys):
    status, results = example("--tolerance", "0.3")
    assert status == 0 and results["agree"]
    assert results["statistics"]["steps"] == STEPS and results["statistics"]["overflows"] == 0
    for losses in results["losses"].values():
        assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5
    assert results["losses"]["fp8"] != results["losses"]["bf16"]
    assert (tmp_path / "fp8_losses.png").read_bytes().startswith(b"\x89PNG")
    assert "fp8_layers 5" in capsys.readouterr().out


def test_a_wrong_product_is_noticed(example, monkeypatch):
    right = fp8_products.multiply_rows
    monkeypatch.setattr(fp8_linear, "multiply_rows", lambda *a, **b: -3 * right(*a, **b))
    status, results = example("--tolerance", "0.3")
    assert status == 1 and not results["agree"]
