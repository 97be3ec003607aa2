"""What an error of each weight counts, by the formulas of docs/adaptive_precision.md."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from flash_cute.precision import AllocationStrategy, PrecisionConfig
from flash_cute.precision.plan import packable
from flash_cute.precision.sensitivity import (
    batches,
    calibrate,
    entropy,
    error_per_noise,
    error_weights,
    generated_samples,
    outputs_of,
    state_preserved,
)


def linear() -> tuple[nn.Linear, Tensor]:
    """Many outputs, so that random projections tell the mean well; inputs of unequal channels."""
    torch.manual_seed(0)
    return nn.Linear(48, 512), torch.randn(20, 48) * torch.linspace(0.1, 3, 48)


def two_layers() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 24, bias=False))
    model[0].weight.data *= 3
    return model, torch.randn(10, 16) * torch.linspace(0.5, 2, 16)


def weights_of(strategy: str, samples: Tensor | None, **fields: float) -> dict[str, float]:
    model, _ = two_layers()
    config = PrecisionConfig(allocation_strategy=AllocationStrategy(strategy), **fields)
    return error_weights(model, packable(model), config, samples)


def test_of_a_linear_layer_all_is_known():
    """The Jacobian of outputs by a weight is its input: squares add up over tokens."""
    model, x = linear()
    weights = packable(model)
    found = calibrate(model, weights, x)
    squares = x.square().sum(0)
    torch.testing.assert_close(found.moments["weight"], squares)
    assert found.power == pytest.approx(model(x).square().sum().item())
    # 4 projections of 512 rows each: a deviation of sqrt(2 / 2048) or less.
    exact = squares.mean().item()
    assert found.gradients["weight"] == pytest.approx(exact, rel=4 * math.sqrt(2 / 2048))
    by_noise = error_per_noise(model, weights, x)["weight"]
    assert by_noise == pytest.approx(exact, rel=4 * math.sqrt(2 / (48 * 512)) + 0.05)


def test_samples_add_up_and_calls_take_several_arguments():
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
            x = x if y is None else x + y
            return self.linear(x), {"again": 2 * self.linear(x), "ids": torch.ones(2).int()}

    model = Added()
    x, y = torch.randn(2, 5, 8)
    found = calibrate(model, packable(model), [x, (x, y)])
    power = sum(5 * model.linear(z).square().sum().item() for z in (x, x + y))
    assert found.power == pytest.approx(power)
    moments = 2 * (x.square() + (x + y).square()).sum(0)
    torch.testing.assert_close(found.moments["linear.weight"], moments)
    assert [len(call) for call in batches([x, (x, y)])] == [1, 2] and len(batches(x)) == 1
    assert [t.shape[0] for t in outputs_of(model(x))] == [5, 5]
    with pytest.raises(ValueError, match="calibration must have at least one batch"):
        calibrate(model, packable(model), [])
    with pytest.raises(ValueError, match=r"batch 1 of the samples has shape \(0, 8\)"):
        calibrate(model, packable(model), [x, x[:0]])
    with pytest.raises(ValueError, match="output has no gradient of any weight"):
        calibrate(nn.Sequential(nn.Linear(8, 8), nn.Flatten(), Constant()), {}, x)


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(len(x), 2)


def relative() -> dict[str, float]:
    model, _ = two_layers()
    return {name: 1 / w.square().sum().item() for name, w in packable(model).items()}


def by_inputs(x: Tensor) -> dict[str, float]:
    """mean(m) / sum(m W^2)"""
    model, _ = two_layers()
    found = {}
    for name, values in (("0", x), ("1", model[0](x))):
        m = values.square().mean(0)
        power = (m * model[int(name)].weight.square()).sum()
        found[f"{name}.weight"] = (m.mean() / power).item()
    return found


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("strategy", ["uniform", "entropy_based"])
def test_without_data_errors_count_relative_to_weights(strategy: str, samples: bool):
    _, x = two_layers()
    if strategy == "entropy_based" and samples:
        off = {"gradient_weight": 0.0, "activation_weight": 0.0}
        found = weights_of(strategy, x, **off)
        ratio = found["0.weight"] / found["1.weight"]
        assert ratio == pytest.approx(relative()["0.weight"] / relative()["1.weight"], rel=1e-4)
    else:
        assert weights_of(strategy, x if samples else None) == pytest.approx(relative())


def test_activations_and_gradients_count_as_the_formulas_say():
    model, x = two_layers()
    found = weights_of("activation_aware", x)
    assert found == pytest.approx(by_inputs(x), rel=1e-4)
    of_gradients = weights_of("gradient_weighted", x)
    assert of_gradients == calibrate(model, packable(model), x).gradients
    second = model[0](x).square().sum(0).mean().item()  # the last layer's Jacobian is its input
    assert of_gradients["1.weight"] == pytest.approx(second, rel=4 * math.sqrt(2 / 96))
    assert weights_of("sensitivity", x) == error_per_noise(model, packable(model), x)


@pytest.mark.parametrize(
    ("g", "a"), [(0.3, 0.4), (1.0, 0.0), (0.0, 1.0), (0.2, 0.1), (1.0, 1.0), (0.5, 1.0)]
)
def test_entropy_based_multiplies_the_three_by_their_exponents(g: float, a: float):
    """E^(1-g-a) A^a G^g over geometric means, so that their product over layers is 1; exponents
    of more than 1 together are divided by their sum."""
    _, x = two_layers()
    found = weights_of("entropy_based", x, gradient_weight=g, activation_weight=a)
    g, a = g / max(1, g + a), a / max(1, g + a)
    parts = ((relative(), 1 - g - a), (by_inputs(x), a), (weights_of("gradient_weighted", x), g))
    ratio = math.prod((of["0.weight"] / of["1.weight"]) ** power for of, power in parts)
    assert found["0.weight"] / found["1.weight"] == pytest.approx(ratio, rel=1e-3)
    assert math.prod(found.values()) == pytest.approx(1)


def test_layers_whose_inputs_are_not_seen_count_relative_to_weights():
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(48, 8))
    x = torch.randn(5, 4, 8)
    config = PrecisionConfig(allocation_strategy=AllocationStrategy.ACTIVATION_AWARE)
    found = error_weights(model, packable(model), config, x)
    assert found["0.weight"] == pytest.approx(1 / model[0].weight.square().sum().item())
    assert found["2.weight"] != pytest.approx(1 / model[2].weight.square().sum().item())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 5)), (16, 12)),
        (nn.Embedding(7, 4), (2, 16)),
        (nn.TransformerEncoderLayer(8, 2, 16), (16, 2, 8)),
    ],
    ids=["linear", "embedding", "encoder"],
)
def test_samples_are_made_up_for_the_first_layer(model: nn.Module, shape: tuple[int, ...]):
    found = generated_samples(model)
    assert found.shape == shape and torch.equal(found, generated_samples(model))
    if isinstance(model, nn.Embedding):
        assert found.min() >= 0 and found.max() < 7 and len(found.unique()) > 3
    else:
        assert found.dtype == torch.float32 and 0.7 < found.std() < 1.3
    model(found)
    with pytest.raises(ValueError, match="the first layer of Conv1d: pass calibration="):
        generated_samples(nn.Conv1d(4, 4, 3))


def test_modes_and_generators_are_as_before_an_error_too():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4))
    model[1].eval()
    before = torch.get_rng_state()
    with pytest.raises(KeyError), state_preserved(model):
        assert not any(module.training for module in model.modules())
        torch.rand(3)
        raise KeyError
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_entropy_of_as_many_equal_values_is_their_bits(bits: int):
    """Of any size, each row alone: values are taken over the largest of their row."""
    levels = torch.linspace(-1, 1, 2**bits).repeat(6, 4)
    assert entropy(levels) == pytest.approx(bits, abs=1e-5)
    assert entropy(levels * torch.logspace(-9, 9, 6)[:, None]) == pytest.approx(bits, abs=1e-5)
    padded = torch.cat((levels, torch.zeros(2, levels.shape[1])))  # 2 of 8 rows of 0
    share = levels.numel() / padded.numel()
    expected = share * bits - share * math.log2(share) - (1 - share) * math.log2(1 - share)
    assert entropy(padded) == pytest.approx(expected, abs=1e-5)
