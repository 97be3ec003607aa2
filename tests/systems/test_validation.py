"""ComponentValidator passes right layers, fails each kind of broken one, and changes none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import flash_cute
from flash_cute.attention import AttentionConfig, FP8AttentionConfig, create_attention
from flash_cute.core import OptimizedLinear
from flash_cute.precision import FP8Config, FP8LinearLayer, convert_model_to_fp8
from flash_cute.utils.validation_framework import ComponentValidator

WIDTH, HEADS = 32, 4
Break = Callable[[Tensor], Tensor]


class Packed(nn.Module):
    """Self-attention of flash_cute, with the parameters of nn.MultiheadAttention."""

    def __init__(self, causal: bool = False, scale: float | None = None, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.in_proj_weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 4)
            self.in_proj_bias = nn.Parameter(torch.randn(3 * WIDTH))
            self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.embed_dim, self.num_heads = WIDTH, HEADS
        self.causal, self.scale = causal, scale
        self.before: Break = lambda x: x
        self.after: Break = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        qkv = linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, HEADS, -1))
        out = flash_cute.flash_attn_qkvpacked_func(
            qkv, causal=self.causal, softmax_scale=self.scale
        )
        return self.after(self.out_proj(out.flatten(2)))


class Separate(nn.Module):
    """With four nn.Linear, dropout in training, and a tuple as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(4)
        )
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        parts = (p(x).unflatten(-1, (HEADS, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(self.dropout(flash_cute.flash_attn_func(*parts).flatten(2))), None


class Wrapped(nn.Module):
    """nn.MultiheadAttention inside of a layer of another form."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


def validate(layer: nn.Module, device: str = "cpu", sizes: tuple[int, int] = (WIDTH, HEADS)):
    return ComponentValidator(torch.device(device)).validate_attention_component(layer, *sizes)


def failed(results) -> set[str]:
    return {name for name, check in results["checks"].items() if check["passed"] is False}


RIGHT = {
    "packed": Packed,
    "causal": lambda: Packed(causal=True),
    "separate": Separate,
    "torch": lambda: nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1),
    "batch first": lambda: nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True),
    "grouped": lambda: create_attention(AttentionConfig(WIDTH, HEADS, num_kv_heads=1)),
    "fp8": lambda: create_attention(FP8AttentionConfig(WIDTH, HEADS)),
    "converted": lambda: convert_model_to_fp8(nn.MultiheadAttention(WIDTH, HEADS)),
}
OTHER_SCORES = {"window_size": (3, 3)}, {"softcap": 5.0}, {"softmax_scale": 0.1}


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_right_attention_passes(make: Callable[[], nn.Module], device: str):
    results = validate(make(), device)
    assert results["passed"] is True, results["failures"]
    assert all(check["passed"] for check in results["checks"].values())
    assert results["failures"] == [] and results["device"].startswith(device)


def test_values_of_unknown_weights_are_left_out():
    results = validate(Wrapped())
    assert results["passed"], results["failures"]
    assert results["checks"]["values"]["passed"] is None
    layer = Packed(scale=1.0)
    layer.sparsity_ratio = 0.9
    assert validate(layer)["passed"]
    for options in OTHER_SCORES:
        results = validate(create_attention(AttentionConfig(WIDTH, HEADS, **options)))
        assert results["passed"] and results["checks"]["values"]["passed"] is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_right_attention_of_other_dtypes(dtype: torch.dtype):
    results = validate(Packed().to(dtype))
    assert results["passed"], results["failures"]
    assert results["dtype"] == str(dtype)


def with_after(after: Break) -> nn.Module:
    layer = Packed()
    layer.after = after
    return layer


def with_before(before: Break) -> nn.Module:
    layer = Packed()
    layer.before = before
    return layer


def to_nan(x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[1])[:, None] == 0, x * float("nan"), x)


BROKEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "NaN": (lambda: with_after(to_nan), "finite"),
    "width": (lambda: with_after(lambda x: x[..., 1:]), "shape"),
    "length": (lambda: with_after(lambda x: x[:, 1:]), "shape"),
    "length of others": (lambda: with_after(lambda x: x[:, :17]), "lengths"),
    "dtype": (lambda: with_after(lambda x: x.double()), "dtype"),
    "no gradient": (lambda: with_after(lambda x: x.detach()), "gradients"),
    "no gradient of the input": (lambda: with_before(lambda x: x.detach()), "gradients"),
    "leak": (lambda: with_before(lambda x: x + 0.01 * x.mean(0)), "batch"),
    "noise": (lambda: with_after(lambda x: x + 0.1 * torch.rand_like(x)), "repeatable"),
    "scale": (lambda: Packed(scale=1.0), "values"),
    "no attention": (lambda: nn.Linear(WIDTH, WIDTH), "attends"),
    "raises": (lambda: with_after(lambda x: x.view(7, 7)), "shape"),
    "batch is not first": (lambda: HiddenOrder(), "batch"),
}


class HiddenOrder(nn.Module):
    """Attends over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize(("make", "check"), BROKEN.values(), ids=BROKEN)
def test_broken_attention_fails(make: Callable[[], nn.Module], check: str):
    results = validate(make())
    assert results["passed"] is False
    assert check in failed(results)
    assert any(failure.startswith(f"{check}: ") for failure in results["failures"])


@pytest.mark.parametrize("sizes", [(WIDTH, 2), (16, 4), (WIDTH, 5)], ids=str)
def test_other_sizes_fail(sizes: tuple[int, int]):
    assert "sizes" in failed(validate(Packed(), sizes=sizes))


class OwnGradient(torch.autograd.Function):
    """The identity, whose gradient is twice too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_wrong_gradients_fail():
    assert failed(validate(with_after(OwnGradient.apply))) == {"values"}


# --- linear layers -------------------------------------------------------------------------------


class Functional(nn.Module):
    """linear, and then what breaks it."""

    def __init__(self, after: Break = lambda x: x, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8))
        self.bias = nn.Parameter(torch.randn(5)) if bias else None
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(linear(x, self.weight, self.bias))


def validate_linear(layer: nn.Module, device: str = "cpu", sizes: tuple[int, int] = (8, 5)):
    return ComponentValidator(torch.device(device)).validate_linear_component(layer, *sizes)


@pytest.mark.parametrize("bias", [True, False])
def test_right_linear_layers_pass(bias: bool, device: str):
    for layer in (nn.Linear(8, 5, bias), Functional(bias=bias), nn.Sequential(nn.Linear(8, 5))):
        results = validate_linear(layer, device)
        assert results["passed"] is True, results["failures"]
    assert results["checks"]["values"]["passed"] is None  # a Sequential has no weight
    for layer in (FP8LinearLayer(8, 5, bias), OptimizedLinear(8, 5, bias, "aggressive")):
        results = validate_linear(layer, device)
        assert results["passed"] is True, results["failures"]


NARROW: dict[str, Callable[[int, int], nn.Module]] = {
    "fp8": lambda k, n: convert_model_to_fp8(nn.Linear(k, n)),
    "delayed": lambda k, n: convert_model_to_fp8(nn.Linear(k, n), FP8Config(scaling="delayed")),
    "aggressive": lambda k, n: OptimizedLinear(k, n, optimization_level="aggressive"),
}


@pytest.mark.parametrize("sizes", [(64, 1), (1, 64), (2, 1), (1, 1), (100, 2)])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_layers_whose_sums_cancel_pass(name: str, sizes: tuple[int, int]):
    """A single output is as small as chance has it; its rounding errors are those of its terms."""
    for _ in range(4):
        results = validate_linear(NARROW[name](*sizes), sizes=sizes)
        assert results["passed"], results["failures"]


def test_a_small_weight_with_a_large_bias_counts_as_used():
    layer = nn.Linear(1, 1).bfloat16()
    layer.weight.data.fill_(0.01)
    layer.bias.data.fill_(1.0)
    assert "lengths" not in failed(validate_linear(layer, sizes=(1, 1)))


class Wrong(FP8LinearLayer):
    """An output and gradients that are off by a factor each."""

    def __init__(self, sizes: tuple[int, int], of_output: float, of_gradients: float) -> None:
        super().__init__(*sizes)
        self.of_output, self.of_gradients = of_output, of_gradients

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        return self.of_output * out.detach() + self.of_gradients * (out - out.detach())


@pytest.mark.parametrize("factors", [(1.5, 1.0), (0.7, 1.0), (1.0, 1.5), (1.0, 0.7), (1.0, 0.0)])
@pytest.mark.parametrize("sizes", [(64, 1), (1, 64), (100, 2)])
def test_narrow_layers_that_are_wrong_fail(sizes: tuple[int, int], factors: tuple[float, float]):
    for _ in range(3):
        results = validate_linear(Wrong(sizes, *factors), sizes=sizes)
        assert failed(results) & {"values", "gradients"}


BROKEN_LINEAR: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "NaN": (lambda: Functional(lambda x: x / 0 * 0), "finite"),
    "width": (lambda: Functional(lambda x: x[..., 1:]), "shape"),
    "no gradient": (lambda: Functional(lambda x: x.detach()), "gradients"),
    "leak": (lambda: Functional(lambda x: x + x.mean(0)), "batch"),
    "no bias": (lambda: Functional(lambda x: x - 1), "values"),
    "rounded": (lambda: Functional(lambda x: x.bfloat16().float()), "values"),
    "no linear": (lambda: nn.Sequential(nn.Linear(8, 5), nn.GELU()), "affine"),
    "one number of dimensions": (lambda: Functional(lambda x: x.reshape(-1, 5)), "lengths"),
    "sizes": (lambda: nn.Linear(8, 6), "shape"),
    "inputs": (lambda: nn.Linear(9, 5), "shape"),
}


@pytest.mark.parametrize(("make", "check"), BROKEN_LINEAR.values(), ids=BROKEN_LINEAR)
def test_broken_linear_layers_fail(make: Callable[[], nn.Module], check: str):
    results = validate_linear(make())
    assert results["passed"] is False
    assert check in failed(results)


# --- both ----------------------------------------------------------------------------------------


def test_the_layer_is_left_as_it_is():
    layer = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5))
    layer[1].eval()
    layer(torch.randn(4, 8)).sum().backward()
    state = {name: x.clone() for name, x in layer.state_dict().items()}
    gradients = [p.grad.clone() for p in layer.parameters()]
    random, modes = torch.get_rng_state(), [m.training for m in layer.modules()]
    validate_linear(layer)
    validate(Packed())
    assert all(torch.equal(state[name], x) for name, x in layer.state_dict().items())
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, layer.parameters(), strict=True))
    assert [m.training for m in layer.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def test_validates_under_no_grad_and_without_a_device():
    with torch.no_grad():
        results = ComponentValidator().validate_linear_component(nn.Linear(8, 5), 8, 5)
    assert results["passed"], results["failures"]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="device is cuda:99; available here"):
        ComponentValidator(device=torch.device("cuda", 99))
    with pytest.raises(TypeError, match="expected an nn"):
        ComponentValidator().validate_linear_component(linear, 8, 5)  # type: ignore[arg-type]
