"""UltraPrecisionModule: bytes that are really held, outputs, gradients, state."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from precision_models import (
    encoder,
    error,
    mixed_entropy,
    model_bytes,
    perceptron,
    reachable_bytes,
    uniformly_rounded,
)
from torch import Tensor, nn

from flash_cute.precision import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
    UltraPrecisionModule,
    create_ultra_precision_module,
)
from flash_cute.precision.packed import PackedWeight


def noise(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def config(target: float = 0.4, **fields: Any) -> PrecisionConfig:
    return PrecisionConfig(target_memory_reduction=target, **fields)


@pytest.mark.parametrize("target", [0.4, 0.6])
def test_the_budget_is_met_by_all_storages_and_reported(device: str, target: float):
    """C8: by tensors that can be reached from the module, not by nominal bits."""
    model = encoder(device)
    small = create_ultra_precision_module(model, config(target))
    stats, held = small.get_precision_stats(), reachable_bytes(small)
    assert held <= (1 - target) * model_bytes(model)
    assert held >= (1 - target - 0.03) * model_bytes(model)  # the budget is used
    assert stats.stored_bytes == held and stats.base_bytes == model_bytes(model)
    assert stats.memory_savings_ratio == pytest.approx(1 - held / model_bytes(model))
    x = noise(2, 9, 64, device=device)
    right = model(x)
    assert small(x).dtype == right.dtype and not torch.equal(small(x), right)
    assert error(small(x), right) < {0.4: 0.01, 0.6: 0.03}[target]


@pytest.mark.parametrize("mode", QuantizationMode)
@pytest.mark.parametrize("strategy", AllocationStrategy)
def test_every_strategy_and_mode(strategy: AllocationStrategy, mode: QuantizationMode):
    model, x = perceptron(layers=2), noise(5, 192)
    chosen = config(0.55, allocation_strategy=strategy, quantization_mode=mode)
    small = create_ultra_precision_module(model, chosen)
    assert reachable_bytes(small) <= 0.45 * model_bytes(model)
    assert 0 < error(small(x), model(x)) < 0.05


@pytest.mark.parametrize("target", [0.5, 0.6, 0.7, 0.8])
def test_layers_of_different_entropy_gain_over_uniform_bits(target: float):
    """C7 and C15: error of at most 0.7 of the best whole number of bits in the module's bytes."""
    model, x = mixed_entropy(), noise(32, 128)
    small = create_ultra_precision_module(model, config(target))
    held = reachable_bytes(small)
    exact = copy.deepcopy(model).double()(x.double())
    rivals = [uniformly_rounded(model, bits) for bits in range(1, 17)]
    best = min(error(m(x.double()), exact) for m, nbytes in rivals if nbytes <= held)
    assert error(small.double()(x.double()), exact) <= 0.7 * best
    layers = list(small.get_precision_stats().layers.values())
    one_bit, gaussian, three = (layers[i::3] for i in range(3))
    assert max(layer.bits for layer in one_bit) < 1.5
    assert max(layer.bits for layer in three) < 2.5
    assert min(layer.bits for layer in gaussian) > 3
    assert all(layer.relative_error == 0 for layer in one_bit + three)


@pytest.mark.parametrize("strategy", list(AllocationStrategy)[1:])
def test_every_strategy_gives_few_valued_layers_few_bits_without_loss(strategy: AllocationStrategy):
    """Those that probe layers must not conclude that exact ones do not matter."""
    model, x = mixed_entropy(), noise(32, 128)
    small = create_ultra_precision_module(
        model, config(0.7, allocation_strategy=strategy), calibration=x
    )
    assert error(small(x), model(x)) < 0.01  # of 4.8 whole bits: 0.15


def test_output_is_that_of_a_model_with_the_restored_weights():
    """Through the fused path of eval mode, the plain one, and with gradients."""
    model, x = encoder(), noise(2, 9, 64)
    small = create_ultra_precision_module(model, config(0.6))
    plain = encoder()
    for name, weight in plain.named_parameters():
        owner, _, key = name.rpartition(".")
        weight.data = getattr(small.model.get_submodule(owner), key).detach().clone()
    with torch.no_grad():
        torch.testing.assert_close(small(x), plain(x), rtol=0, atol=4e-3)
    for x_of in (x.clone().requires_grad_(), x.clone().requires_grad_()):
        torch.testing.assert_close(small(x_of), plain(x_of), rtol=0, atol=4e-3)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for module, each in zip((small, plain), inputs, strict=True):
        (module(each).float() * noise(2, 9, 64).float()).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=2e-2)


