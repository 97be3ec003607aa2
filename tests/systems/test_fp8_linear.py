"""FP8LinearLayer: what is rounded, how far, with which scales, and what is kept for backward."""

from __future__ import annotations

import copy

import pytest
import torch
from fp8_cases import decibels, mantissas
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from flash_cute._torch_internals import scaled_mm
from flash_cute.precision import (
    FP8Config,
    FP8Format,
    FP8LinearLayer,
    convert_model_to_fp8,
    fp8_linear,
    fp8_products,
)

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
E4M3, E5M2 = FP8Format.E4M3, FP8Format.E5M2
CONFIGS = {
    "default": FP8Config(),
    "delayed": FP8Config(scaling="delayed"),
    "e4m3 gradients": FP8Config(backward_format=E4M3),
    "e5m2": FP8Config(E5M2, E5M2),
}
both_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def pair(device, sizes=(48, 32), config=None, **options):
    """A linear layer and one in fp8 with copies of its parameters."""
    torch.manual_seed(0)
    linear = nn.Linear(*sizes, device=device, **options)
    return linear, FP8LinearLayer.from_linear(copy.deepcopy(linear), config)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    """torch compiles one function some times and no more."""
    torch.compiler.reset()


def gradients(layer, x, dy):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return y, x.grad, *(p.grad for p in layer.parameters())


@both_configs
@pytest.mark.parametrize("sizes", [(48, 32), (61, 37), (130, 3)], ids=str)
def test_error(device, sizes, config):
    """Of the output and all gradients; worse than fp8's own rounding would be a fault, and so
    would be better: then nothing was rounded."""
    linear, layer = pair(device, sizes, config)
    x, dy = (torch.randn(3, 21, size, device=device) for size in sizes)
    exact, rounded = gradients(linear, x, dy), gradients(layer, x, dy)
    bias = linear.bias
    assert decibels(rounded[0] - bias, exact[0] - bias) == pytest.approx(29, abs=10)
    for ours, theirs in zip(rounded[1:3], exact[1:3], strict=True):
        assert 17 < decibels(ours, theirs) < 45
    torch.testing.assert_close(rounded[3], exact[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forward,backward", [(E4M3, E5M2), (E5M2, E4M3), (E4M3, E4M3)])
def test_formats_of_the_operands(device, forward, backward):
    """An identity as the other factor shows them: w, x in the forward format, dy in the other."""
    most = {E4M3: 8, E5M2: 4}
    _, layer = pair(device, (64, 64), FP8Config(forward, backward), bias=False)
    identity = torch.eye(64, device=device)
    weight = layer(identity)
    x, dy = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    assert most[forward] // 2 < mantissas(weight) <= most[forward]
    *_, dw = gradients(layer, identity, dy)
    assert most[backward] // 2 < mantissas(dw) <= most[backward]
    *_, dw = gradients(layer, x, identity)
    assert most[forward] // 2 < mantissas(dw) <= most[forward]
    _, dx, _ = gradients(layer, x, identity)
    assert most[forward] // 2 < mantissas(dx) <= most[forward]


def test_three_products_a_step_all_of_fp8(monkeypatch):
    seen = []

    def watched(a, b, *rest, **options):
        seen.append((a.data.dtype, b.data.dtype, a.data.shape, b.data.shape))
        assert a.data.is_contiguous() and b.data.is_contiguous()  # as tensor cores want them
        return fp8_products.multiply_rows(a, b, *rest, **options)

    monkeypatch.setattr(fp8_linear, "multiply_rows", watched)
    _, layer = pair("cpu")
    layer.weight.data = layer.weight.data.t().contiguous().t()
    gradients(layer, torch.randn(48, 5).t(), torch.randn(32, 5).t())
    assert seen == [
        (E4M3.dtype, E4M3.dtype, (5, 48), (32, 48)),
        (E5M2.dtype, E4M3.dtype, (5, 32), (48, 32)),
        (E5M2.dtype, E4M3.dtype, (32, 5), (48, 5)),
    ]


@both_configs
@pytest.mark.parametrize("size", [1e-5, 1e-2, 1e4])
def test_scales_follow_the_size_of_numbers(device, size, config):
    linear, layer = pair(device, config=config, bias=False)
    with torch.no_grad():
        linear.weight.mul_(size)
        layer.weight.mul_(size)
    x, dy = (torch.randn(64, n, device=device) * size for n in (48, 32))
    for ours, exact in zip(gradients(layer, x, dy), gradients(linear, x, dy), strict=True):
        assert decibels(ours, exact) > 15


def test_layers_without_weights_stay_torch():
    model = convert_model_to_fp8(nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 4)))
    assert type(model[0]) is nn.Linear and type(model[1]) is FP8LinearLayer
    assert model(torch.zeros(2, 0)).shape == (2, 4)


