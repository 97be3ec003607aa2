"""The examples of the document that flash_cute.tiled follows, as a reader would run them."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn


def test_forward(device):
    from flash_cute import flash_attention_forward

    Q = torch.randn(8, 16, 1024, 64).to(device)
    K = torch.randn(8, 16, 1024, 64).to(device)
    V = torch.randn(8, 16, 1024, 64).to(device)
    output = flash_attention_forward(Q, K, V, Bc=64, Br=32, use_half=False)
    assert output.shape == Q.shape
    expected = nn.functional.scaled_dot_product_attention(Q, K, V)
    assert (output - expected).abs().max() < 1e-4


def test_class(device):
    from flash_cute import FlashAttention

    Q, K, V = torch.randn(3, 2, 4, 200, 64, device=device).unbind()
    flash_attn = FlashAttention(bc=64, br=32, use_half=True)
    output = flash_attn(Q, K, V)
    expected = nn.functional.scaled_dot_product_attention(Q, K, V)
    assert (output - expected).abs().max() < 2e-3


def test_block_sizes(capsys):
    from flash_cute import get_optimal_block_sizes

    bc, br = get_optimal_block_sizes(1024, 128)
    print(f"Optimal block sizes: Bc={bc}, Br={br}")
    assert capsys.readouterr().out == f"Optimal block sizes: Bc={bc}, Br={br}\n"
    assert bc >= 1 and br >= 1


def test_memory(capsys):
    from flash_cute import estimate_memory_usage

    mem_info = estimate_memory_usage(8, 16, 1024, 64, use_half=True)
    print(f"Total memory: {mem_info['total_memory_mb']:.1f} MB")
    assert capsys.readouterr().out == "Total memory: 64.5 MB\n"


def test_basic_usage(device):
    from flash_cute import flash_attention_forward

    Q = torch.randn(4, 8, 512, 64).to(device)
    K = torch.randn(4, 8, 512, 64).to(device)
    V = torch.randn(4, 8, 512, 64).to(device)
    output = flash_attention_forward(Q, K, V)
    expected = nn.functional.scaled_dot_product_attention(Q, K, V)
    assert (output - expected).abs().max() < 1e-4


def transformer_block(embed_dim, num_heads):
    from flash_cute import FlashAttention

    class TransformerBlock(nn.Module):
        def __init__(self, embed_dim, num_heads):
            super().__init__()
            self.attention = FlashAttention(use_half=True)
            self.norm1 = nn.LayerNorm(embed_dim)
            self.norm2 = nn.LayerNorm(embed_dim)
            self.mlp = nn.Sequential(
                nn.Linear(embed_dim, 4 * embed_dim),
                nn.GELU(),
                nn.Linear(4 * embed_dim, embed_dim),
            )

        def forward(self, x):
            attn_out = self.attention(x, x, x)
            x = self.norm1(x + attn_out)
            mlp_out = self.mlp(x)
            x = self.norm2(x + mlp_out)
            return x

    return TransformerBlock(embed_dim, num_heads)


@pytest.mark.parametrize("shape", [(2, 4, 24, 32), (4, 24, 32)])
def test_training_loop(device, shape):
    """Until the loss halves."""
    torch.manual_seed(0)
    block = transformer_block(32, 4).to(device)
    embed = nn.Parameter(torch.randn(shape, device=device))
    x, target = torch.randn(2, *shape, device=device).unbind()
    optimizer = torch.optim.Adam([*block.parameters(), embed], lr=3e-3)
    first = None
    for _ in range(300):
        loss = (block(x + embed) - target).square().mean()
        first = loss.item() if first is None else first
        if loss.item() < first / 2:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert embed.grad.isfinite().all() and embed.grad.abs().max() > 0
    assert loss.item() < first / 2


def test_memory_optimization(capsys):
    from flash_cute import estimate_memory_usage, get_optimal_block_sizes

    batch_size, num_heads, seq_len, head_dim = 8, 16, 2048, 64
    mem_info = estimate_memory_usage(batch_size, num_heads, seq_len, head_dim, use_half=True)
    if mem_info["total_memory_mb"] > 1000:
        print("Consider using smaller batch size or FP16")
    bc, br = get_optimal_block_sizes(seq_len, head_dim)
    assert 100 < mem_info["total_memory_mb"] < 200 and capsys.readouterr().out == ""
    assert (bc, br) == (32, 128)
