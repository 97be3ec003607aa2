"""FP8Attention: values that fp8 has, exact attention of these, a gradient that passes."""

from __future__ import annotations

import enum
from typing import Any

import layer_oracle as oracle
import pytest
import torch
from torch import Tensor

from flash_cute.attention import FlashAttention3, FP8AttentionConfig, create_attention
from flash_cute.attention.fp8 import FORMATS, RoundToFP8, power_of_two_scale

D, HEADS = 64, 4
FORMAT_NAMES = list(FORMATS)
SCALINGS = ["tensor", "head"]


def rounded_in_fp64(x: Tensor, name: str, dims: tuple[int, ...]) -> Tensor:
    """x to the nearest value of fp8 times the scale, from what the format is."""
    digits, least, largest = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}[name]
    x = x.detach()
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(dims, keepdim=True) / largest)))
    y = x / scale
    exponent = torch.floor(torch.log2(y.abs().clamp(min=2.0**least)))
    step = torch.exp2(exponent - digits)
    return torch.round(y / step) * step * scale


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("size", [1e-5, 1.0, 3e4])
def test_rounds_to_the_nearest_value_that_fp8_has(device, name, scaling, size):
    torch.manual_seed(0)
    x = torch.randn(2, 30, HEADS, 16) * size
    x[:, :, 1] *= 100
    dims = (0, 1, 3) if scaling == "head" else (0, 1, 2, 3)
    out = RoundToFP8.apply(x.to(device), FORMATS[name], dims)
    assert torch.equal(out.cpu().double(), rounded_in_fp64(x.double(), name, dims))
    normal = out[:, :, 1].abs().double().cpu()
    mantissas = torch.frexp(normal[normal > size])[0].unique()
    assert len(mantissas) <= {"e4m3": 8, "e5m2": 4}[name]
    for dtype in (torch.bfloat16, torch.float16):
        if size < 100:
            y = x.to(dtype)
            low = RoundToFP8.apply(y.to(device), FORMATS[name], dims)
            assert low.dtype == dtype
            exact = rounded_in_fp64(y.double(), name, dims)
            assert torch.equal(low.cpu(), exact.to(dtype))
            assert dtype == torch.float16 or torch.equal(low.cpu().double(), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_largest_numbers_stay_finite(device, name, dtype):
    """The nearest value that fp8 has may be beyond what the dtype has."""
    most = torch.finfo(dtype).max
    x = torch.tensor([most, -most, 0.9 * most, 0.6 * most], dtype=dtype, device=device)
    out = RoundToFP8.apply(x, FORMATS[name], (0,))
    step = {"e4m3": 2.0**-3, "e5m2": 2.0**-2}[name]
    assert out.isfinite().all()
    assert ((out.double() / most - x.double() / most).abs() <= step / 2).all()
    assert (torch.frexp(out.double())[0] % (step / 2) == 0).all()


def test_scales_are_the_least_powers_of_two():
    for largest in (448.0, 57344.0):
        for amax, expected in ((largest, 1.0), (largest * 1.01, 2.0), (largest / 2, 0.5)):
            for factor in (1.0, 2.0**-60, 2.0**40):
                x = torch.tensor([-amax * factor, amax * factor / 3])
                assert power_of_two_scale(x, (0,), largest).item() == expected * factor
    assert power_of_two_scale(torch.zeros(3), (0,), 448.0).item() == 2.0**-126


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_what_is_not_finite_stays_so_and_spoils_no_scale(device, name):
    x = torch.tensor([1.0, torch.nan, -torch.inf, 3.0, 1e-3], device=device)
    out = RoundToFP8.apply(x, FORMATS[name], (0,))
    finite = RoundToFP8.apply(x[[0, 3, 4]], FORMATS[name], (0,))
    assert torch.equal(out[[0, 3, 4]], finite)
    assert out[1].isnan() and out[2] == -torch.inf


def test_gradient_passes_the_rounding(device):
    x = torch.randn(5, 7, device=device, requires_grad=True)
    dout = torch.randn_like(x)
    out = RoundToFP8.apply(x, FORMATS["e4m3"], (0, 1))
    assert not torch.equal(out, x)
    out.backward(dout)
    assert torch.equal(x.grad, dout)
    mapped = torch.func.vmap(lambda y: RoundToFP8.apply(y, FORMATS["e4m3"], (0,)))(x.detach())
    rows = [RoundToFP8.apply(y, FORMATS["e4m3"], (0,)) for y in x.detach()]
    assert torch.equal(mapped, torch.stack(rows))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        return rounded_in_fp64(x, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_is_attention_of_the_rounded_values(device, name, scaling, masked, kv_heads):
    torch.manual_seed(0)
    layer = create_attention(
        FP8AttentionConfig(
            D, HEADS, num_kv_heads=kv_heads, format=name, scaling=scaling, device=device
        )
    )
    keep = torch.arange(33) < torch.tensor([[33], [20]])
    x = torch.randn(2, 33, D, device=device)
    dims = (0, 1, 3) if scaling == "head" else (0, 1, 2, 3)
    x64 = x.cpu().double().requires_grad_()
    tokens = x64.masked_fill(~keep[..., None], 0) if masked else x64
    expected = oracle.attend(
        oracle.parameters_of(layer), HEADS, tokens, kv_heads=kv_heads,
        mask=keep if masked else None, rounded=lambda y: StraightThrough.apply(y, name, dims),
    )  # fmt: skip
    x.requires_grad_()
    out = layer(x, keep.to(device)) if masked else layer(x)
    # fp32 and fp64 may round a few values that lie between two of fp8 differently.
    assert oracle.difference(out, expected) < 5e-3
    dout = torch.randn_like(expected)
    expected.backward(dout)
    out.backward(dout.to(out))
    assert oracle.difference(x.grad, x64.grad) < 5e-3


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_error_is_that_of_fp8(device, name):
    torch.manual_seed(0)
    layer = create_attention(FP8AttentionConfig(D, HEADS, format=name, device=device))
    exact = FlashAttention3(D, HEADS, device=device)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, 200, D, device=device) * 3
    error = (layer(x) - exact(x)).norm() / exact(x).norm()
    low, high = {"e4m3": (0.02, 0.15), "e5m2": (0.04, 0.3)}[name]
    assert low < error.item() < high


def test_scales_of_heads_keep_small_heads(device):
    """Values of one head that one scale for all would flush to zero."""
    torch.manual_seed(0)
    x = torch.randn(1, 50, 2, 16, device=device)
    x[:, :, 0] *= 1e-6
    one = RoundToFP8.apply(x, FORMATS["e4m3"], (0, 1, 2, 3))
    each = RoundToFP8.apply(x, FORMATS["e4m3"], (0, 1, 3))
    assert not one[:, :, 0].any()
    torch.testing.assert_close(each, x, rtol=2**-4, atol=1e-8)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_each_of_q_k_v_and_with_head_each_head_has_its_scale(device, scaling, masked, kv_heads):
    torch.manual_seed(0)
    layer = create_attention(
        FP8AttentionConfig(
            D, HEADS, num_kv_heads=kv_heads, bias=False, scaling=scaling, device=device
        )
    )
    args = (torch.randn(2, 20, D, device=device), torch.ones(2, 20, device=device).bool())
    args = args if masked else args[:1]
    with torch.no_grad():
        layer.out_proj.weight.copy_(torch.eye(D))
        values = layer.in_proj_weight[-kv_heads * 16 :]
        values *= 1e-6
        small = layer(*args)  # with the scale of q and k all would be 0
        assert small.unflatten(-1, (HEADS, 16)).abs().amax((0, 1, 3)).min() > 1e-8
        values[16:] *= 1e6
        first = layer(*args)[..., :16]
    assert bool(first.any()) == (scaling == "head")


def test_formats_may_be_enums():
    class Format(enum.Enum):
        E5M2 = "e5m2"

    assert FP8AttentionConfig(D, HEADS, format=Format.E5M2).format == "e5m2"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_exported_autocast_and_empty(device, scaling):
    layer = create_attention(
        FP8AttentionConfig(D, HEADS, pattern="causal", scaling=scaling, device=device)
    )
    x = torch.randn(2, 20, D, device=device, requires_grad=True)
    expected = layer(x)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x)[0], grad)
    exported = torch.export.export(layer, (x.detach(),)).module()
    torch.testing.assert_close(exported(x), expected)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x[:, :0]).shape == (2, 0, D)
    assert layer.to("meta")(x.detach().to("meta")).shape == x.shape
    assert f"scaling='{scaling}'" in repr(layer) and "float8_e4m3fn" in repr(layer)
