"""What FP8Attention keeps for backward, beside the same layer that keeps q, k and v as they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_cute import check, flash_attn_func, flash_attn_varlen_func
from flash_cute.attention import FlashAttention3, FP8Attention, FP8AttentionConfig
from flash_cute.call.fp8 import power_of_two_scale
from flash_cute.functional.kept_autograd import Fp8Form
from flash_cute.functional.packed_autograd import NoDoubleBackward
from flash_cute.ops.typed import OPS

D, HEADS = 64, 4
LOW = [torch.bfloat16, torch.float16]


class OfCopies(torch.autograd.Function):
    """Attention of q, k and v in e4m3, and of their copies in 16 bits backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: FP8Attention, lengths: Any, options: Any
    ) -> Tensor:
        rounded, named = [], {}
        for name, x in zip("qkv", (q, k, v), strict=True):
            dims = tuple(d for d in range(-x.dim(), 0) if d != -2 or layer.scaling == "tensor")
            scale = power_of_two_scale(x, dims, 448.0)
            rounded.append((x.float() / scale).to(layer.format))
            named[f"{name}_descale"] = scale.reshape(-1)
            if layer.scaling == "head":
                sequences = len(x) if x.dim() == 4 else len(lengths["cu_seqlens_q"]) - 1
                of_heads = scale.reshape(1, -1).expand(sequences, -1)
                is_grouped = x.shape[-2] != k.shape[-2]
                named[f"{name}_descale"] = (
                    scale.expand(*x.shape[:-1], 1) if is_grouped else of_heads
                )
        function: Any = flash_attn_varlen_func if lengths else flash_attn_func
        out, lse = function(
            *rounded, **lengths, **options, **named, out_dtype=q.dtype, return_lse=True
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lengths, ctx.options = lengths, options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        options = dict(ctx.options)
        left, right = options.pop("window_size", (-1, -1))
        options |= {"is_causal": options.pop("causal"), "window_size_left": left}
        op: Any = OPS.varlen_bwd if ctx.lengths else OPS.bwd
        with torch.no_grad():
            dq, dk, dv, _, _ = op(
                dout, *ctx.saved_tensors, **ctx.lengths, **options, window_size_right=right
            )
        if torch.is_grad_enabled():
            out = ctx.saved_tensors[3]
            dq, dk, dv = NoDoubleBackward.apply(out, None, None, dout, None, dq, dk, dv)
        return dq, dk, dv, None, None, None


class AsItIs(FP8Attention):
    """The same layer, which keeps q, k and v in their own dtype."""

    def _call(self, tensors: Any, lengths: Any, options: Any) -> Tensor:
        is_plain = not (options.get("softcap") or options.get("dropout_p"))
        if not (is_plain and self._form(False).is_computed(tensors[0])):
            return FlashAttention3._call(self, tensors, lengths, options)
        if len(tensors) == 1:
            tensors = tensors[0].unbind(-3)
            lengths = {f"{name}_{x}": y for name, y in lengths.items() for x in "qk"}
        return OfCopies.apply(*tensors, self, lengths, options)


def pair(device: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> list[FP8Attention]:
    config = FP8AttentionConfig(D, HEADS, device=device, dtype=dtype, **fields)
    layers = [FP8Attention(config), AsItIs(config)]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


def gradients(
    layer: FP8Attention, *args: Tensor, call: Callable[..., Tensor] | None = None, **named: Any
) -> list[Tensor]:
    """out, and gradients of args[0] and parameters; dropout and dout from one seed."""
    torch.manual_seed(3)
    out = (layer if call is None else call)(*args, **named)
    dout = torch.randn_like(out) / 8  # the products of test_the_ends_of_fp16 stay within fp16
    return [out, *torch.autograd.grad(out, [args[0], *layer.parameters()], dout)]


def assert_same(layers: list[FP8Attention], *args: Tensor, **named: Any) -> None:
    found = [gradients(layer, *args, **named) for layer in layers]
    assert all(map(torch.equal, *found))
    assert all(x.isfinite().all() for x in found[0])


def saved_bytes(call: Callable[[], Any]) -> int:
    """Of all tensors that a call keeps for backward, each storage once."""
    storages: dict[int, int] = {}
    alive = []

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        alive.append(x)
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call()
    assert result is not None
    return sum(storages.values())


def tokens(device: str, dtype: torch.dtype = torch.bfloat16, seqlen: int = 40) -> Tensor:
    return torch.randn(2, seqlen, D).to(device, dtype).requires_grad_()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("scaling", ["tensor", "head"])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_gradients_are_the_same_to_the_bit(device, name, dtype, scaling, kv_heads, masked):
    layers = pair(
        device, dtype, format=name, scaling=scaling, num_kv_heads=kv_heads, pattern="causal",
        deterministic=True,
    )  # fmt: skip
    mask = torch.arange(40, device=device) < torch.tensor([[40], [23]], device=device)
    assert_same(layers, tokens(device, dtype), *([mask] if masked else []))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_cross_attention(device, kv_heads, masked):
    layers = pair(device, num_kv_heads=kv_heads, scaling="head", deterministic=True)
    key = torch.randn(2, 50, D).to(device, torch.bfloat16)
    mask = torch.rand(2, 50, device=device) < 0.6
    assert_same(layers, tokens(device), *([mask] if masked else []), key=key)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(
    "options",
    [{"dropout": 0.3}, {"window_size": (7, 2)}, {"softcap": 3.0}, {"softmax_scale": 0.7}],
    ids=str,
)
def test_options(device, options, kv_heads):
    layers = pair(device, num_kv_heads=kv_heads, deterministic=True, **options)
    assert_same(layers, tokens(device))
    mask = torch.rand(2, 40, device=device) < 0.7
    with check.switched():
        assert_same(layers, tokens(device), mask)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("scaling", ["tensor", "head"])
def test_half_of_the_bytes_of_q_k_and_v(device, scaling, dtype, kv_heads):
    layers = pair(device, dtype, scaling=scaling, num_kv_heads=kv_heads)
    x = tokens(device, dtype, 300)
    now, before = (saved_bytes(lambda layer=layer: layer(x)) for layer in layers)
    qkv = 2 * x.shape[0] * x.shape[1] * (HEADS + 2 * kv_heads) * (D // HEADS)
    assert qkv - (before - now) <= 0.55 * qkv
    with torch.no_grad():
        assert saved_bytes(lambda: layers[0](x)) == 0


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64])
@pytest.mark.parametrize("power", [0, 15, -14, -24, -60, -126])
def test_what_is_kept_is_exact(device, power, dtype, name):
    """Of every number that rounding leaves, at the ends of fp16's range too."""
    layer = FP8Attention(FP8AttentionConfig(D, HEADS, format=name, scaling="head", device=device))
    x = torch.randn(2, 50, HEADS, 16) * torch.randn(HEADS, 1).mul(4).exp()
    x = x.double() / x.abs().max() * (1.999 * 2.0**power)
    x = x.to(dtype).nan_to_num().to(device)
    wide = layer._rounded(x)
    form = Fp8Form(layer.format, (-2,))
    values, scale = form.keep(wide)
    assert values.dtype == layer.format and scale.shape == (1, 1, HEADS, 1)
    assert torch.equal((values.to(scale.dtype) * scale).to(dtype), wide)


def test_the_ends_of_fp16(device):
    """Gradients there, too: of values that nearly overflow."""
    layers = pair(device, torch.float16, bias=False, softmax_scale=2.0**-30, deterministic=True)
    with torch.no_grad():
        for layer in layers:
            layer.in_proj_weight.mul_(2.0**14)
            layer.out_proj.weight.mul_(2.0**-12)
    assert_same(layers, (tokens(device, torch.float16).detach() / 2).requires_grad_())


def test_numbers_that_are_not_finite_spoil_gradients_in_both(device):
    for bad in (torch.nan, torch.inf):
        for layer in pair(device):
            x = tokens(device).detach()
            x[0, 3, 5] = bad
            layer(x).sum().backward()
            assert not layer.in_proj_weight.grad.isfinite().all()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpoints_keep_nothing_of_it(device, dropout):
    layers = pair(device, dropout=dropout, deterministic=True)
    x = tokens(device, seqlen=200)

    def recomputed(x: Tensor) -> Tensor:
        return checkpoint(layers[0], x, use_reentrant=False)

    found = [gradients(layers[0], x), gradients(layers[0], x, call=recomputed),
             gradients(layers[1], x)]  # fmt: skip
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))
    kept = saved_bytes(lambda: recomputed(x))
    assert kept <= 1.1 * x.numel() * x.element_size()


