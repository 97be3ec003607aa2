"""Tensors lie where their inputs do, whatever ``torch.set_default_device`` says."""

from __future__ import annotations

from collections.abc import Callable

import cpu_calls
import pytest
import torch
from torch import Tensor, nn

from benchmarks.llama_block import LlamaBlock
from flash_cute import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_cute.attention.fusion import UnifiedAttentionFusion
from flash_cute.lab.test.utils import error_statistics
from flash_cute.utils.validation_framework import ComponentValidator


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cpu", dtype=torch.float64)


def dense(dropout_p: float, window: tuple[int, int]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (randn(2, n, 4, 8).requires_grad_() for n in (9, 13, 13))
    rng = torch.tensor([3, 5], device="cpu")
    out = flash_attn_func(q, k, v, dropout_p=dropout_p, window_size=window, softcap=2.0, rng=rng)
    return out.detach(), *torch.autograd.grad(out.sin().sum(), (q, k, v))


def packed() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (randn(9, 4, 8) for _ in "qkv")
    offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32, device="cpu")
    return (flash_attn_varlen_func(q, k, v, offsets, offsets, 5, 5, causal=True),)


def cached() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (randn(2, 3, 4, 8).float() for _ in "qkv")
    caches = [randn(4, 16, 4, 8).float() for _ in "kv"]
    angles = randn(32, 4).float()
    lengths = torch.tensor([5, 9], dtype=torch.int32, device="cpu")
    where = torch.tensor([2, 0], dtype=torch.int32, device="cpu")
    out = flash_attn_with_kvcache(
        q, *caches, k, v, angles.cos(), angles.sin(), lengths, cache_batch_idx=where, causal=True
    )
    paged = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, block_table=where[:, None], causal=True
    )
    whole = flash_attn_with_kvcache(q, *(x[:2] for x in caches), window_size=(3, 0))
    return out, paged, whole, *caches


def direct() -> tuple[Tensor, ...]:
    """The CPU's functions without an op around them."""
    torch.manual_seed(0)
    q, k, v, dout = (randn(2, 9, 4, 8) for _ in "qkvd")
    options = {"window_size_left": 3, "dropout_p": 0.3, "rng": torch.tensor([3, 5], device="cpu")}
    out, lse, *_ = cpu_calls.fwd(q, k, v, **options)
    return out, *cpu_calls.bwd(dout, q, k, v, out, lse, **options)[:3]


def fused() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    with torch.device("cpu"):
        block, x = LlamaBlock(16, 2, 2, 32), randn(2, 5, 16).float()
    angles = randn(1, 5, 8).float()
    fused = UnifiedAttentionFusion(nn.ModuleList([block]))
    assert fused.report["0"].startswith("fused")
    return (fused.model[0](x, position_embeddings=(angles.cos(), angles.sin())).detach(),)


def validated() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, device="cpu")
    found = ComponentValidator("cpu").validate_linear_component(layer, 8, 4)
    assert found["passed"], found["failures"]
    return (torch.tensor(len(found["checks"]), device="cpu"),)


def summed_up() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (randn(1, 5, 2, 8).half() for _ in "qkv")
    found = error_statistics(flash_attn_func(q, k, v), q, k, v)
    return (torch.tensor(found.worst, device="cpu"),)


@pytest.mark.parametrize(
    "made",
    [
        lambda: dense(0.0, (-1, -1)),
        lambda: dense(0.3, (4, 2)),
        packed,
        cached,
        direct,
        fused,
        validated,
        summed_up,
    ],
    ids=["dense", "dropout", "packed", "cached", "direct", "fused", "validated", "summed_up"],
)
def test_results_do_not_depend_on_the_default_device(made: Callable[[], tuple[Tensor, ...]]):
    wanted = made()
    with torch.device("meta"):
        got = made()
    for one, other in zip(wanted, got, strict=True):
        assert torch.equal(one, other)