def test_restored_weights_are_let_go_before_backward(monkeypatch: pytest.MonkeyPatch):
    """Otherwise a call with gradients would hold the whole model again."""
    small, x = create_ultra_precision_module(encoder(), config(0.6)), noise(2, 9, 64)
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    restore = PackedWeight.forward

    def watched(packed: PackedWeight, original: Tensor | None = None) -> Tensor:
        weight = restore(packed, original)
        storages.append(weakref.ref(weight.untyped_storage()))
        return weight

    monkeypatch.setattr(PackedWeight, "forward", watched)
    grads = []
    for call in (small.model, small):
        leaf = x.clone().requires_grad_()
        storages.clear()
        loss = (call(leaf).float() * noise(2, 9, 64).float()).sum()
        gc.collect()
        alive = sum(storage() is not None for storage in storages)
        assert len(storages) >= 8 and (alive >= 8 if call is small.model else alive == 0)
        grads.append(torch.autograd.grad(loss, leaf)[0])
    assert torch.equal(*grads)


def test_the_model_is_left_alone_and_not_held():
    model = encoder().train()
    before = copy.deepcopy(model.state_dict())
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    generator = torch.get_rng_state()
    chosen = config(0.6, allocation_strategy=AllocationStrategy.GRADIENT_WEIGHTED)
    small = create_ultra_precision_module(model, chosen, calibration=noise(2, 9, 64))
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training and small.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert storages.isdisjoint(t.untyped_storage().data_ptr() for t in small.parameters())
    assert {name.rpartition(".")[2] for name, _ in small.named_parameters()} <= {
        "bias", "in_proj_bias", "weight",
    }  # fmt: skip
    assert all(p.dim() == 1 for p in small.parameters())


def test_state_has_the_packed_form_and_replaces_any_allocation():
    model, x = encoder(), noise(2, 9, 64)
    small = create_ultra_precision_module(model, config(0.6))
    file = io.BytesIO()
    torch.save(small.state_dict(), file)
    assert file.tell() < 0.4 * model_bytes(model) + 60_000
    file.seek(0)
    torch.manual_seed(5)
    other_model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2
    ).half()
    other = create_ultra_precision_module(other_model.eval(), config(0.2))
    assert not torch.equal(other(x), small(x))
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), small(x))
    assert other.get_precision_stats() == small.get_precision_stats()
    copied = copy.deepcopy(small)
    assert torch.equal(copied(x), small(x)) and reachable_bytes(copied) == reachable_bytes(small)
    wider = create_ultra_precision_module(perceptron(width=64), config())
    with pytest.raises((ValueError, RuntimeError)):
        wider.load_state_dict(
            create_ultra_precision_module(perceptron(width=128), config()).state_dict()
        )


def test_a_change_of_dtype_or_device_leaves_the_codes(device: str):
    model, x = encoder(), noise(2, 9, 64)
    small = create_ultra_precision_module(model, config(0.6), device)
    assert all(t.device.type == device for t in [*small.parameters(), *small.buffers()])
    if device == "cpu":
        wide = copy.deepcopy(small).double()
        assert wide(x.double()).dtype == torch.float64
        assert error(wide(x.double()), small(x)) < 2e-3
        codes = [b.nbytes for b in small.buffers()]
        assert sum(b.nbytes for b in wide.buffers()) == sum(codes)
    right = create_ultra_precision_module(model, config(0.6))(x)
    assert error(small(x.to(device)).cpu(), right) < 2e-3


