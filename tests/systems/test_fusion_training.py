"""Fused blocks in training: dropout, memory, precision, torch.compile."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fusion_models import (
    LAYERS,
    WIDTH,
    assert_same,
    encoder_layer,
    llama_block,
    saved_bytes,
    tokens,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.llama_block import rotary
from flash_cute.attention.fusion import (
    FusionConfig,
    FusionStrategy,
    OptimizationLevel,
    UnifiedAttentionFusion,
    create_unified_attention_fusion,
)
from flash_cute.attention.fusion.functions import Activate, AddNorm, LinearAddNorm

BALANCED = OptimizationLevel.BALANCED
sdpa = F.scaled_dot_product_attention


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_16_bits_are_as_near_as_eager(kind, dtype, cuda):
    """Outputs and gradients, with the projection, the sum and the norm as one kernel."""
    pytest.importorskip("triton")
    exact = encoder_layer(cuda, **LAYERS[kind]).double()
    eager = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(eager.state_dict())
    fused = create_unified_attention_fusion(copy.deepcopy(eager))
    x = tokens(exact, cuda).to(dtype)
    dout = torch.randn_like(x)
    results = []
    with mock.patch.object(LinearAddNorm, "apply", wraps=LinearAddNorm.apply) as apply:
        for model in (exact, eager, fused):
            of = next(model.parameters()).dtype
            leaf = x.to(of).requires_grad_()
            out = model(leaf)
            grads = torch.autograd.grad(out, [leaf, *model.parameters()], dout.to(of))
            results.append([y.double() for y in (out, *grads)])
    assert apply.call_count == 1
    for wanted, theirs, ours in zip(*results, strict=True):
        assert (ours - wanted).norm() <= 1.5 * (theirs - wanted).norm() + 1e-4 * wanted.norm()


@pytest.mark.parametrize("strategy", FusionStrategy)
def test_dropout_follows_the_seed_in_training_alone(strategy, device):
    layer = encoder_layer(device, dropout=0.3)
    fused, x = create_unified_attention_fusion(layer, strategy), tokens(layer, device)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(fused(x))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    fused.eval()
    layer.eval()
    assert_same(layer, fused, x)


@pytest.mark.parametrize("which", ["attention", "dropout", "dropout1", "dropout2"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_each_dropout_drops(which, norm_first, device):
    """Alone at p = 1 it leaves what the original leaves: nothing of its step."""
    layer = encoder_layer(device, norm_first=norm_first)
    if which == "attention":
        layer.self_attn.dropout = 1.0
    else:
        getattr(layer, which).p = 1.0
    fused = create_unified_attention_fusion(layer)
    with mock.patch.object(F, "scaled_dot_product_attention", of_nothing):
        assert_same(layer, fused, tokens(layer, device))


def of_nothing(q, k, v, mask=None, dropout_p=0.0, *_, **__):
    """torch's attention, which on CUDA is NaN where dropout leaves nothing."""
    return 0 * (q + k + v) if dropout_p == 1 else sdpa(q, k, v, mask, dropout_p)


def test_dropped_share_and_mean(device):
    """The kept are scaled by 1 / (1 - p); different seeds are independent."""
    x, p = torch.ones(300, 200, device=device), 0.25
    seeds = torch.tensor([11, -12], device=device)
    first, second = (Activate.apply(x, None, "identity", p, seed) for seed in seeds)
    for out in (first, second):
        assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - p)))}
        assert abs(float((out == 0).float().mean()) - p) < 0.01
        assert float((out == 0).float().mean(0).std()) < 0.05  # as chance has it in each column
    both = ((first == 0) & (second == 0)).float().mean()
    assert abs(float(both) - p * p) < 0.01


@pytest.mark.parametrize("keep_sum", [False, True])
def test_gradients_go_where_dropout_kept(keep_sum, device):
    y = torch.ones(1, 50, 64, device=device, requires_grad=True)
    x = torch.zeros_like(y).requires_grad_()
    weight, bias = torch.randn(2, 64, device=device).unbind()
    seed = torch.tensor(5, device=device)
    total, out = AddNorm.apply(x, y, weight, bias, (1e-5, False, 0.5, keep_sum), seed)
    dx, dy = torch.autograd.grad(out, (x, y), torch.randn_like(out))
    kept = dy != 0
    assert torch.allclose(dy[kept], dx[kept] * 2) and 0.4 < float(kept.float().mean()) < 0.6
    if keep_sum:
        assert torch.equal(total != 0, kept)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_a_layer_with_dropout(kind):
    """By differences, with the same seed each time, in fp64."""
    layer = encoder_layer(dropout=0.3, **LAYERS[kind]).double()
    fused = create_unified_attention_fusion(layer)

    def call(x):
        torch.manual_seed(0)
        return fused(x)

    x = tokens(layer)[:3, :2].double().requires_grad_()
    assert torch.autograd.gradcheck(call, x, fast_mode=True)


