"""torch's own attention functions over flash_cute's kernels, for programs that call those.

:func:`activate` replaces the implementations of ATen's flash attention, as torch's providers of
FlashAttention-3 and -4 do: the flash backend of ``F.scaled_dot_product_attention``,
``torch.nn.attention.varlen.varlen_attn``, jagged nested tensors on CUDA, and functions built on
these. The import activates nothing. torch decides which calls use the flash backend: on CUDA fp16
and bf16 with head dims up to 256, without a mask or causal.

Example::

    import torch
    import torch.nn.functional as F
    from flash_cute.integrations import sdpa

    q, k, v = torch.randn(3, 2, 8, 100, 64).unbind()
    sdpa.activate()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    sdpa.restore()
    with sdpa.activated():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend

from flash_cute import _torch_internals as internals
from flash_cute.integrations import sdpa_kernels

NAME = "flash_cute"  # among torch.nn.attention.list_flash_attention_impls()
_has_registry = hasattr(attention, "restore_flash_attention_impl")  # from torch 2.11 on
_active: _Overrides | None = None


class _Overrides:
    """Replaces ATen's kernels until :meth:`remove`. torch then tries flash attention before cuDNN,
    which it prefers on some GPUs; other calls keep torch's choice."""

    def __init__(self) -> None:
        global _active
        kernels = sdpa_kernels.kernels()  # before the library replaces them
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
            for (op, key), kernel in kernels.items():
                self.library.impl(op, kernel, key, allow_override=True)
        self.orders: tuple[list[int], list[int]] | None = None  # of backends: torch's, and ours
        _active = self
        internals.when_cuda_starts(self.prefer_flash)

    def prefer_flash(self) -> None:
        if _active is self:  # CUDA may start after remove()
            internals.settle_sdp_order()
            order = internals.sdp_order()
            self.orders = order, _flash_before_cudnn(order)
            internals.set_sdp_order(self.orders[1])

    def remove(self) -> None:
        global _active
        self.library = None  # the last reference: torch takes the kernels back
        if self.orders is not None and internals.sdp_order() == self.orders[1]:
            internals.set_sdp_order(self.orders[0])
        _active = None


def _flash_before_cudnn(order: list[int]) -> list[int]:
    """The backends' order with flash attention moved before cuDNN's."""
    backends: Any = SDPBackend
    flash, cudnn = int(backends.FLASH_ATTENTION), int(backends.CUDNN_ATTENTION)
    at = min(order.index(flash), order.index(cudnn))
    rest = [x for x in order if x != flash]
    return [*rest[:at], flash, *rest[at:]]


def activate() -> None:
    """Makes flash_cute torch's flash attention, on CUDA and on the CPU, instead of FA3 or FA4 if
    one of them is active. A second call changes nothing.

    Calls that flash attention does not support, such as masked ones, use the same backends as
    before: none is switched off. If torch prefers cuDNN's attention (Hopper, Blackwell), it now
    tries flash attention first; ``sdpa_kernel`` selects backends as before.

    Graphs of torch.compile call ATen's operators, and so use what is active when they run.

    Example::

        import torch
        import torch.nn.functional as F
        from flash_cute.integrations import sdpa

        sdpa.activate()
        q, k, v = torch.randn(3, 2, 8, 100, 64, requires_grad=True).unbind()
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    """
    if is_active():
        return
    if _has_registry:
        attention.activate_flash_attention_impl(NAME)
    else:
        _Overrides()


def restore() -> None:
    """Restores torch's own kernels, if flash_cute's are active.

    Example::

        from flash_cute.integrations import sdpa

        sdpa.activate()
        sdpa.restore()
        assert not sdpa.is_active()
    """
    if _active is None:
        return
    if _has_registry and attention.current_flash_attention_impl() == NAME:
        attention.restore_flash_attention_impl()
    else:
        _active.remove()


def is_active() -> bool:
    """Whether flash_cute's kernels are active in torch.

    Example::

        from flash_cute.integrations import sdpa

        sdpa.activate()
        assert sdpa.is_active()
    """
    return _active is not None


@contextmanager
def activated() -> Iterator[None]:
    """Inside, flash_cute is active; the former state is restored afterwards.

    Example::

        import torch
        import torch.nn.functional as F
        from flash_cute.integrations import sdpa

        q, k, v = torch.randn(3, 2, 8, 100, 64).unbind()
        with sdpa.activated():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    before = is_active()
    activate()
    try:
        yield
    finally:
        if not before:
            restore()


if _has_registry:
    attention.register_flash_attention_impl(NAME, register_fn=_Overrides)