def on_the_cpu() -> AbstractContextManager[None]:
    return torch.autograd.graph.save_on_cpu()


@pytest.mark.parametrize("context", [nullcontext, on_the_cpu])
def test_used_twice_and_differentiated_twice_over(device, context):
    layers = pair(device, pattern="causal", num_kv_heads=2, deterministic=True)
    x = tokens(device)
    found = []
    for layer in layers:
        with context():
            out = layer(layer(x) + x)
        dout = torch.ones_like(out)
        inputs = [x, *layer.parameters()]
        first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        second = torch.autograd.grad(out, inputs, dout)
        assert all(map(torch.equal, first, second))
        found.append(first)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_second_derivatives_are_refused(device, kv_heads):
    layers = pair(device, num_kv_heads=kv_heads, deterministic=True)
    x = tokens(device)
    found = []
    for layer in layers:
        (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        found.append(dx)
        with pytest.raises(NotImplementedError, match="not differentiable again"):
            torch.autograd.grad(dx.square().sum(), layer.in_proj_weight)
    assert torch.equal(*found)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_several_gradients_at_once(device, kv_heads):
    x = tokens(device, torch.float32)
    found = []
    douts = torch.randn(3, 2, 40, D, device=device)
    layers = pair(device, torch.float32, num_kv_heads=kv_heads)
    for layer in layers:
        found += torch.autograd.grad(layer(x), x, douts, is_grads_batched=True)
    found.append(torch.stack([torch.autograd.grad(layers[0](x), x, dout)[0] for dout in douts]))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-4, atol=1e-4)