class Tied(nn.Module):
    """A weight that two layers share, a convolution, an RNN and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, 64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.rnn = nn.GRU(64, 64, batch_first=True)
        self.place = nn.Parameter(torch.randn(1, 7, 64) * 0.1)
        self.head = nn.Linear(64, 301, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place
        return self.head(self.rnn(self.conv(x.mT).mT)[0])


def test_tied_weights_are_held_once_and_odd_layers_work():
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(301, (2, 7))
    chosen = config(0.3, base_precision=PrecisionFormat.FP32)
    small = create_ultra_precision_module(model, chosen)
    assert reachable_bytes(small) <= 0.7 * model_bytes(model)
    assert set(small.get_precision_stats().layers) == {"embed.weight", "conv.weight", "place"}
    assert 0 < error(small(ids), model(ids)) < 0.01
    embedded = small.model.embed(ids)
    assert torch.equal(embedded, small.model.head.weight[ids])


@pytest.mark.parametrize("base", [PrecisionFormat.INT8, PrecisionFormat.FP8_E4M3])
def test_eight_bit_bases_round_inputs(base: PrecisionFormat):
    """DYNAMIC: each token by its own scale. STATIC: by that of calibration. WEIGHT_ONLY: not."""
    model, x = perceptron(layers=2).float(), noise(6, 192).float()
    fields: dict[str, Any] = {"base_precision": base}
    small = {
        mode: create_ultra_precision_module(
            model, config(0.2, quantization_mode=mode, **fields), calibration=x
        )
        for mode in QuantizationMode
    }
    assert all(reachable_bytes(m) <= 0.8 * model_bytes(model) / 4 + 8 for m in small.values())
    outputs = {mode: module(x) for mode, module in small.items()}
    assert len({out.sum().item() for out in outputs.values()}) == 3
    assert all(0 < error(out, model(x)) < 0.2 for out in outputs.values())
    # One token 1000 times as large ruins its neighbours under one scale, not under their own.
    x[0] *= 1000
    torch.testing.assert_close(
        small[QuantizationMode.DYNAMIC](x)[1:], outputs[QuantizationMode.DYNAMIC][1:]
    )
    static = config(0.2, quantization_mode=QuantizationMode.STATIC, **fields)
    fresh = create_ultra_precision_module(model, static)(x)[1:]  # this call sets the scale
    if base is PrecisionFormat.INT8:
        kept = outputs[QuantizationMode.STATIC][1:]
        assert error(fresh, model(x)[1:]) > 2 * error(kept, model(x)[1:])
    x.requires_grad_()
    small[QuantizationMode.DYNAMIC](x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_scales_along_rows_help_where_columns_differ():
    """DYNAMIC may scale 64 columns on their own, STATIC may not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).half()
    model[0].weight.data[:, 128:] *= 30
    small = {
        mode: create_ultra_precision_module(model, config(0.7, quantization_mode=mode))
        for mode in (QuantizationMode.STATIC, QuantizationMode.DYNAMIC)
    }
    x = noise(16, 256)
    x[:, 128:] /= 30
    errors = {mode: error(module(x), model(x)) for mode, module in small.items()}
    assert errors[QuantizationMode.DYNAMIC] < 0.3 * errors[QuantizationMode.STATIC]


def outlier_inputs() -> tuple[nn.Sequential, Tensor]:
    """In the second layer, half of the channels are 100 times as large, and their weights a tenth:
    rounding them by their row costs more than its part of the weights says. The first layer's bias
    is most of what it gives: its weights matter little."""
    model = perceptron(layers=3, width=128).float()
    model[0].weight.data[:64] *= 100
    model[2].weight.data[:, 64:] *= 10
    model[0].bias.data[:64] = 3000
    return model, noise(64, 128).float()


def calibrated(**fields: Any) -> UltraPrecisionModule:
    model, x = outlier_inputs()
    return create_ultra_precision_module(model, config(0.7, **fields), calibration=x)


