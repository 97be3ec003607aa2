"""Jagged nested tensors through torch's SDPA while flash_cute is active."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sdpa_calls import gradients, ops_of

import flash_cute
from flash_cute.integrations import sdpa


@pytest.fixture(autouse=True)
def restored():
    yield
    sdpa.restore()


def jagged_leaves(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows of sequences of 5, 1 and 7 tokens, for q, k and v."""
    return [torch.randn(13, 4, 16, dtype=dtype, device=device).requires_grad_() for _ in range(3)]


def jagged_attention(leaves: list[torch.Tensor], is_causal: bool) -> torch.Tensor:
    offsets = torch.tensor([0, 5, 6, 13], device=leaves[0].device)
    qkv = (
        torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=1, max_seqlen=7)
        for x in leaves
    )
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=is_causal)
    return out.transpose(1, 2).values()


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_tensors_on_cuda(cuda, is_causal):
    leaves = jagged_leaves(cuda, torch.bfloat16)
    sdpa.activate()
    assert ops_of(lambda: jagged_attention(leaves, is_causal)) >= {"flash_cute::varlen_fwd"}
    cu = torch.tensor([0, 5, 6, 13], dtype=torch.int32, device=cuda)
    expected = flash_cute.flash_attn_varlen_func(*leaves, cu, cu, 7, 7, causal=is_causal)
    got = jagged_attention(leaves, is_causal)
    for x, y in zip(gradients(got, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(x, y)


def test_jagged_tensors_on_the_cpu_are_left_to_torch():
    """It never takes flash attention there: without a mask it has a plain formula, else none."""
    leaves = jagged_leaves("cpu", torch.float64)
    expected = gradients(jagged_attention(leaves, False), leaves)
    sdpa.activate()
    assert ops_of(lambda: jagged_attention(leaves, False)) == set()
    for x, y in zip(gradients(jagged_attention(leaves, False), leaves), expected, strict=True):
        torch.testing.assert_close(x, y)
    for is_active in (True, False):
        assert sdpa.is_active() == is_active
        with pytest.raises(RuntimeError, match=r"No viable backend|CUDA"):  # it asks
            jagged_attention(leaves, True)
        sdpa.restore()


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_operator_that_jagged_tensors_call(device, is_causal):
    """With their arguments: packed rows, offsets, longest lengths; values and gradients."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    leaves = jagged_leaves(device, dtype)
    cu = torch.tensor([0, 5, 6, 13], dtype=torch.int32, device=device)
    expected = flash_cute.flash_attn_varlen_func(*leaves, cu, cu, 7, 7, causal=is_causal)
    sdpa.activate()
    out, *_ = torch.ops.aten._flash_attention_forward(
        *leaves, cu, cu, 7, 7, 0.0, is_causal, False, scale=None
    )
    for x, y in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(x, y)
