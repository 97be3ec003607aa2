"""What fp8 layers must not stand for: hooks, parameters and computed weights that would be lost."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from fp8_cases import mlp
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from flash_cute.core import OptimizedLinear
from flash_cute.precision import FP8Config, FP8LinearLayer, convert_model_to_fp8
from flash_cute.precision.fp8_attention import FP8MultiheadAttention


class WithProperty(nn.Linear):
    @property
    def scale(self):
        return 2.0


class ComputedWeight(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.low = nn.Parameter(self.weight.detach())
        del self.weight

    @property
    def weight(self):
        return 2 * self.low


class WithMethod(nn.Linear):
    def merge(self):
        return self.weight


class WithCall(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) + 1


class Subclass(nn.Linear):
    """Only its own first values."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.kind = "square"


def changed(change):
    linear = nn.Linear(8, 8)
    change(linear)
    return linear


def tensor_weight(linear):
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = weight


def quiet_weight_norm(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weight_norm(linear)


class Tagged(torch.Tensor):
    pass


HOOKS = {
    "forward hook": lambda m: m.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "hook with kwargs": lambda m: m.register_forward_hook(lambda *_: None, with_kwargs=True),
    "backward hook": lambda m: m.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "state_dict hook": lambda m: m.register_state_dict_post_hook(lambda *_: None),
    "state_dict pre-hook": lambda m: m.register_state_dict_pre_hook(lambda *_: None),
    "load hook": lambda m: m.register_load_state_dict_pre_hook(lambda *_: None),
    "load post-hook": lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
}
MORE_THAN_LINEAR = {
    **{name: lambda hook=hook: changed(hook) for name, hook in HOOKS.items()},
    "old weight_norm": lambda: quiet_weight_norm(nn.Linear(8, 8)),
    "spectral_norm": lambda: spectral_norm(nn.Linear(8, 8)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
    "pruned bias": lambda: prune.random_unstructured(nn.Linear(8, 8), "bias", 0.5),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "parametrized bias": lambda: parametrize.register_parametrization(
        nn.Linear(8, 8), "bias", nn.Identity()
    ),
    "parameter": lambda: changed(lambda m: m.register_parameter("gain", nn.Parameter(m.bias * 2))),
    "buffer": lambda: changed(lambda m: m.register_buffer("mask", torch.ones(8))),
    "child": lambda: changed(lambda m: m.add_module("adapter", nn.Identity())),
    "weight of no Parameter": lambda: changed(tensor_weight),
    "subclass of Tensor": lambda: changed(
        lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach().as_subclass(Tagged)))
    ),
    "complex": lambda: nn.Linear(8, 8, dtype=torch.complex64),
    "int8": lambda: changed(
        lambda m: setattr(
            m, "weight", nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
        )
    ),
    "property": lambda: WithProperty(8, 8),
    "computed weight": lambda: ComputedWeight(8, 8),
    "method": lambda: WithMethod(8, 8),
    "own __call__": lambda: WithCall(8, 8),
}


@pytest.mark.parametrize("make", MORE_THAN_LINEAR.values(), ids=MORE_THAN_LINEAR)
def test_more_than_a_linear_layer_is_left_and_named(make):
    odd = make()
    held = dict(odd.named_parameters())
    model = nn.ModuleDict({"odd": odd, "plain": nn.Linear(8, 8)})
    with pytest.warns(UserWarning, match=r"not converted to fp8: odd \(\w+\) has "):
        convert_model_to_fp8(model)
    assert model["odd"] is odd and type(model["plain"]) is FP8LinearLayer
    after = dict(odd.named_parameters())
    assert list(after) == list(held) and all(after[name] is held[name] for name in held)
    with pytest.raises(ValueError, match="which an fp8 layer would lose"):
        FP8LinearLayer.from_linear(odd)


