"""Layers that are wrong in one situation alone, which ComponentValidator must fail, and right ones
that resemble them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_validation import HEADS, WIDTH, Functional, Packed, Separate, Wrapped, failed
from torch import Tensor, nn
from torch.nn.functional import linear

from flash_cute.core import AttentionLayer
from flash_cute.utils.validation_framework import ComponentValidator

Make = Callable[[], nn.Module]


class Factor(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad, None


class Upside(torch.autograd.Function):
    """The identity, whose backward gives rows the gradients of others."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(0)


class Contiguous(torch.autograd.Function):
    """The identity, whose backward takes an expanded gradient for a contiguous one."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if grad.is_contiguous() else grad.flip(-1)


class Row(nn.Module):
    """A linear layer or attention with something done to weights, inputs and outputs."""

    def __init__(self, inner: nn.Module, **how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.inner.named_parameters())
        if "weights" in self.how:
            weights = {name: self.how["weights"](name, p) for name, p in weights.items()}
        x = self.how["before"](x) if "before" in self.how else x
        out = torch.func.functional_call(self.inner, weights, (x,))
        out = out[0] if isinstance(out, tuple) else out
        return self.how["after"](self, x, out) if "after" in self.how else out


def scaled(only: str, factor: float) -> Callable[[str, Tensor], Tensor]:
    return lambda name, p: Factor.apply(p, factor) if name.endswith(only) else p


def zero_from(dim: int, first: int) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    def zeroed(module: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        if out.dim() < -dim or out.shape[dim] <= first:
            return out
        kept = torch.arange(out.shape[dim]) < first
        return out * kept.view([-1 if i == out.dim() + dim else 1 for i in range(out.dim())])

    return zeroed


SITUATIONS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "in training": {"after": lambda m, x, out: 0.9 * out if m.training else out},
    "gradient in training": {
        "after": lambda m, x, out: Factor.apply(out, 1.5) if m.training else out
    },
    "in fp64": {"after": lambda m, x, out: out * 1.1 if x.dtype == torch.float64 else out},
    "in bf16": {"after": lambda m, x, out: out * 1.1 if x.dtype == torch.bfloat16 else out},
    "in fp16": {"after": lambda m, x, out: out.flip(0) if x.dtype == torch.float16 else out},
    "layout": {"after": lambda m, x, out: out if x.is_contiguous() else out.flip(-1)},
    "offset": {"after": lambda m, x, out: out + 1 if x.storage_offset() else out},
    "stride": {"after": lambda m, x, out: out if x.stride(-1) == 1 else out + 1},
    "gradient's rows": {"after": lambda m, x, out: Upside.apply(out)},
    "gradient's layout": {"after": lambda m, x, out: Contiguous.apply(out)},
    "without gradients": {"after": lambda m, x, out: out if torch.is_grad_enabled() else 2 * out},
    "in inference mode": {
        "after": lambda m, x, out: 2 * out if torch.is_inference_mode_enabled() else out
    },
    "large values": {"before": lambda x: x.clamp(-6, 6)},
    "small values": {"before": lambda x: torch.where(x.abs() < 2e-3, 0, x)},
    "input": {"before": lambda x: x.detach().mul_(1) if x.requires_grad else x.mul_(1.5)},
    "gradient's factor": {"before": lambda x: Factor.apply(x, 1.02)},
    "row 300": {"after": zero_from(-2, 300)},
    "last rows": {"after": zero_from(-2, 1025)},
    "row 8": {"after": zero_from(-2, 8)},
}
OF_ATTENTION = {
    "entry 8": {"after": zero_from(-3, 8)},
    "entry 64": {"after": zero_from(-3, 64)},
    "nonsense beyond 17 tokens": {
        "after": lambda m, x, out: out if out.shape[1] <= 17 else out + x
    },
    "causal beyond 40 tokens": {},
}
LINEAR_WEIGHTS = {
    f"{n} {f:g}": {"weights": scaled(n, f)} for n in ("weight", "bias") for f in (5.0, 0.0, 0.95)
}
PARTS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "out_proj.weight",
    "q_proj.bias",
    "v_proj.bias",
    "out_proj.bias",
)


def validate_linear(layer: nn.Module):
    return ComponentValidator().validate_linear_component(layer, 8, 5)


def validate_attention(layer: nn.Module):
    return ComponentValidator().validate_attention_component(layer, WIDTH, HEADS)


class Direct(nn.Linear):
    """As Row, with nn.Linear's own names."""

    def __init__(self, how: dict[str, Callable[..., Tensor]]) -> None:
        super().__init__(8, 5)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if "weights" in self.how:
            weight, bias = self.how["weights"]("weight", weight), self.how["weights"]("bias", bias)
        x = self.how["before"](x) if "before" in self.how else x
        out = linear(x, weight, bias)
        return self.how["after"](self, x, out) if "after" in self.how else out


