"""Every attention layer is exact multi-head attention, with gradients, and stores no scores."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import layer_oracle as oracle
import pytest
import torch
from torch import Tensor, nn

from flash_cute.attention import (
    AttentionConfig,
    AttentionPatterns,
    FlashAttention3,
    create_attention,
    create_sparse_attention,
)
from flash_cute.core import AttentionLayer

D, HEADS = 64, 4


def from_config(**fields: Any) -> Callable[..., nn.Module]:
    return lambda **kind: create_attention(AttentionConfig(D, HEADS, **fields, **kind))


# How each layer is made, and what the oracle is told of it.
LAYERS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "AttentionLayer": (lambda **kind: AttentionLayer(D, HEADS, dropout=0.0, **kind), {}),
    "no_bias": (lambda **kind: AttentionLayer(D, HEADS, 0.0, False, **kind), {}),
    "FULL": (from_config(), {}),
    "CAUSAL": (from_config(pattern=AttentionPatterns.CAUSAL), {"causal": True}),
    "FlashAttention3": (lambda **kind: FlashAttention3(D, HEADS, **kind), {}),
    "grouped": (
        lambda **kind: FlashAttention3(D, HEADS, num_kv_heads=2, pattern="causal", **kind),
        {"kv_heads": 2, "causal": True},
    ),
    "RING": (from_config(pattern=AttentionPatterns.RING), {}),
    "CONTEXT_PARALLEL": (
        from_config(pattern=AttentionPatterns.CONTEXT_PARALLEL, context_parallel_size=3),
        {},
    ),
    "SPARSE_at_0": (lambda **kind: create_sparse_attention(D, HEADS, 0.0, **kind), {}),
    "scores": (
        from_config(window_size=(9, 4), softmax_scale=0.3, softcap=2.0),
        {"window": (9, 4), "scale": 0.3, "softcap": 2.0},
    ),
}
EXACT = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.fixture(params=LAYERS)
def layer_and_options(request: pytest.FixtureRequest) -> tuple[Callable[..., nn.Module], Any]:
    torch.manual_seed(0)
    return LAYERS[request.param]


def tokens(device: str, seqlen: int, dtype: torch.dtype = torch.float32, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seqlen)
    x = torch.randn(batch, seqlen, D, generator=generator, dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("seqlen", [1, 17, 300])
def test_equals_softmax_in_fp64(layer_and_options, device, seqlen, dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("there are no fp64 kernels")
    make, options = layer_and_options
    layer = make(device=device, dtype=dtype)
    x = tokens(device, seqlen, dtype)
    x64 = x.detach().cpu().double().requires_grad_()
    parameters = oracle.parameters_of(layer)
    expected = oracle.attend(parameters, HEADS, x64, **options)
    out = layer(x)
    assert out.shape == x.shape and out.dtype == dtype and out.device == x.device
    assert oracle.difference(out, expected) < EXACT[dtype]
    dout = torch.randn_like(expected)
    expected.backward(dout)
    out.backward(dout.to(out))
    assert x.grad is not None and x64.grad is not None
    assert oracle.difference(x.grad, x64.grad) < EXACT[dtype]
    oracle.compare_gradients(layer, parameters, EXACT[dtype])


def test_batch_entries_are_alone(layer_and_options, device):
    layer = layer_and_options[0](device=device)
    x = tokens(device, 40, batch=3)
    together = layer(x)
    for i in range(3):
        torch.testing.assert_close(layer(x[i : i + 1]), together[i : i + 1], rtol=1e-5, atol=1e-6)
    x = x.detach().clone()
    x[1] = torch.nan
    assert torch.equal(layer(x).isnan().any(-1).any(-1).cpu(), torch.tensor([False, True, False]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision(layer_and_options, device, dtype):
    make, options = layer_and_options
    layer = make(device=device, dtype=dtype)
    x = tokens(device, 100, dtype)
    expected = oracle.attend(
        oracle.parameters_of(layer), HEADS, x.detach().cpu().double(), **options
    )
    out = layer(x)
    out.float().square().sum().backward()
    assert out.dtype == x.grad.dtype == dtype and x.grad.isfinite().all()
    assert oracle.difference(out, expected) < 8 * torch.finfo(dtype).eps


def test_autocast(layer_and_options, device):
    make, options = layer_and_options
    layer = make(device=device)
    x = tokens(device, 50)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = layer(x)
    expected = oracle.attend(
        oracle.parameters_of(layer), HEADS, x.detach().cpu().double(), **options
    )
    assert out.dtype == torch.bfloat16
    assert oracle.difference(out, expected) < 8 * torch.finfo(torch.bfloat16).eps


def test_state_is_saved_copied_and_loaded(layer_and_options, device):
    make, _ = layer_and_options
    layer, other = make(device=device), make(device=device)
    x = tokens(device, 30)
    expected = layer(x)
    assert not torch.equal(other(x), expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), expected)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


def test_meta(layer_and_options):
    layer = layer_and_options[0](device="meta")
    x = torch.empty(2, 1_000_000, D, device="meta")
    mask = torch.empty(2, 1_000_000, device="meta", dtype=torch.bool)
    assert layer(x).shape == layer(x, mask).shape == x.shape
    assert layer(x).device.type == "meta"


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_and_exported(layer_and_options, device, masked):
    layer = layer_and_options[0](device=device)
    x = tokens(device, 30)
    args = (x, torch.arange(30, device=device) < torch.tensor([[30], [11]], device=device))
    args = args if masked else args[:1]
    expected = layer(*args)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(*args)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x)[0], grad)
    exported = torch.export.export(layer, tuple(y.detach() for y in args)).module()
    torch.testing.assert_close(exported(*args), expected)


@pytest.mark.parametrize("name", ["AttentionLayer", "CAUSAL", "grouped"])
def test_training_lowers_a_loss(device, name):
    torch.manual_seed(0)
    layer = LAYERS[name][0](device=device)
    x = tokens(device, 20, batch=4).detach()
    target = x.roll(1, dims=1)
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("masked", [False, True])
def test_no_score_matrix_on_the_cpu(layer_and_options, masked):
    """Of 2000 tokens one head's scores have 16 MB in fp32; no allocation comes near."""
    layer = layer_and_options[0]()
    x = tokens("cpu", 2000, batch=1)
    mask = torch.ones(1, 2000, dtype=torch.bool) if masked else None
    with torch.profiler.profile(profile_memory=True) as profile:
        layer(x, mask).sum().backward()
    allocations = [
        event.nbytes() for event in profile.profiler.kineto_results.events() if event.nbytes() > 0
    ]
    assert 4 * x.numel() <= max(allocations) < 2000 * 2000 * 4 / 4


@pytest.mark.usefixtures("no_garbage")
def test_no_score_matrix_on_cuda(layer_and_options, cuda):
    layer = layer_and_options[0](device=cuda, dtype=torch.bfloat16)
    x = tokens(cuda, 32_768, torch.bfloat16, batch=1)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer(x).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 32_768**2 / 8


def test_views_are_no_other_tokens(device):
    """Tokens in the layout of batch_first=False."""
    layer = AttentionLayer(D, HEADS, 0.0, device=device)
    x = tokens(device, 33).detach()
    torch.testing.assert_close(layer(x.transpose(0, 1).contiguous().transpose(0, 1)), layer(x))


def test_no_tokens(device):
    layer = AttentionLayer(D, HEADS, 0.0, device=device)
    for shape in ((2, 0, D), (0, 5, D)):
        x = torch.ones(shape, device=device)
        assert (
            layer(x).shape == layer(x, torch.ones(shape[:2], device=device).bool()).shape == shape
        )
