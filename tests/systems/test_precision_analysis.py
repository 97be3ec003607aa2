"""analyze_precision_opportunities: what it promises can be had, and it changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from precision_models import encoder, error, mixed_entropy, model_bytes, reachable_bytes
from torch import Tensor, nn

from flash_cute.precision import (
    PrecisionConfig,
    analyze_precision_opportunities,
    create_ultra_precision_module,
)


def sample(*shape: int, device: str = "cpu") -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return noise.to(device, torch.float16)


def test_what_is_promised_can_be_had(device: str):
    model, x = encoder(device), sample(2, 9, 64, device=device)
    found = analyze_precision_opportunities(model, x)
    small = create_ultra_precision_module(model, found["config"], calibration=x)
    saved = model_bytes(model) - reachable_bytes(small)
    assert saved == found["potential_savings"] > 0.4 * model_bytes(model)
    assert found["potential_savings_ratio"] == pytest.approx(saved / model_bytes(model))
    off = error(small(x), model(x))
    assert 0 < off <= 0.0101 and off == pytest.approx(found["measured_error"], rel=0.05)
    rows = found["recommendations"]
    assert {row["layer"] for row in rows} <= {name for name, _ in model.named_parameters()}
    assert sum(row["saved_bytes"] for row in rows) == pytest.approx(saved, abs=64)
    layers = small.get_precision_stats().layers
    for row in rows:
        layer = layers[row["layer"]]
        assert row["bits"] == layer.bits and row["entropy"] == layer.entropy
        assert set(row["format"].split("+")) == {each.format.value for _, each in layer.blocks}
    # Parts of the error add up to what is measured, but for what fp16 loses itself.
    together = sum(row["expected_error"] ** 2 for row in rows) ** 0.5
    assert 0.4 * off < together < 2 * off
    default = PrecisionConfig(target_memory_reduction=found["potential_savings_ratio"])
    assert reachable_bytes(create_ultra_precision_module(model, default)) <= (
        model_bytes(model) - saved
    )


def test_low_entropy_saves_more():
    """And few bits are recommended where the values are few."""
    torch.manual_seed(0)
    gaussian = copy.deepcopy(mixed_entropy())
    for weight in gaussian.parameters():
        weight.data = (torch.randn(weight.shape) / weight.shape[1] ** 0.5).half()
    x = sample(16, 128)
    mixed, plain = (analyze_precision_opportunities(m, x) for m in (mixed_entropy(), gaussian))
    assert mixed["potential_savings"] > 1.2 * plain["potential_savings"]
    formats = {row["layer"]: row["format"] for row in mixed["recommendations"]}
    assert formats["0.weight"] == "int1" and formats["4.weight"] == "int2"


class Counted(nn.Module):
    """Counts calls, draws random numbers and has a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.linear, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> dict[str, Any]:
        if not torch.compiler.is_compiling():
            Counted.seen = getattr(Counted, "seen", 0) + 1  # type: ignore[attr-defined]
        return {"out": self.norm(self.linear(x) + torch.rand_like(x) * 1e-3), "none": None}


def test_it_runs_the_sample_and_changes_nothing():
    torch.manual_seed(0)
    model, x = Counted().train(), sample(8, 64).float()
    model.norm.eval()
    model.linear.weight.grad = torch.ones(64, 64)
    model.linear.bias.requires_grad_(False)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    Counted.seen = 0  # type: ignore[attr-defined]
    analyze_precision_opportunities(model, x)
    assert Counted.seen >= 1  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training and model.linear.training and not model.norm.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model.linear.weight.grad, torch.ones(64, 64))
    assert model.linear.weight.requires_grad and not model.linear.bias.requires_grad
    assert model.norm.weight.grad is None and x.grad is None
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_nothing_to_save_and_refusals():
    found = analyze_precision_opportunities(nn.Linear(4, 4).half(), sample(2, 4))
    assert found["potential_savings"] == 0 and found["recommendations"] == []
    with pytest.raises(TypeError, match="model must be"):
        analyze_precision_opportunities(sample(2), sample(2, 4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sample_input must be a tensor, not list"):
        analyze_precision_opportunities(nn.Linear(4, 4), [sample(2, 4)])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        analyze_precision_opportunities(nn.Linear(64, 64).half(), sample(2, 5))


@pytest.mark.parametrize("call", [analyze_precision_opportunities, create_ultra_precision_module])
@pytest.mark.parametrize("device", ["cuda:99", torch.device("xpu:77"), "abacus"])
def test_an_unavailable_device_is_refused_before_the_model_runs(call, device):
    model, x = Counted(), sample(8, 64).float()
    Counted.seen = 0  # type: ignore[attr-defined]
    given = {"calibration": x} if call is create_ultra_precision_module else {"sample_input": x}
    with pytest.raises(ValueError, match="device is "):
        call(model, device=device, **given)
    assert Counted.seen == 0  # type: ignore[attr-defined]