def test_transforms_are_refused_by_name():
    _, layer = pair("cpu", (8, 4))
    for call in (
        lambda: torch.vmap(layer)(torch.randn(3, 2, 8)),
        lambda: torch.func.grad(lambda x: layer(x).sum())(torch.randn(2, 8)),
    ):
        with pytest.raises(NotImplementedError, match="fp8 linear layers have no rule"):
            call()


def test_zeros_and_no_tokens(device):
    _, layer = pair(device)
    zeros = gradients(layer, torch.zeros(4, 48, device=device), torch.zeros(4, 32, device=device))
    assert torch.equal(zeros[0], layer.bias.expand(4, 32)) and not zeros[1].any()
    empty = torch.zeros(0, 48, device=device)
    y, dx, dw, _ = gradients(layer, empty, torch.zeros(0, 32, device=device))
    assert (y.shape, dx.shape) == ((0, 32), (0, 48)) and not dw.any()
    assert layer(torch.ones(48, device=device)).shape == (32,)
    one = FP8LinearLayer(1, 1, device=device)
    assert decibels(one(empty[:, :1].new_ones(3, 1)), one.weight + one.bias) > 30


@both_configs
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_never_hidden(device, bad, config):
    _, layer = pair(device, config=config)
    x, dy = torch.randn(4, 48, device=device), torch.randn(4, 32, device=device)
    gradients(layer, x, dy)
    spoilt, spoilt_dy = x.clone(), dy.clone()
    spoilt[1, 3] = spoilt_dy[1, 3] = bad
    assert not layer(spoilt).isfinite().any()
    _, dx, dw, _ = gradients(layer, x, spoilt_dy)
    assert not dx.isfinite().any() and not dw.isfinite().any()
    assert all(part.isfinite().all() for part in gradients(layer, x, dy))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(device, dtype):
    linear, layer = pair(device, dtype=dtype)
    x, dy = (torch.randn(9, n, device=device, dtype=dtype) for n in (48, 32))
    rounded = gradients(layer, x, dy)
    assert {part.dtype for part in rounded} == {dtype}
    for ours, exact in zip(rounded[:3], gradients(linear, x, dy), strict=False):
        assert 17 < decibels(ours, exact) < 45


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(device, dtype):
    _, layer = pair(device)
    x = torch.randn(9, 48, device=device, requires_grad=True)
    plain = layer(x)
    with torch.autocast(device, dtype):
        y = layer(x)
        y.float().square().mean().backward()
        assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (dtype, *[torch.float32] * 2)
        assert layer.double()(x.double()).dtype == torch.float64  # as nn.Linear
    torch.testing.assert_close(y.float(), plain, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "name,compiled", [*((name, False) for name in CONFIGS), ("default", True), ("delayed", True)]
)
def test_bytes_kept_for_backward(device, name, compiled):
    """At most 0.55 of what bf16 keeps, the weight aside, which is there anyway; compiled code
    keeps what its partition of the graph says."""

    def kept(layer):
        storages = {}

        def pack(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        x = torch.randn(256, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
        run = torch.compile(layer, backend="aot_eager_decomp_partition") if compiled else layer
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run(x)
        storages.pop(layer.weight.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    linear, layer = pair(device, (512, 256), CONFIGS[name], dtype=torch.bfloat16)
    assert kept(linear) == 2 * 256 * 512
    assert 256 * 512 <= kept(layer) <= 0.55 * kept(linear)
    layer.weight.requires_grad_(False)
    assert compiled or kept(layer) < 1000  # a frozen weight needs no input


def test_gradients_of_what_asks_for_them(device):
    _, layer = pair(device)
    x = torch.randn(4, 48, device=device)
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None
    layer.zero_grad()
    layer.weight.requires_grad_(False)
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None
    with pytest.raises(NotImplementedError, match="once_differentiable"):
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        dx.sum().backward()


@both_configs
@pytest.mark.parametrize("compiled", [False, True])
def test_two_uses_before_backward(device, config, compiled):
    """As of a layer that stands at two places, or of two batches."""
    if compiled and config.scaling == "delayed" and TORCH < (2, 13):
        pytest.skip("compiled code of this torch finds its history changed")
    linear, layer = pair(device, config=config)
    used = torch.compile(layer, backend="aot_eager") if compiled else layer
    x, dy = torch.randn(2, 9, 48, device=device), torch.randn(9, 32, device=device)
    for module in (used, linear):
        first, second = module(x[0]), module(x[1])
        first.backward(dy)
        second.backward(dy)
    assert decibels(layer.weight.grad, linear.weight.grad) > 15


def test_checkpoint_and_deepcopy(device):
    _, layer = pair(device)
    x, dy = torch.randn(4, 48, device=device), torch.randn(4, 32, device=device)
    plain = gradients(layer, x, dy)
    again = copy.deepcopy(layer)
    assert again.weight is not layer.weight
    x.requires_grad_()
    y = checkpoint(again, x, use_reentrant=False)
    y.backward(dy)
    for ours, theirs in zip((y, x.grad, again.weight.grad), plain, strict=False):
        assert torch.equal(ours, theirs)


@both_configs
def test_compiles_to_one_graph(device, config):
    """The same bits in whatever order: a compiled product on CUDA may differ in rounding."""
    _, layer = pair(device, (61, 37), config)
    again = copy.deepcopy(layer)
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    for size in (1.0, 3.0):
        x, dy = (torch.randn(17, n, device=device) * size for n in (61, 37))
        for ours, theirs in zip(gradients(compiled, x, dy), gradients(layer, x, dy), strict=True):
            torch.testing.assert_close(ours, theirs)
    if config.scaling == "delayed":
        assert torch.equal(again.scales.gradient_history, layer.scales.gradient_history)


def test_refusals():
    layer = FP8LinearLayer(8, 4)
    with pytest.raises(TypeError, match=r"input is .*bfloat16, the weight .*float32"):
        layer(torch.ones(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"\(2, 7\): the last size must be 8"):
        layer(torch.ones(2, 7))


@pytest.mark.parametrize("scaling", ["dynamic", "delayed"])
def test_on_meta(scaling):
    layer = FP8LinearLayer(8, 4, config=FP8Config(scaling=scaling), device="meta")
    x = torch.randn(2, 8, device="meta", requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (2, 4) and y.is_meta and x.grad.is_meta and layer.weight.grad.is_meta


def test_initialisation_is_that_of_a_linear_layer():
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    torch.manual_seed(0)
    layer = FP8LinearLayer(8, 4)
    assert torch.equal(layer.weight, linear.weight) and torch.equal(layer.bias, linear.bias)
    torch.manual_seed(0)
    layer.weight.data.zero_()
    layer.reset_parameters()
    assert torch.equal(layer.weight, linear.weight)


def test_says_how_it_multiplies():
    text = repr(FP8LinearLayer(8, 4, config=FP8Config(scaling="delayed")))
    for part in ("in_features=8", "e4m3 forward, e5m2 backward", "delayed", "rounded operands"):
        assert part in text


# --- tensor cores --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "e4m3 gradients"])
@pytest.mark.parametrize("tokens,sizes", [(17, (61, 37)), (32, (48, 32)), (1, (1, 3))], ids=str)
def test_calls_keep_the_rules_of_tensor_cores(monkeypatch, tokens, sizes, name):
    """The CPU, which has no such limits, computes what tensor cores must compute."""
    calls = []

    def strict(a, b, scale_a, scale_b, out_dtype, fast):
        assert a.is_contiguous() and b.t().is_contiguous()
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        assert (a.dtype, b.dtype) != (torch.float8_e5m2, torch.float8_e5m2)
        assert scale_a.dtype == scale_b.dtype == torch.float32 and scale_a.dim() == 0
        calls.append(fast)
        return scaled_mm(a, b, scale_a, scale_b, out_dtype, fast)

    _, layer = pair("cpu", sizes, CONFIGS[name])
    x, dy = (torch.randn(tokens, size) * 3 for size in sizes)
    rounded = gradients(layer, x, dy)
    monkeypatch.setattr(fp8_linear, "on_tensor_cores", lambda *_: True)
    monkeypatch.setattr(fp8_products, "scaled_mm", strict)
    for ours, theirs in zip(gradients(layer, x, dy), rounded, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert calls == [True, False, False]  # sums of gradients leave the accumulators
    layer.to(torch.bfloat16)
    bf16 = gradients(layer, x.bfloat16(), dy.bfloat16())
    for ours, theirs in zip(bf16[:3], rounded, strict=False):
        assert decibels(ours, theirs) > 18


@pytest.fixture
def fp8_cuda(cuda):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 tensor cores")
    return cuda


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m,n,k", [(1, 16, 16), (17, 37, 61), (128, 256, 512), (3, 1, 1)])
def test_tensor_cores_multiply_the_rounded_operands(fp8_cuda, m, n, k, out_dtype):
    a = fp8_products.round_to_fp8(torch.randn(m, k, device=fp8_cuda), E5M2.dtype)
    b = fp8_products.round_to_fp8(torch.randn(n, k, device=fp8_cuda), E4M3.dtype)
    exact = fp8_products.multiply_rows(a, b, torch.float32, tensor_cores=False)
    for fast in (False, True):
        out = fp8_products.multiply_rows(a, b, out_dtype, tensor_cores=True, fast=fast)
        assert out.dtype == out_dtype and out.shape == (m, n)
        torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=2e-3 * k**0.5)


def test_three_fp8_kernels_a_step(fp8_cuda):
    _, layer = pair(fp8_cuda, (256, 512))
    x, dy = torch.randn(64, 256, device=fp8_cuda), torch.randn(64, 512, device=fp8_cuda)
    gradients(layer, x, dy)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        gradients(layer, x, dy)
    counts = {event.key: event.count for event in run.key_averages()}
    assert counts["aten::_scaled_mm"] == 3
    assert "aten::mm" not in counts and "aten::addmm" not in counts
    assert "fp8 tensor cores" in repr(layer)


@pytest.mark.parametrize("name", ["default", "delayed"])
def test_compiled_on_a_gpu(fp8_cuda, name):
    """Inductor's kernels round as eager ones do."""
    _, layer = pair(fp8_cuda, (128, 256), CONFIGS[name], dtype=torch.bfloat16)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    for _ in range(2):
        x = torch.randn(64, 128, device=fp8_cuda, dtype=torch.bfloat16)
        dy = torch.randn(64, 256, device=fp8_cuda, dtype=torch.bfloat16)
        for ours, theirs in zip(gradients(compiled, x, dy), gradients(layer, x, dy), strict=True):
            assert decibels(ours, theirs) > 35