def test_torch_func(device):
    layer, _ = pair(device, torch.float32, num_kv_heads=2)
    x = tokens(device, torch.float32)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,)).square().sum()

    found = torch.func.grad(loss)({name: y.detach() for name, y in layer.named_parameters()})
    layer(x).square().sum().backward()
    for name, y in layer.named_parameters():
        torch.testing.assert_close(y.grad, found[name], rtol=1e-4, atol=1e-4)


def test_frozen_parameters(device):
    found = []
    for layer in pair(device, num_kv_heads=2, deterministic=True):
        layer.requires_grad_(False)
        x, key = tokens(device), torch.ones(2, 9, D).to(device, torch.bfloat16)
        assert not layer(x.detach()).requires_grad
        x = torch.ones_like(x).requires_grad_()
        found.append(torch.autograd.grad(layer(x, key=key).sum(), x)[0])
    assert torch.equal(*found)


def test_autocast(device):
    layers = pair(device, torch.float32, deterministic=True)
    x = tokens(device, torch.float32)
    found = []
    for layer in layers:
        with torch.autocast(device, torch.bfloat16):
            out = layer(x)
        assert out.dtype == torch.bfloat16
        found.append(torch.autograd.grad(out.sum(), [x, *layer.parameters()]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_compiled_as_one_graph(device, kv_heads):
    torch._dynamo.reset()
    layer, _ = pair(device, torch.float32, num_kv_heads=kv_heads)
    x = tokens(device, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = [gradients(layer, x, call=call) for call in (layer, compiled)]
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_nothing_stays_alive(device):
    """No reference leads in a circle from what is kept."""
    layer, _ = pair(device, num_kv_heads=2)
    out = layer(tokens(device))
    left = [out.grad_fn]
    while (node := left.pop()).name() != "KeptAttentionBackward":
        left += [x for x, _ in node.next_functions if x is not None]
    found = weakref.ref(node)
    left.clear()
    del node
    gc.disable()
    try:
        del out
        assert found() is None
    finally:
        gc.enable()


def test_empty(device):
    layer, _ = pair(device)
    x = tokens(device, seqlen=0)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
