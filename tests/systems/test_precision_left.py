"""What packing leaves as it is: what it cannot replace, or could only replace in one of its
places."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from precision_models import error, model_bytes, reachable_bytes
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm

from flash_cute.precision import (
    PrecisionConfig,
    PrecisionFormat,
    analyze_precision_opportunities,
    create_ultra_precision_module,
)


def config(target: float = 0.1) -> PrecisionConfig:
    return PrecisionConfig(PrecisionFormat.FP32, target_memory_reduction=target)


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nn.utils.weight_norm(layer)


def pruned(layer: nn.Module) -> nn.Module:
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


DERIVED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": old_weight_norm, "spectral norm": spectral_norm, "pruning": pruned,
}  # fmt: skip


@pytest.mark.parametrize("name", DERIVED)
def test_weights_that_others_derive_from_stay(name: str):
    """The derived weight is held in full: packing what it comes from would save nothing."""
    torch.manual_seed(0)
    first = DERIVED[name](nn.Linear(128, 128))
    model, x = nn.Sequential(first, nn.ReLU(), nn.Linear(128, 512)).eval(), torch.randn(5, 128)
    model(x)
    small = create_ultra_precision_module(model, config())
    stats = small.get_precision_stats()
    assert set(stats.layers) == {"2.weight"}
    assert 0 < error(small(x), model(x)) < 0.05
    assert stats.stored_bytes == reachable_bytes(small) <= 0.9 * model_bytes(model)
    small.train()(x).sum().backward()
    assert all(p.grad is not None for p in small.parameters() if p.requires_grad)


class HoldsWeightTwice(nn.Module):
    """Reads a weight under a second name that no registry knows."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(128, 128), nn.Linear(128, 256)
        weight = self.linear.weight
        self.held = {
            "list": [weight], "dict": {"w": (weight,)}, "nested": [{"deep": [weight]}],
        }[where]  # fmt: skip
        self.held = [self.held, self.held]
        self.held.append(self.held)  # a cycle

    def forward(self, x: Tensor) -> Tensor:
        value = self.held[0]
        while not isinstance(value, Tensor):
            value = next(iter(value.values())) if isinstance(value, dict) else value[0]
        return self.other(self.linear(x) + x @ value * len(value))


@pytest.mark.parametrize("where", ["list", "dict", "nested"])
def test_weights_that_a_list_holds_besides_stay(where: str):
    torch.manual_seed(0)
    model, x = HoldsWeightTwice(where), torch.randn(5, 128)
    small = create_ultra_precision_module(model, config())
    assert set(small.get_precision_stats().layers) == {"other.weight"}
    assert 0 < error(small(x), model(x)) < 0.02
    assert small.model.held[0] is not model.held[0]


def test_layers_that_a_list_holds_stay_and_are_counted():
    """Their weights are no parameters of the model, but in memory."""
    torch.manual_seed(0)
    model, x = HoldsWeightTwice("list"), torch.randn(5, 128)
    model.held, hidden = [torch.eye(128)], nn.Linear(128, 128)
    before = create_ultra_precision_module(model, config()).get_precision_stats()
    model.hidden = {"it": [nn.Sequential(hidden), model.other]}
    small = create_ultra_precision_module(model, config())
    stats = small.get_precision_stats()
    assert set(stats.layers) == {"linear.weight", "other.weight"}
    assert torch.equal(small.model.hidden["it"][0][0].weight, hidden.weight)
    assert stats.base_bytes == before.base_bytes
    assert stats.stored_bytes == reachable_bytes(small) > model_bytes(nn.Sequential(hidden))
    assert 0 < error(small(x), model(x)) < 0.05


def test_weights_of_eight_bits_stay():
    model, x = nn.Linear(128, 256), torch.randn(3, 128)
    codes = torch.randn(64, 64).to(torch.float8_e4m3fn)
    model.codes = nn.Parameter(codes, requires_grad=False)
    small = create_ultra_precision_module(model, config())
    assert torch.equal(small.model.codes.float(), codes.float())
    assert error(small(x), model(x)) < 0.02


def test_analysis_of_such_models():
    model = nn.Sequential(spectral_norm(nn.Linear(128, 128)), nn.Linear(128, 512)).half().eval()
    state = copy.deepcopy(model.state_dict())
    found = analyze_precision_opportunities(model, torch.randn(4, 128).half())
    assert {row["layer"] for row in found["recommendations"]} <= {"1.weight"}
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