@pytest.mark.parametrize("level", OptimizationLevel)
def test_training_lowers_the_loss(level, device):
    layer = encoder_layer(device, dropout=0.1, batch_first=True)
    fused = create_unified_attention_fusion(layer, optimization_level=level)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)  # of the original: they are shared
    x = tokens(layer, device)
    target = x.roll(1, dims=1)
    losses = []
    for _ in range(40):
        loss = (fused(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("kind", ["relu", "gelu", "llama"])
def test_memory_optimization_saves_less(kind):
    if kind == "llama":
        model, x = llama_block(hidden=256), torch.randn(2, 64, WIDTH)
    else:
        model = encoder_layer(activation=kind)
        model.linear1, model.linear2 = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        model.dropout.p, x = 0.1, torch.randn(64, 2, WIDTH)
    hidden = 2 * 64 * 256 * 4
    saved = {}
    for optimize in (True, False):
        config = FusionConfig(enable_memory_optimization=optimize)
        fused = UnifiedAttentionFusion(model, config)
        saved[optimize] = saved_bytes(lambda fused=fused: fused(x), model)
    eager = saved_bytes(lambda: model(x), model)
    assert saved[True] <= saved[False] - hidden < saved[False] <= eager
    assert saved[True] < eager - hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_follows_autocast(dtype, device):
    layer = encoder_layer(device, batch_first=True)
    x = tokens(layer, device)
    exact = layer(x)
    fused = UnifiedAttentionFusion(layer, FusionConfig())
    plain = UnifiedAttentionFusion(layer, FusionConfig(enable_mixed_precision=False))
    assert torch.allclose(fused(x), exact, atol=1e-4)  # outside of autocast nothing is rounded
    with torch.autocast(device, dtype):
        rounded, wanted, unrounded = fused(x), layer(x), plain(x.to(dtype))
    assert rounded.dtype == torch.float32
    error = float((rounded - exact).detach().abs().max())
    assert 1e-4 < error < 2 * float((wanted.float() - exact).detach().abs().max()) + 0.02
    assert unrounded.dtype == torch.float32
    assert torch.allclose(unrounded, layer(x.to(dtype).float()), atol=1e-4)
    rounded.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    layer = encoder_layer(batch_first=True).to(dtype)
    fused, x = create_unified_attention_fusion(layer), tokens(layer).to(dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 0.1
    out = fused(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, layer(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["layer", "llama"])
def test_gradients_by_torch_func(kind):
    """Of each sample: vmap over grad."""
    model = llama_block() if kind == "llama" else encoder_layer(batch_first=True)
    fused, x = create_unified_attention_fusion(model), torch.randn(3, 5, WIDTH)

    def loss(weights, one, sample):
        return torch.func.functional_call(one, weights, (sample[None],)).square().sum()

    found = []
    for one in (model, fused):
        weights = {name: p.detach() for name, p in one.named_parameters()}
        of_samples = torch.func.vmap(torch.func.grad(loss), in_dims=(None, None, 0))
        found.append(list(of_samples(weights, one, x).values()))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_fake_tensors():
    """Sizes are known without a computation, dropout included."""
    with FakeTensorMode():
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48)
        fused = create_unified_attention_fusion(layer)
        out = fused(torch.randn(5, 2, WIDTH))
        assert out.shape == (5, 2, WIDTH)
        out.sum().backward()


def test_norms_may_be_wider():
    """As models have them whose other parameters are bf16."""
    layer = encoder_layer(batch_first=True).bfloat16()
    for norm in (layer.norm1, layer.norm2):
        norm.float()
    fused, x = create_unified_attention_fusion(layer), tokens(layer).bfloat16()
    wanted, out = layer(x), fused(x)
    assert out.dtype == wanted.dtype
    torch.testing.assert_close(out, wanted, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("kind", ["as_documented", "norm_first_batch_first", "llama"])
def test_compiles_as_one_graph(kind):
    torch.compiler.reset()
    if kind == "llama":
        model, x = llama_block(), torch.randn(2, 7, WIDTH)
        extra = {"position_embeddings": rotary(7, model.self_attn.head_dim)}
    else:
        model = encoder_layer(**LAYERS[kind])
        x, extra = tokens(model), {"is_causal": True}
    fused = create_unified_attention_fusion(model)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    assert_same(fused, compiled, x, **extra)


def test_compiles_with_padding_and_dropout():
    torch.compiler.reset()
    layer = encoder_layer(dropout=0.2)
    fused, x = create_unified_attention_fusion(layer), tokens(layer)
    hidden = torch.zeros(x.shape[1], x.shape[0], dtype=torch.bool)
    hidden[1, 3:] = True
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    compiled(x, src_key_padding_mask=hidden).sum().backward()
    fused.eval()
    torch.testing.assert_close(
        compiled(x, src_key_padding_mask=hidden), fused(x, src_key_padding_mask=hidden)
    )


def test_gradients_of_gradients_are_refused():
    """Also where the gradient that comes in requires none: of a sum."""
    fused = create_unified_attention_fusion(nn.TransformerEncoderLayer(16, 2, 32, 0.0))
    x = torch.randn(5, 2, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="once_differentiable"):
        torch.autograd.grad(fused(x).sum(), x, create_graph=True)
