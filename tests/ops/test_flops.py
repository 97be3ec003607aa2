"""Floating-point operations that torch's counter finds in the ops: those of torch's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import flash_cute

BF16, INT32 = torch.bfloat16, torch.int32


def counted(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def random(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=BF16)


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_counts_as_sdpa(device, causal, with_grad):
    """Whose math backend keeps the weights, where backward here has one product more."""
    sizes = ((2, 5, 4, 32), (2, 7, 4, 32), (2, 7, 4, 32))
    q, k, v = (random(*size, device=device).requires_grad_(with_grad) for size in sizes)

    def count(attend: Any) -> int:
        return counted(lambda: attend().sum().backward() if with_grad else attend())

    def sdpa() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            parts = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*parts, is_causal=causal)

    again = 2 * 2 * 4 * 5 * 7 * 32 if with_grad else 0
    assert count(lambda: flash_cute.flash_attn_func(q, k, v, causal=causal)) == count(sdpa) + again


def test_grouped_heads_count_by_those_of_q(device):
    q, kv = random(2, 5, 4, 32, device=device), random(2, 7, 2, 2, 32, device=device)
    flops = counted(lambda: flash_cute.flash_attn_kvpacked_func(q, kv))
    assert flops == 2 * 2 * 4 * 5 * 7 * (32 + 32)


@pytest.mark.parametrize("packed", [False, True])
def test_values_of_another_dim_and_packed_gradients(device, packed):
    if packed:
        qkv = random(2, 6, 3, 4, 16, device=device).requires_grad_()
        expected = 2 * 2 * 4 * 6 * 6 * (16 + 16 + 5 * 16)
        assert (
            counted(lambda: flash_cute.flash_attn_qkvpacked_func(qkv).sum().backward()) == expected
        )
        return
    q, k = (random(2, 6, 4, 16, device=device).requires_grad_() for _ in range(2))
    v = random(2, 6, 4, 48, device=device)
    expected = 2 * 2 * 4 * 6 * 6 * (16 + 48 + 3 * 16 + 2 * 48)
    assert counted(lambda: flash_cute.flash_attn_func(q, k, v).sum().backward()) == expected


def test_sequences_of_different_lengths(device):
    q, k = random(8, 4, 32, device=device), random(11, 4, 32, device=device)
    cu_q = torch.tensor([0, 3, 8], dtype=INT32, device=device)
    cu_k = torch.tensor([0, 9, 11], dtype=INT32, device=device)
    used = torch.tensor([4, 5], dtype=INT32, device=device)
    call = flash_cute.flash_attn_varlen_func
    of_pair = 2 * 4 * (32 + 32)
    assert counted(lambda: call(q, k, k, cu_q, cu_k, 5, 9)) == of_pair * (3 * 9 + 5 * 2)
    some = counted(lambda: call(q, k, k, cu_q, cu_k, 5, 9, seqused_k=used))
    assert some == of_pair * (3 * 4 + 5 * 2)
    on_cpu = [x.cpu() for x in (q, k, k, cu_q, cu_k)]
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(x) for x in on_cpu]
        assert counted(lambda: call(*fakes, 5, 9)) == of_pair * 2 * 5 * 9


def test_lengths_count_as_they_are_clamped():
    """On the CPU, which has paged keys in packed calls, too."""
    q, k = random(6, 4, 32, device="cpu"), random(9, 4, 32, device="cpu")
    call = flash_cute.flash_attn_varlen_func
    of_pair = 2 * 4 * (32 + 32)
    cu_q, cu_k, beyond = (torch.tensor(x, dtype=INT32) for x in ([0, 6], [0, 9], [0, 90]))
    assert counted(lambda: call(q, k, k, cu_q, cu_k, 4, 5)) == of_pair * 4 * 5
    assert counted(lambda: call(q, k, k, cu_q, beyond, 6, 90)) == of_pair * 6 * 9
    pages, used = random(3, 4, 4, 32, device="cpu"), torch.tensor([7], dtype=INT32)
    paged = {"block_table": torch.tensor([[2, 0]], dtype=INT32)}
    for offsets in ([0, 0], [0, 2]):
        cu_k = torch.tensor(offsets, dtype=INT32)
        flops = counted(lambda: call(q, pages, pages, cu_q, cu_k, 6, 90, seqused_k=used, **paged))  # noqa: B023
        assert flops == of_pair * 6 * 7
    flops = counted(lambda: call(q, pages, pages, cu_q, beyond, 6, 90, **paged))
    assert flops == of_pair * 6 * 8
    used = torch.tensor([3, -4], dtype=INT32)
    q, cache = random(2, 1, 4, 32, device="cpu"), random(2, 40, 2, 32, device="cpu")
    flops = counted(lambda: flash_cute.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used))
    assert flops == of_pair * 3
    used, pads = (torch.tensor(x, dtype=INT32) for x in ([30, 20], [29, 50]))
    lengths = {"cache_seqlens": used, "cache_leftpad": pads}
    assert (
        counted(lambda: flash_cute.flash_attn_with_kvcache(q, cache, cache, **lengths)) == of_pair
    )


def test_caches(device):
    q, cache = random(2, 3, 4, 32, device=device), random(2, 40, 2, 32, device=device)
    new = random(2, 3, 2, 32, device=device)
    used = torch.tensor([10, 39], dtype=INT32, device=device)
    call = flash_cute.flash_attn_with_kvcache
    of_row = 2 * 4 * (32 + 32) * 3
    assert counted(lambda: call(q, cache, cache)) == of_row * 80
    assert counted(lambda: call(q, cache, cache, cache_seqlens=used)) == of_row * 49
    joined = counted(lambda: call(q, cache, cache.clone(), new, new, cache_seqlens=used))
    assert joined == of_row * (13 + 40)
    cu_q = torch.tensor([0, 2, 3], dtype=INT32, device=device)
    packed = {"cu_seqlens_q": cu_q, "max_seqlen_q": 2, "cache_seqlens": used}
    assert counted(lambda: call(q[0], cache, cache, **packed)) == of_row // 3 * (20 + 39)
