"""Which of torch's backends SDPA asks while flash_cute is active, and in which order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from flash_cute import _torch_internals as internals
from flash_cute.integrations import sdpa

FLASH, CUDNN = int(SDPBackend.FLASH_ATTENTION), int(SDPBackend.CUDNN_ATTENTION)
EFFICIENT, MATH = int(SDPBackend.EFFICIENT_ATTENTION), int(SDPBackend.MATH)
OTHER = int(SDPBackend.OVERRIDEABLE)


@pytest.fixture(autouse=True)
def restored():
    order = internals.sdp_order()
    yield
    sdpa.restore()
    internals.set_sdp_order(order)


def enabled() -> list[bool]:
    cuda = torch.backends.cuda
    return [
        cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    ]  # fmt: skip


@pytest.mark.parametrize("off", [[], [SDPBackend.CUDNN_ATTENTION], [SDPBackend.FLASH_ATTENTION]])
def test_no_backend_is_switched_off_or_on(off):
    backends = [x for x in SDPBackend.__members__.values() if int(x) >= 0 and x not in off]
    with sdpa_kernel(backends):
        before = enabled()
        with sdpa.activated():
            assert enabled() == before
        assert enabled() == before


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([CUDNN, FLASH, EFFICIENT, MATH, OTHER], [FLASH, CUDNN, EFFICIENT, MATH, OTHER]),
        ([EFFICIENT, CUDNN, MATH, OTHER, FLASH], [EFFICIENT, FLASH, CUDNN, MATH, OTHER]),
        ([FLASH, EFFICIENT, MATH, CUDNN, OTHER], [FLASH, EFFICIENT, MATH, CUDNN, OTHER]),
        ([EFFICIENT, FLASH, CUDNN, MATH, OTHER], [EFFICIENT, FLASH, CUDNN, MATH, OTHER]),
    ],
)
def test_flash_attention_is_tried_before_cudnn(order, expected):
    """And the others as before: what it does not take goes where torch would send it."""
    internals.settle_sdp_order()
    internals.set_sdp_order(order)
    sdpa.activate()
    sdpa.activate()
    assert internals.sdp_order() == expected
    sdpa.restore()
    assert internals.sdp_order() == order


def test_an_order_that_the_program_sets_meanwhile_stays():
    sdpa.activate()
    theirs = [MATH, CUDNN, FLASH, EFFICIENT, OTHER]
    internals.set_sdp_order(theirs)
    sdpa.restore()
    assert internals.sdp_order() == theirs


def test_a_gpu_that_starts_later(monkeypatch):
    """The order is set when CUDA starts, which activation does not cause; not after the end."""
    waiting = []
    monkeypatch.setattr(internals, "when_cuda_starts", waiting.append)
    order = [CUDNN, FLASH, EFFICIENT, MATH, OTHER]
    internals.settle_sdp_order()
    internals.set_sdp_order(order)
    with sdpa.activated():
        assert internals.sdp_order() == order
        waiting[0]()
        assert internals.sdp_order() == [FLASH, CUDNN, EFFICIENT, MATH, OTHER]
    assert internals.sdp_order() == order
    sdpa.activate()
    sdpa.restore()
    waiting[1]()
    assert internals.sdp_order() == order


def masks(device: str) -> dict[str, torch.Tensor]:
    seen = torch.ones(130, 130, dtype=torch.bool, device=device).tril()
    lengths = torch.tensor([130, 70], device=device)[:, None, None, None]
    bias = torch.randn(1, 4, 130, 130, device=device).half()
    return {
        "causal": seen,
        "padding": torch.arange(130, device=device) < lengths.expand(2, 1, 130, 1),
        "bias": bias,
    }


@pytest.mark.parametrize("name", ["causal", "padding", "bias"])
def test_masked_calls_on_cuda_take_the_kernel_that_they_take_without(cuda, name):
    qkv = [torch.randn(2, 4, 130, 64, device=cuda).half().requires_grad_() for _ in range(3)]
    mask = masks(cuda)[name]

    def kernels() -> set[str]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            F.scaled_dot_product_attention(*qkv, attn_mask=mask).sum().backward()
        keys = {event.key for event in profiler.key_averages()}
        return {x for x in keys if x.startswith(("aten::_scaled_dot_product", "flash_cute::"))}

    expected = kernels()
    with sdpa.activated():
        assert kernels() == expected


def test_unmasked_calls_on_cuda_come_here(cuda):
    qkv = [torch.randn(2, 4, 130, 64, device=cuda).half() for _ in range(3)]
    with sdpa.activated(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        F.scaled_dot_product_attention(*qkv, is_causal=True)
    assert "flash_cute::fwd" in {event.key for event in profiler.key_averages()}