@pytest.mark.parametrize("make", [quiet_weight_norm, spectral_norm], ids=["weight", "spectral"])
def test_left_layers_go_on_training(make):
    model = nn.Sequential(nn.Linear(8, 8), make(nn.Linear(8, 8)))
    with pytest.warns(UserWarning, match=r"not converted to fp8: 1 \(Linear\)"):
        convert_model_to_fp8(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("part", ["itself", "out_proj"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_attention_with_hooks_is_left(hook, part):
    attention = nn.MultiheadAttention(8, 2)
    hook(attention if part == "itself" else attention.out_proj)
    model = nn.Sequential(attention, nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=r"not converted to fp8: 0 \(MultiheadAttention\) has"):
        convert_model_to_fp8(model)
    assert model[0] is attention and type(attention.out_proj) is not FP8LinearLayer
    with pytest.raises(NotImplementedError, match="which fp8 attention would lose"):
        FP8MultiheadAttention.from_attention(attention)


def test_a_model_of_nothing_else_is_left_with_a_warning():
    for model in (spectral_norm(nn.Linear(4, 4)), nn.Sequential(WithMethod(4, 4))):
        with pytest.warns(UserWarning, match=r"not converted to fp8: (0|the model) \(\w+\) has "):
            assert convert_model_to_fp8(model) is model
    with pytest.raises(ValueError, match=r"has no nn\.Linear"):
        convert_model_to_fp8(nn.Sequential(nn.Linear(4, 4)), FP8Config(skip=("0",)))


def test_plain_layers_keep_their_attributes():
    lazy = nn.LazyLinear(8)
    lazy(torch.ones(2, 8))
    pruned = prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)
    prune.remove(pruned, "weight")
    model = nn.Sequential(Subclass(8), lazy, pruned, OptimizedLinear(8, 8), nn.Linear(8, 8))
    model[4].is_initialized = True
    attention = nn.MultiheadAttention(8, 2)
    attention.is_initialized = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_model_to_fp8(model)
        converted = convert_model_to_fp8(attention)
    assert all(type(layer) is FP8LinearLayer for layer in model)
    assert model[0].kind == "square" and model[4].is_initialized and converted.is_initialized
    zeros = model[2].weight == 0
    assert zeros.sum() == 32


def test_one_parameter_under_two_names_stays_one():
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)
    attention.v_proj_weight = attention.k_proj_weight
    converted = convert_model_to_fp8(copy.deepcopy(attention))
    assert (
        converted.v_proj_weight is converted.k_proj_weight and not converted.k_proj_weight.is_meta
    )
    x, y = torch.randn(3, 1, 8), torch.randn(4, 1, 6)
    torch.testing.assert_close(
        converted(x, y, y)[0], attention(x, y, y)[0], rtol=0, atol=0.2 * y.abs().max().item()
    )
    tied = mlp(8, 8, 8, 8)
    tied[2].weight = tied[0].weight
    for model in (convert_model_to_fp8(tied, inplace=False), convert_model_to_fp8(tied)):
        assert model[2].weight is model[0].weight is not model[4].weight
    assert len(list(tied.parameters())) == 5


def test_a_skipped_layer_is_skipped_under_all_of_its_names():
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"one": shared, "two": shared, "other": nn.Linear(8, 8)})
    convert_model_to_fp8(model, FP8Config(skip=("two",)))
    assert model["one"] is model["two"] is shared
    assert type(model["other"]) is FP8LinearLayer


def test_another_config_leaves_what_it_skips():
    model = convert_model_to_fp8(mlp(8, 8, 8))
    first = model[0].config
    other = FP8Config(margin=1, skip=("0",))
    convert_model_to_fp8(model, other)
    assert model[0].config is first and model[2].config is other


@pytest.mark.parametrize(
    "arguments,error,message",
    [
        ((0, 4), ValueError, "in_features must be at least 1, not 0"),
        ((4, -1), ValueError, "out_features must be at least 1, not -1"),
        ((4.0, 4), TypeError, "in_features must be an int, not 4.0"),
        ((True, 4), TypeError, "in_features must be an int, not True"),
        ((4, None), TypeError, "out_features must be an int, not None"),
        ((4, 4, True, "e4m3"), TypeError, "config must be an FP8Config, not str"),
        ((4, 4, True, None, None, torch.complex64), TypeError, "dtype is torch.complex64; support"),
        ((4, 4, True, None, None, torch.int8), TypeError, "dtype is torch.int8; supported"),
    ],
)
def test_refusals_of_a_layer(arguments, error, message):
    with pytest.raises(error, match=message):
        FP8LinearLayer(*arguments)


def test_refusals_of_what_is_no_layer():
    with pytest.raises(TypeError, match=r"must be an nn\.Linear, not Conv1d"):
        FP8LinearLayer.from_linear(nn.Conv1d(1, 1, 1))
    with pytest.raises(TypeError, match="config must be an FP8Config, not dict"):
        FP8LinearLayer.from_linear(nn.Linear(4, 4), {})
    with pytest.raises(TypeError, match=r"must be an nn\.MultiheadAttention, not Linear"):
        FP8MultiheadAttention.from_attention(nn.Linear(4, 4))


class Hidden(nn.Module):
    """Linear layers where torch does not look for modules."""

    def __init__(self, where, linear):
        super().__init__()
        self.first, self.held = nn.Linear(8, 8), where(linear)
        self.linear = linear

    def forward(self, x):
        return self.linear(self.first(x))


WHERE = {
    "list": lambda x: [x],
    "dict of tuples": lambda x: {"a": (None, [x])},
    "inside of another": lambda x: [nn.Sequential(nn.ReLU(), x)],
}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
@pytest.mark.parametrize("is_seen", [False, True])
def test_layers_in_lists_are_named(where, is_seen):
    """Whether or not the same layer is a module of the model, too, which is converted."""
    linear = nn.Linear(8, 4)
    inner = Hidden(where, linear if is_seen else None)
    inner.held = where(linear)
    model = nn.Sequential(inner)
    with pytest.warns(UserWarning, match=r"not converted to fp8: 0\.held \(Linear\) is held where"):
        convert_model_to_fp8(model)
    assert type(inner.first) is FP8LinearLayer and type(linear) is nn.Linear
    assert (type(inner.linear) is FP8LinearLayer) == is_seen


def test_a_model_of_hidden_layers_alone_is_refused_by_their_name():
    model = nn.Sequential(nn.ReLU())
    model.layers = (nn.Linear(4, 4),)
    with pytest.raises(ValueError, match=r"nothing to convert to fp8; layers \(Linear\) is held"):
        convert_model_to_fp8(model)


def test_modules_that_hold_each_other_in_lists_end():
    model = mlp(4, 8, 4)
    model.all, model[0].parent = [model], [model]
    with pytest.warns(UserWarning, match=r"not converted to fp8: all \(Linear\)"):
        convert_model_to_fp8(model)
    assert type(model[0]) is FP8LinearLayer