@pytest.mark.parametrize(
    "fields",
    [
        {"base_precision": PrecisionFormat.FP32},
        {"allocation_strategy": AllocationStrategy.UNIFORM},
        {"quantization_mode": QuantizationMode.STATIC},
        {"entropy_threshold": 3.5},
        {"target_memory_reduction": 0.5},
        {"gradient_weight": 0.0},
        {"activation_weight": 0.0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_config_field_changes_the_packed_model(fields: dict[str, Any]):
    model, x = outlier_inputs()
    changed = PrecisionConfig(**{"target_memory_reduction": 0.7, **fields})
    small = create_ultra_precision_module(model, changed, calibration=x)
    before = {n: layer.blocks for n, layer in calibrated().get_precision_stats().layers.items()}
    after = {n: layer.blocks for n, layer in small.get_precision_stats().layers.items()}
    assert before != after


def test_changes_before_backward_are_noticed():
    """As torch notices them of any module."""
    net = nn.Sequential(nn.Linear(128, 128), nn.Sigmoid())
    small = create_ultra_precision_module(net, PrecisionConfig(target_memory_reduction=0.3))
    x = torch.randn(4, 128, requires_grad=True)
    out = small(x)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = small(x)
    small.load_state_dict(small.state_dict())
    with pytest.raises(RuntimeError, match="packed weights that backward needs were changed"):
        out.sum().backward()
    small(x).sum().backward()


def test_padding_of_an_encoder_whose_inputs_are_rounded():
    """torch's own way would hand nested tensors to the layers."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 1)
    config = PrecisionConfig(PrecisionFormat.INT8, target_memory_reduction=0.1)
    small = create_ultra_precision_module(encoder.eval(), config)
    x, padding = torch.randn(2, 5, 64), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        out = small(x, src_key_padding_mask=padding)
    error = (out - encoder(x, src_key_padding_mask=padding))[~padding].abs().max()
    assert out.shape == x.shape and error < 0.2


def test_weights_above_1_together_are_shares():
    model, x = outlier_inputs()
    halves, more = (
        create_ultra_precision_module(
            model,
            PrecisionConfig(target_memory_reduction=0.7, gradient_weight=g, activation_weight=g),
            calibration=x,
        ).get_precision_stats()
        for g in (0.5, 0.8)
    )
    assert halves == more


def test_a_config_may_change_and_is_validated_when_it_is_taken():
    model, config = nn.Sequential(nn.Linear(128, 128)), PrecisionConfig()
    config.target_memory_reduction = 0.6
    small = create_ultra_precision_module(model, config)
    config.target_memory_reduction = 3
    assert small.config.target_memory_reduction == 0.6
    with pytest.raises(ValueError, match="target_memory_reduction"):
        create_ultra_precision_module(model, config)


def test_the_entropy_threshold_is_a_floor_of_rich_layers():
    small = create_ultra_precision_module(
        mixed_entropy(),
        config(0.6, entropy_threshold=7.2, quantization_mode=QuantizationMode.STATIC),
    )
    for layer in small.get_precision_stats().layers.values():
        least = min(layout.format.bits for _, layout in layer.blocks)
        assert least >= 8 if layer.entropy > 7.2 else least <= 2


@pytest.mark.parametrize(
    "strategy", [AllocationStrategy.GRADIENT_WEIGHTED, AllocationStrategy.SENSITIVITY]
)
def test_calibrated_strategies_know_which_layer_matters(strategy: AllocationStrategy):
    """Two paths, one of a thousandth of the output: the other gets the bits, and the error is less
    than that of uniform bits."""

    class Paths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loud, self.quiet = nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            return self.loud(x) + 1e-3 * self.quiet(x)

    torch.manual_seed(0)
    model, x = Paths(), noise(32, 128).float()
    modules = {
        each: create_ultra_precision_module(
            model, config(0.6, allocation_strategy=each), calibration=[x[:16], (x[16:],)]
        )
        for each in (strategy, AllocationStrategy.UNIFORM)
    }
    layers = modules[strategy].get_precision_stats().layers
    assert layers["loud.weight"].bits > layers["quiet.weight"].bits + 5
    errors = {each: error(module(x), model(x)) for each, module in modules.items()}
    assert errors[strategy] < 0.2 * errors[AllocationStrategy.UNIFORM]


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda m: create_ultra_precision_module(m, config(0.97)), ValueError, "at most 0.8"),
        (lambda m: create_ultra_precision_module(m.weight), TypeError, "model must be"),
        (lambda m: create_ultra_precision_module(m, {}), TypeError, "must be a PrecisionConfig"),
        (
            lambda m: create_ultra_precision_module(nn.LayerNorm(64), config()),
            ValueError,
            "at most 0.0 of",
        ),
        (
            lambda m: create_ultra_precision_module(m, config(), calibration=[]),
            ValueError,
            "at least one batch",
        ),
        (
            lambda m: create_ultra_precision_module(
                nn.Sequential(nn.Conv2d(8, 8, 3)),
                config(allocation_strategy=AllocationStrategy.SENSITIVITY),
            ),
            ValueError,
            "pass calibration=",
        ),
    ],
)
def test_refusals(call: Callable[[nn.Module], Any], kind: type[Exception], words: str):
    with pytest.raises(kind, match=words):
        call(nn.Linear(256, 256).half())


def test_weights_that_are_not_finite_are_refused():
    model = nn.Linear(64, 64)
    model.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        create_ultra_precision_module(model)


def test_the_highest_target_that_a_refusal_names_can_be_had():
    model = encoder()
    with pytest.raises(ValueError, match="at most ") as refusal:
        create_ultra_precision_module(model, config(0.99))
    most = float(str(refusal.value).split("at most ")[1].split()[0])
    small = create_ultra_precision_module(model, config(most))
    assert reachable_bytes(small) <= (1 - most) * model_bytes(model)
