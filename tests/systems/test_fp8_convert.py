"""convert_model_to_fp8: which layers, the same Parameters, and what it refuses."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from fp8_cases import decibels, mlp
from torch import nn
from torch.nn.utils import parametrizations

from flash_cute.core import AttentionLayer, OptimizedLinear
from flash_cute.precision import (
    FP8Config,
    FP8Format,
    FP8LinearLayer,
    convert_model_to_fp8,
    fp8_linear,
    fp8_products,
)
from flash_cute.precision.fp8_attention import FP8MultiheadAttention


def layers(model):
    return [module for module in model.modules() if isinstance(module, FP8LinearLayer)]


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def encoder_layer(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, **options)


MODELS = {
    "mlp": lambda: mlp(8, 3, 5, 1),
    "nested": lambda: nn.ModuleDict({"a": nn.ModuleList([nn.Linear(4, 4)]), "b": mlp(4, 8, 4)}),
    "encoder layer": encoder_layer,
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(batch_first=True), 2),
    "decoder": lambda: nn.TransformerDecoderLayer(16, 2, 32),
    "transformer": lambda: nn.Transformer(16, 2, 1, 1, 32),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_linear_and_the_same_parameters(make):
    model = make()
    count, before = len(linears(model)), dict(model.named_parameters())
    saved = copy.deepcopy(model.state_dict())
    assert convert_model_to_fp8(model) is model
    assert linears(model) == [] and len(layers(model)) == count > 0
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == list(saved)
    model.load_state_dict(saved)
    make().load_state_dict(model.state_dict())


def test_an_existing_optimizer_still_works(device):
    model = mlp(16, 32, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert_model_to_fp8(model)
    before = [p.clone() for p in model.parameters()]
    model(torch.randn(8, 16, device=device)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_out_of_place():
    model = mlp(8, 8, 8)
    converted = convert_model_to_fp8(model, inplace=False)
    assert len(linears(model)) == 2 and layers(model) == []
    assert len(layers(converted)) == 2
    assert converted[0].weight is not model[0].weight
    assert torch.equal(converted[0].weight, model[0].weight)


def test_the_root_and_modes():
    linear = nn.Linear(4, 2).eval()
    layer = convert_model_to_fp8(linear)
    assert isinstance(layer, FP8LinearLayer)
    assert layer.weight is linear.weight and not layer.training
    assert convert_model_to_fp8(mlp(4, 4)).training


def test_shared_layers_and_tied_weights():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Embedding(5, 8), shared, nn.GELU(), shared, nn.Linear(8, 5))
    model[4].weight = model[0].weight
    convert_model_to_fp8(model)
    assert model[1] is model[3] and len(layers(model)) == 2
    assert model[4].weight is model[0].weight
    model(torch.tensor([1, 2])).sum().backward()
    assert model[0].weight.grad[3].any()  # the gradient of the head reaches all rows


def test_twice_and_with_another_config():
    model = encoder_layer()
    convert_model_to_fp8(model, FP8Config(scaling="delayed"))
    model(torch.randn(3, 2, 32)).sum().backward()
    first = layers(model)
    history = first[0].scales.gradient_history.clone()
    assert history.any()
    for config in (None, FP8Config(scaling="delayed")):
        convert_model_to_fp8(model, config)
        assert layers(model) == first
        assert torch.equal(first[0].scales.gradient_history, history)
    other = FP8Config(backward_format=FP8Format.E4M3)
    convert_model_to_fp8(model, other)
    assert layers(model) == first
    assert all(layer.config is other for layer in first)
    assert model.self_attn.in_scales[0].config is other


def test_skip():
    model = nn.ModuleDict({"body": mlp(4, 4, 4), "head": nn.Linear(4, 9), "heads": mlp(4, 4)})
    convert_model_to_fp8(model, FP8Config(skip=("head", "body.2")))
    assert [type(model["body"][i]) for i in (0, 2)] == [FP8LinearLayer, nn.Linear]
    assert type(model["head"]) is nn.Linear and type(model["heads"][0]) is FP8LinearLayer
    with pytest.raises(ValueError, match="has no module foot"):
        convert_model_to_fp8(model, FP8Config(skip=("foot",)))


class Own(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


@pytest.mark.parametrize(
    "odd",
    [
        Own(4, 4),
        parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        nn.MultiheadAttention(4, 2, add_zero_attn=True),
    ],
    ids=["own forward", "parametrized", "bias_kv", "zero_attn"],
)
def test_what_is_left_is_named(odd):
    model = nn.ModuleDict({"odd": odd, "plain": nn.Linear(4, 4)})
    with pytest.warns(UserWarning, match=r"not converted to fp8: odd \(\w+\)"):
        convert_model_to_fp8(model)
    assert model["odd"] is odd and len(layers(model)) == 1
    assert layers(odd) == []


def test_a_forward_of_one_module_is_left():
    """As libraries replace it that move weights between devices."""
    for part in (nn.Linear(4, 4), nn.MultiheadAttention(4, 2)):
        part.forward = part.forward
        model = nn.Sequential(part, nn.Linear(4, 4))
        with pytest.warns(UserWarning, match=r"not converted to fp8: 0 \("):
            convert_model_to_fp8(model)
        assert model[0] is part


def test_layers_of_flash_cute():
    model = nn.Sequential(OptimizedLinear(8, 8), AttentionLayer(8, 2))
    with pytest.warns(UserWarning, match=r"not converted to fp8: 1\.in_proj_weight"):
        convert_model_to_fp8(model)
    assert isinstance(model[0], FP8LinearLayer) and isinstance(model[1].out_proj, FP8LinearLayer)


def test_refusals():
    with pytest.raises(ValueError, match=r"Conv2d has no nn\.Linear"):
        convert_model_to_fp8(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="0 is lazy and has no weight yet"):
        convert_model_to_fp8(nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(TypeError, match=r"an nn\.Module, not Tensor"):
        convert_model_to_fp8(torch.ones(1))
    with pytest.raises(TypeError, match="an FP8Config, not str"):
        convert_model_to_fp8(mlp(4, 4), "e4m3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_model_to_fp8(mlp(4, 4))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_is_fp8_in_train_eval_and_without_grad(
    device, batch_first, norm_first, activation
):
    """All three give one result, near fp32's but not nearer than fp8 comes: no kernel of torch
    goes past the layers."""
    options = {"batch_first": batch_first, "norm_first": norm_first, "activation": activation}
    plain = encoder_layer(**options).to(device)
    model = convert_model_to_fp8(plain, inplace=False)
    x = torch.randn(5, 7, 32, device=device)
    exact, trained = plain(x), model(x)
    assert 17 < decibels(trained - x, exact - x) < 45
    model.eval()
    torch.testing.assert_close(model(x), trained)
    with torch.no_grad():
        torch.testing.assert_close(model(x), trained)


def test_encoder_with_padding_in_eval(device):
    plain = nn.TransformerEncoder(encoder_layer(batch_first=True), 2).to(device).eval()
    model = convert_model_to_fp8(plain, inplace=False)
    x = torch.randn(3, 7, 32, device=device)
    hidden = torch.arange(7, device=device) >= torch.tensor([[7], [4], [5]], device=device)
    with torch.no_grad():
        exact, rounded = (m(x, src_key_padding_mask=hidden) for m in (plain, model))
    assert 17 < decibels(rounded[~hidden], exact[~hidden]) < 45


def test_encoder_layer_compiles_to_one_graph(device):
    model = convert_model_to_fp8(encoder_layer().to(device))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 3, 32, device=device)
    torch.testing.assert_close(compiled(x), model(x))


def test_linear_layers_inside_of_a_left_one():
    """As an adapter has them: what has a forward of its own stays, what it calls is converted."""
    adapted = Own(4, 4)
    adapted.inner = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="not converted"):
        model = convert_model_to_fp8(nn.Sequential(adapted))
    assert model[0] is adapted and type(adapted.inner) is FP8LinearLayer


def test_all_products_of_attention_are_fp8(device, monkeypatch):
    """Four projections, three of one input in one product, each forward and twice backward."""
    products = []

    def watched(a, b, *rest, **options):
        products.append((a.data.shape, b.data.shape))
        return fp8_products.multiply_rows(a, b, *rest, **options)

    monkeypatch.setattr(fp8_linear, "multiply_rows", watched)
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(32, 4, device=device)
    model = FP8MultiheadAttention.from_attention(copy.deepcopy(plain))
    x, y = torch.randn(2, 5, 2, 32, device=device, requires_grad=True)
    out, exact = (attention(x, x, x)[0] for attention in (model, plain))
    assert products == [((10, 32), (96, 32)), ((10, 32), (32, 32))]
    assert 14 < decibels(out, exact) < 45
    out.sum().backward()
    assert len(products) == 6
    products.clear()
    model(x, y, y)[0].sum().backward()
    assert products[:4] == [((10, 32), (32, 32))] * 4 and len(products) == 12
