"""Blocks of Llama's shape: equal, in one product each, refused where they are something else."""

from __future__ import annotations

import copy

import pytest
import torch
from fusion_models import HEADS, WIDTH, assert_same, llama_block
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.llama_block import LlamaBlock, rotary
from flash_cute.attention.fusion import (
    FusionStrategy,
    OptimizationLevel,
    create_unified_attention_fusion,
)

DIM = WIDTH // HEADS


@pytest.mark.parametrize("strategy", FusionStrategy)
@pytest.mark.parametrize("level", OptimizationLevel)
def test_blocks(strategy, level, device):
    block = llama_block(device)
    fused = create_unified_attention_fusion(block, strategy, level)
    x = torch.randn(2, 9, WIDTH, device=device)
    assert_same(block, fused, x, position_embeddings=rotary(9, DIM, device))


@pytest.mark.parametrize("heads_k", [1, HEADS])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_and_biases(heads_k, bias, device):
    block = llama_block(device, heads_k=heads_k, bias=bias)
    fused = create_unified_attention_fusion(block)
    x = torch.randn(2, 9, WIDTH, device=device)
    assert_same(block, fused, x)
    cos, sin = (a.expand(2, -1, -1) for a in rotary(9, DIM, device))
    assert_same(block, fused, x, position_embeddings=(cos, sin))


@pytest.mark.parametrize("shape", [(0, 5, WIDTH), (2, 0, WIDTH)])
def test_nothing_to_attend(shape, device):
    block = create_unified_attention_fusion(llama_block(device))
    x = torch.randn(shape, device=device, requires_grad=True)
    out = block(x)
    out.sum().backward()
    assert out.shape == x.shape and x.grad is not None and x.grad.shape == x.shape


def test_masks(device):
    block = llama_block(device)
    fused = create_unified_attention_fusion(block)
    x = torch.randn(2, 9, WIDTH, device=device)
    seen = torch.rand(2, 1, 9, 9, device=device) < 0.6
    seen |= torch.eye(9, dtype=torch.bool, device=device)
    assert_same(block, fused, x, seen)
    assert_same(block, fused, x, torch.randn(1, 1, 9, 9, device=device))


class Concatenations(TorchDispatchMode):
    """Counts the elements that are copied into one tensor."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements += out.numel() if func is torch.ops.aten.cat.default else 0
        return out


def test_weights_are_neither_copied_nor_moved():
    block = llama_block()
    before = copy.deepcopy(block.state_dict())
    places = [p.data_ptr() for p in block.parameters()]
    fused = create_unified_attention_fusion(block)
    with Concatenations() as copied:
        fused(torch.randn(1, 1, WIDTH)).sum().backward()
    assert copied.elements < min(p.numel() for p in block.parameters() if p.dim() == 2)
    assert [p.data_ptr() for p in block.parameters()] == places
    for p in block.parameters():  # what is saved of one holds that one alone
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
    for name, value in before.items():
        assert torch.equal(block.state_dict()[name], value)
    assert [id(p) for p in fused.parameters()] == [id(p) for p in block.parameters()]
    assert list(fused.state_dict()) == list(block.state_dict())


def test_moved_weights_are_joined_again():
    block = llama_block()
    fused = create_unified_attention_fusion(block)
    x = torch.randn(2, 5, WIDTH)
    moved = copy.deepcopy(fused).double()
    moved.model.self_attn.k_proj.weight.data = moved.model.self_attn.k_proj.weight.data.clone()
    torch.testing.assert_close(moved(x.double()).float(), block(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        block.self_attn.k_proj.weight.mul_(2)  # in place: packed weights see it
    torch.testing.assert_close(fused(x), block(x), rtol=1e-4, atol=1e-4)


def test_a_stack_of_blocks(device):
    model = nn.Sequential(*(llama_block(device) for _ in range(3)))
    fused = create_unified_attention_fusion(model)
    assert list(fused.report) == ["0", "1", "2"]
    assert_same(model, fused, torch.randn(2, 9, WIDTH, device=device))


def changed(change) -> LlamaBlock:
    block = llama_block()
    change(block)
    return block


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda b: setattr(b.self_attn, "q_norm", nn.Identity()), "q_norm"),
        (lambda b: setattr(b.mlp, "act_fn", nn.GELU()), "act_fn is not SiLU"),
        (lambda b: setattr(b.self_attn, "sliding_window", 4), "sliding window"),
        (lambda b: setattr(b.self_attn, "is_causal", None), "is_causal is not a bool"),
        (lambda b: setattr(b, "input_layernorm", nn.LayerNorm(WIDTH)), "input_layernorm does not"),
        (lambda b: b.mlp.up_proj.register_forward_hook(lambda *_: None), "hooks of mlp.up_proj"),
    ],
)
def test_other_blocks_are_refused(change, reason):
    with pytest.raises(NotImplementedError, match=reason):
        create_unified_attention_fusion(changed(change))


def test_no_cache():
    fused = create_unified_attention_fusion(llama_block())
    with pytest.raises(NotImplementedError, match="past_key_values"):
        fused(torch.randn(1, 3, WIDTH), past_key_values=object())


def test_training_lowers_the_loss(device):
    block = llama_block(device)
    fused = create_unified_attention_fusion(block)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)  # the original's: they are shared
    torch.manual_seed(0)
    x = torch.randn(2, 9, WIDTH, device=device)
    position, losses = rotary(9, DIM, device), []
    for _ in range(30):
        loss = (fused(x, position_embeddings=position) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert_same(block, fused, x, position_embeddings=position)  # packed weights moved along
