"""torch's own attention functions over flash_cute's kernels, for programs that call those.

:func:`activate` replaces the implementations of ATen's flash attention, as torch's providers of
FlashAttention-3 and -4 do: ``F.scaled_dot_product_attention`` where it takes its flash backend,
``torch.nn.attention.varlen.varlen_attn``, jagged nested tensors on CUDA, and what is built on
these. Nothing is activated by the import. Which calls take the flash backend is torch's decision:
on CUDA fp16 and bf16 with head dims up to 256 and no mask but a causal one.

Example::

    from flash_cute.integrations import sdpa

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

import torch
from torch.nn import attention

from flash_cute.integrations import sdpa_kernels

NAME = "flash_cute"  # among torch.nn.attention.list_flash_attention_impls()
_has_registry = hasattr(attention, "restore_flash_attention_impl")  # from torch 2.11 on
_active: _Overrides | None = None


class _Overrides:
    """ATen's kernels, replaced until :meth:`remove`. cuDNN's attention, which torch may prefer to
    flash attention, is off meanwhile."""

    def __init__(self) -> None:
        global _active
        kernels = sdpa_kernels.kernels()  # finds what it replaces
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
            for (op, key), kernel in kernels.items():
                self.library.impl(op, kernel, key, allow_override=True)
        self.had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        _active = self

    def remove(self) -> None:
        global _active
        self.library = None  # the last reference: torch takes the kernels back
        torch.backends.cuda.enable_cudnn_sdp(self.had_cudnn)
        _active = None


def activate() -> None:
    """Makes flash_cute torch's flash attention, on CUDA and on the CPU, in place of FA3 or FA4 if
    one of them is active. Once more changes nothing.

    Graphs that torch.compile has made call ATen's operators, and so take what is active when they
    run.
    """
    if is_active():
        return
    if _has_registry:
        attention.activate_flash_attention_impl(NAME)
    else:
        _Overrides()


def restore() -> None:
    """Gives torch its own kernels back, if flash_cute's are active."""
    if _active is None:
        return
    if _has_registry and attention.current_flash_attention_impl() == NAME:
        attention.restore_flash_attention_impl()
    else:
        _active.remove()


def is_active() -> bool:
    """Whether calls of torch's attention come here."""
    return _active is not None


@contextmanager
def activated() -> Iterator[None]:
    """Inside, flash_cute is active; outside, what was before."""
    before = is_active()
    activate()
    try:
        yield
    finally:
        if not before:
            restore()


if _has_registry:
    attention.register_flash_attention_impl(NAME, register_fn=_Overrides)