@pytest.mark.parametrize("name", [*SITUATIONS, *LINEAR_WEIGHTS])
def test_linear_layers_that_are_wrong_somewhere_fail(name: str):
    how = (SITUATIONS | LINEAR_WEIGHTS)[name]
    results = validate_linear(Direct(how))
    assert not results["passed"] and results["failures"]


@pytest.mark.parametrize("name", [*SITUATIONS, *OF_ATTENTION])
def test_attention_that_is_wrong_somewhere_fails(name: str):
    how = (SITUATIONS | OF_ATTENTION)[name]
    layer: nn.Module = Row(Packed(), **how)
    if name.startswith("causal"):

        class Late(Packed):
            def forward(self, x: Tensor) -> Tensor:
                self.causal = x.shape[1] > 40
                return super().forward(x)

        layer = Late()
    assert not validate_attention(layer)["passed"]


@pytest.mark.parametrize("factor", [5.0, 0.0, 1.03])
@pytest.mark.parametrize("part", PARTS)
def test_wrong_gradients_of_any_weight_fail(part: str, factor: float):
    class Long(Separate):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.v_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out_proj = nn.Linear(WIDTH, WIDTH)

    results = validate_attention(Row(Long(), weights=scaled(part, factor)))
    assert failed(results) == {"values"}


def test_hooks_on_parameters_count():
    layer = nn.Linear(8, 5)
    layer.weight.register_hook(lambda grad: 5 * grad)
    assert failed(validate_linear(layer)) == {"values"}


@pytest.mark.parametrize("training", [False, True])
def test_gradients_of_unknown_layers_are_held_to_differences(training: bool):
    """No reference knows these, but factors of gradients are seen."""

    def after(module: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        return Factor.apply(out, 1.1) if module.training or not training else out

    assert failed(validate_attention(Row(Wrapped(), after=after))) == {"gradients"}
    assert failed(validate_attention(Row(Wrapped(), weights=scaled("norm.weight", 5)))) == {
        "gradients"
    }
    unknown = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 5))
    assert validate_linear(unknown)["passed"]
    assert failed(validate_linear(Row(unknown, weights=scaled("0.bias", 0)))) == {"gradients"}


def test_rows_of_unknown_layers_are_compared():
    unknown = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 5))
    assert "batch" in failed(validate_linear(Row(unknown, after=zero_from(-2, 8))))
    assert "lengths" in failed(validate_attention(Row(Wrapped(), after=zero_from(-2, 200))))
    assert "batch" in failed(validate_attention(Row(Wrapped(), after=zero_from(-3, 8))))


RIGHT: dict[str, Make] = {
    "attention with dropout": lambda: AttentionLayer(WIDTH, HEADS),
    "wrapped": Wrapped,
    "row": lambda: Row(Packed()),
    "frozen": lambda: Packed().requires_grad_(False) and frozen_but_one(),
}


def frozen_but_one() -> nn.Module:
    layer = Packed()
    layer.in_proj_weight.requires_grad_(False)
    return layer


@pytest.mark.parametrize("name", RIGHT)
def test_right_layers_pass(name: str):
    results = validate_attention(RIGHT[name]())
    assert results["passed"], results["failures"]


def test_linear_layers_with_other_parameters_are_not_compared_by_weight_alone():
    """A weight that is one of several is no reference."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 5)
            self.size = nn.Parameter(torch.ones(5) * 2)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.size

    results = validate_linear(Scaled())
    assert results["passed"] and results["checks"]["values"]["passed"] is None
    assert validate_linear(Functional())["checks"]["values"]["passed"]


def test_validates_in_inference_mode():
    layer = Packed()
    with torch.inference_mode():
        assert validate_attention(layer)["passed"]
        assert not validate_attention(Row(layer, **SITUATIONS["gradient's factor"]))["passed"]


def test_sizes_are_numbers():
    validator = ComponentValidator()
    for size in (True, 4.0, "4", None):
        with pytest.raises(TypeError, match=r"num_heads is .*; expected an int"):
            validator.validate_attention_component(Packed(), WIDTH, size)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"in_features is .*; expected an int"):
            validator.validate_linear_component(nn.Linear(8, 5), size, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_heads is 0; expected at least 1"):
        validator.validate_attention_component(Packed(), WIDTH, 0)
    with pytest.raises(ValueError, match="out_features is -5; expected at least 1"):
        validator.validate_linear_component(nn.Linear(8, 5), 8, -5)
