"""benchmarks/fp8_accuracy.py and fp8_training.py: what they measure, on the CPU at small sizes."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import fp8_accuracy, fp8_training


@pytest.mark.parametrize("causal", [False, True])
def test_errors_of_recipes(causal):
    torch.manual_seed(0)
    found = fp8_accuracy.rmse(64, causal, "cpu", None, seqlen=256)
    assert set(fp8_accuracy.RECIPES) < set(found)
    assert found["bf16"] < 0.1 * min(found[name] for name in fp8_accuracy.RECIPES)
    assert found["all"] < found["head"] < 0.1


def test_the_reference_of_sums_has_the_weights_of_the_op():
    """The CPU adds in fp32: what is left is out's own rounding. Exact weights are 30 dB off."""
    torch.manual_seed(0)
    found = fp8_accuracy.sums("cpu", None, keys=2048, heads=2, dim=32)
    assert all(68 < x < 80 for x in found.values())


def test_decibels():
    reference = torch.tensor([3.0, 4.0]).double()
    assert fp8_accuracy.decibels(reference + torch.tensor([0.3, 0.4]), reference) == pytest.approx(
        20
    )


def test_keys_are_found_beyond_a_margin(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(fp8_accuracy, "MARGINS", (0.0, 12.0))
    low, high = fp8_accuracy.planted("cpu", None, keys=1024, heads=2, rows=32)
    assert low.pop("margin") == 0 and high.pop("margin") == 12
    assert all(x < 0.3 for x in low.values()) and all(x == 1 for x in high.values())


def test_training_reports_losses(tmp_path):
    path = tmp_path / "training.json"
    assert fp8_training.main(["--steps", "2", "--json", str(path)]) == 0
    loss = json.loads(path.read_text())["loss"]
    assert 0 < abs(loss["fp8"] - loss["bf16"]) < 0.05 * loss["bf16"]


def test_parts_of_a_step_are_those_of_the_layer():
    q = torch.randn(1, 40, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    out = fp8_training.fp8_attention(q, q, q, "head")
    assert out.dtype == q.dtype and out.shape == q.shape
    out.sum().backward()
    assert q.grad is not None and q.grad.dtype == q.dtype
