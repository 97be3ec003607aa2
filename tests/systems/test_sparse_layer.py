"""Sparse attention layers: exact over what they keep, and they leave out what was asked."""

from __future__ import annotations

import copy
from typing import Any

import layer_oracle as oracle
import pytest
import torch
from torch import Tensor, nn

from flash_cute.attention import (
    DynamicSparseAttention,
    SparsePattern,
    create_sparse_attention,
)

D, HEADS = 64, 2
EXACT = {torch.float64: 1e-12, torch.float32: 3e-5}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"num_kv_heads": 1, "causal": True, "softmax_scale": 0.3},
    "softcap": {"softcap": 2.0},
}


@pytest.fixture
def device() -> str:
    """On a GPU fp32 has no kernel over lists: tests/kernels/test_list_kernels.py has the layer."""
    return "cpu"


def tokens(device: str, seqlen: int, dtype: torch.dtype = torch.float32, batch: int = 1) -> Tensor:
    x = torch.randn(batch, seqlen, D, dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def kept_pairs(layer: DynamicSparseAttention, x: Tensor, **more: Any) -> Tensor:
    """bool (batch or 1, heads or kv_heads or 1, seqlen, seqlen): the blocks that a call keeps."""
    q, k, _ = layer._split(x.detach())
    choice = layer.choose(q, k, layer.config.causal, **more)
    block, seqlen = choice.grid.block, x.shape[1]
    kept = choice.kept.repeat_interleave(block, -2).repeat_interleave(block, -1)
    return kept[..., :seqlen, :seqlen].cpu()


def oracle_options(options: dict[str, Any]) -> dict[str, Any]:
    names = {"num_kv_heads": "kv_heads", "softmax_scale": "scale"}
    return {names.get(name, name): x for name, x in options.items()}


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("pattern", SparsePattern)
def test_is_exact_over_what_it_keeps(device, pattern, options, dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("there are no fp64 kernels")
    options = OPTIONS[options]
    layer = create_sparse_attention(D, HEADS, 0.7, pattern, device=device, dtype=dtype, **options)
    x = tokens(device, 500, dtype, batch=2)
    x64 = x.detach().cpu().double().requires_grad_()
    parameters = oracle.parameters_of(layer)
    kept = kept_pairs(layer, x)
    expected = oracle.attend(parameters, HEADS, x64, kept=kept, **oracle_options(options))
    out = layer(x)
    assert out.shape == x.shape and out.dtype == dtype
    assert oracle.difference(out, expected) < EXACT[dtype]
    dout = torch.randn_like(expected)
    expected.backward(dout)
    out.backward(dout.to(out))
    assert oracle.difference(x.grad, x64.grad) < EXACT[dtype]
    gate = {name for name, _ in layer.named_parameters() if name.startswith("gate")}
    assert bool(gate) == (pattern is SparsePattern.LEARNED)
    size = max(y.grad.abs().max().item() for y in parameters.values() if y.grad is not None)
    for name, y in layer.named_parameters():
        if name in gate:
            assert y.grad is None  # of what is kept there is no gradient
        else:
            error = (y.grad.cpu().double() - parameters[name].grad).abs().max().item()
            assert error <= EXACT[dtype] * size, name


def kept_by_gradients(layer: nn.Module, seqlen: int) -> Tensor:
    """bool (seqlen, seqlen) of a layer of one head whose scores are all alike: which values each
    output depends on, seen from outside."""
    with torch.no_grad():
        layer.in_proj_weight[: 2 * D] = 0
        layer.in_proj_weight[2 * D :] = torch.eye(D)
        layer.out_proj.weight.copy_(torch.eye(D))
    blocks = -(-seqlen // D)
    seen = torch.zeros(seqlen, seqlen, dtype=torch.bool)
    for block in range(blocks):  # as many tokens at a time as there are channels
        x = torch.zeros(1, seqlen, D)
        some = slice(D * block, min(seqlen, D * block + D))
        x[0, some] = torch.eye(D)[: some.stop - some.start]
        seen[:, some] = layer(x)[0, :, : some.stop - some.start].detach() > 1e-9
    return seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ratio", [0.5, 0.9])
@pytest.mark.parametrize("pattern", SparsePattern)
def test_realised_sparsity_seen_from_outside(pattern, ratio, causal):
    layer = create_sparse_attention(D, 1, ratio, pattern, causal=causal, bias=False)
    seen = kept_by_gradients(layer, 2048)
    visible = 2048 * 2049 / 2 if causal else 2048**2
    assert abs(1 - seen.sum().item() / visible - ratio) <= 0.06
    assert layer.last_sparsity == pytest.approx(1 - seen.sum().item() / visible, abs=1e-6)
    assert seen.any(1).all() and not (causal and seen.triu(1).any())
    if pattern is SparsePattern.LOCAL_GLOBAL:
        assert seen.diagonal().all() and seen.diagonal(-1).float().mean() > 0.95
        assert seen[:, 0].all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("garbage", [torch.nan, 1e30], ids=str)
@pytest.mark.parametrize("pattern", SparsePattern)
def test_only_tokens_that_take_part_matter(device, pattern, garbage, is_causal):
    layer = create_sparse_attention(D, HEADS, 0.6, pattern, device=device, causal=is_causal)
    mask = torch.rand(3, 400) < torch.tensor([[1.0], [0.7], [0.0]])
    x64 = torch.randn(3, 400, D, dtype=torch.float64, requires_grad=True)
    x = x64.detach().float().masked_fill(~mask[..., None], garbage).to(device).requires_grad_()
    out = layer(x, mask.to(device))
    parameters = oracle.parameters_of(layer)
    expected = torch.empty(3, 400, D, dtype=torch.float64)
    for i in range(3):  # each sequence as if it had been cut and joined
        alone = x64[i : i + 1, mask[i]]
        kept = kept_of_length(layer, x64[i], mask[i])
        rows = oracle.attend(parameters, HEADS, alone, kept=kept, causal=is_causal)
        bias = parameters["out_proj.bias"].expand(400, D)
        expected[i] = bias.masked_scatter(mask[i, :, None], rows[0])
    assert oracle.difference(out, expected) < 3e-5
    dout = torch.randn_like(expected)
    expected.backward(dout)
    out.backward(dout.to(out))
    assert oracle.difference(x.grad, x64.grad) < 3e-5
    assert not x.grad[~mask.to(device)].any()


def kept_of_length(layer: DynamicSparseAttention, x: Tensor, mask: Tensor) -> Tensor:
    """What the layer keeps of a sequence of 400 places whose tokens stand in front."""
    length = int(mask.sum())
    packed = torch.zeros(1, 400, D)
    packed[0, :length] = x[mask].float()
    device = layer.in_proj_weight.device
    lengths = torch.tensor([length], device=device)
    return kept_pairs(layer, packed.to(device), lengths=lengths)[..., :length, :length]


def test_tokens_of_a_mask_need_not_be_in_front(device):
    layer = create_sparse_attention(D, HEADS, 0.6, "dynamic_threshold", device=device)
    x = tokens(device, 300)
    place = torch.randperm(600)[:300].sort().values
    spread = torch.randn(1, 600, D, device=device)
    spread[:, place] = x.detach()
    mask = torch.zeros(1, 600, dtype=torch.bool, device=device)
    mask[:, place] = True
    before = torch.zeros(1, 600, D, device=device)
    before[:, :300] = x.detach()
    expected = layer(before, torch.arange(600, device=device)[None] < 300)[:, :300]
    torch.testing.assert_close(layer(spread, mask)[:, place], expected, rtol=1e-4, atol=1e-5)
    assert layer.last_sparsity is not None and layer.last_sparsity > 0.4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision(device, dtype):
    layer = create_sparse_attention(D, HEADS, 0.8, device=device, dtype=dtype)
    x = tokens(device, 1000, dtype)
    kept = kept_pairs(layer, x)
    x64 = x.detach().cpu().double()
    expected = oracle.attend(oracle.parameters_of(layer), HEADS, x64, kept=kept)
    out = layer(x)
    out.float().square().sum().backward()
    assert out.dtype == x.grad.dtype == dtype and x.grad.isfinite().all()
    assert oracle.difference(out, expected) < 8 * torch.finfo(dtype).eps


def planted_clusters(seqlen: int) -> Tensor:
    """Tokens of which each 64 look for one run of keys, where they find 99 % of their attention."""
    runs = seqlen // 128
    sought = torch.randperm(runs).repeat_interleave(128)
    own = torch.nn.functional.one_hot(torch.arange(runs).repeat_interleave(128), 32)
    wanted = torch.nn.functional.one_hot(sought, 32)
    return torch.cat((own, wanted, torch.randn(seqlen, 64) / 8), 1)[None]


def layer_of_clusters(pattern: str) -> DynamicSparseAttention:
    """q is the second, k the first, and v the last part of a token."""
    layer = create_sparse_attention(128, 1, 0.9, pattern, bias=False)
    weight = torch.zeros(3, 128, 128)
    place = torch.arange(32)
    weight[0, place, place + 32] = 15
    weight[1, place, place] = 15
    weight[2, torch.arange(64), torch.arange(64) + 64] = 1
    with torch.no_grad():
        layer.in_proj_weight.copy_(weight.flatten(0, 1))
        layer.out_proj.weight.copy_(torch.eye(128))
    return layer


@pytest.mark.parametrize("seqlen", [2048, 4096])
def test_where_few_keys_get_attention_nine_tenths_cost_less_than_a_percent(seqlen):
    x = planted_clusters(seqlen)
    errors = {}
    for pattern in ("dynamic_threshold", "learned", "random"):
        layer = layer_of_clusters(pattern)
        expected = oracle.attend(oracle.parameters_of(layer), 1, x.double())
        out = layer(x).double()
        errors[pattern] = ((out - expected).norm() / expected.norm()).item()
        assert layer.last_sparsity == pytest.approx(0.9, abs=0.06)
    assert errors["dynamic_threshold"] < min(0.01, 0.3 * errors["random"])
    assert errors["learned"] < min(0.01, 0.3 * errors["random"])  # of means, untrained


def test_learned_learns_by_its_own_loss_and_changes_its_pattern(device):
    layer = create_sparse_attention(D, HEADS, 0.8, "learned", device=device)
    x = tokens(device, 1024)
    mask = torch.arange(1024, device=device)[None] < 900
    before = kept_pairs(layer, x)
    optimizer = torch.optim.Adam(layer.gate.parameters(), 3e-2)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        loss = layer.distill_loss(x, mask if step % 2 else None, is_causal=step % 3 == 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(y.grad is not None and y.grad.any() for y in layer.gate.parameters())
    assert x.grad is None and layer.in_proj_weight.grad is None
    assert sum(losses[-6:]) < sum(losses[:6])
    assert not torch.equal(kept_pairs(layer, x), before)
    with pytest.raises(NotImplementedError, match=r"RANDOM, which learns nothing; .*LEARNED has"):
        create_sparse_attention(D, HEADS, pattern="random").distill_loss(x)
    nothing = layer.distill_loss(x[:, :0])
    nothing.backward()
    assert nothing == 0


@pytest.mark.parametrize("pattern", SparsePattern)
def test_training_lowers_a_loss(device, pattern):
    torch.manual_seed(0)
    layer = create_sparse_attention(D, HEADS, 0.7, pattern, device=device)
    x = tokens(device, 300).detach()
    target = x.cumsum(1) / torch.arange(1, 301, device=device)[:, None] ** 0.5
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize("pattern", SparsePattern)
def test_copies_and_states(device, pattern):
    layer = create_sparse_attention(D, HEADS, 0.7, pattern, device=device)
    other = create_sparse_attention(D, HEADS, 0.7, pattern, device=device)
    other.load_state_dict(layer.state_dict())
    x = tokens(device, 300)
    expected = layer(x)
    assert torch.equal(other(x), expected) and torch.equal(copy.deepcopy(layer)(x), expected)
    theirs = nn.MultiheadAttention(D, HEADS, device=device).state_dict()
    keys = {name for name in layer.state_dict() if not name.startswith("gate.")}
    assert keys == set(theirs)
    layer.load_state_dict(theirs, strict=pattern is not SparsePattern.LEARNED)
    together = layer(x.expand(3, -1, -1))
    torch.testing.assert_close(together, layer(x).expand(3, -1, -1), rtol=1e-5, atol=1e-6)
