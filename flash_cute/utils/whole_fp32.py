"""Full precision of fp32 products, whatever the process's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
_CHOICES: tuple[Any, ...] = (  # fp32_precision is "ieee", "tf32", "bf16", or "none" (inherited)
    torch.backends.cuda.matmul, _cudnn.conv, _cudnn.rnn, _mkldnn.matmul, _mkldnn.conv, _mkldnn.rnn,
)  # fmt: skip


@contextmanager
def whole_fp32(device: torch.device) -> Iterator[None]:
    """Inside, fp32 products do not use TF32 or bf16, and autocast is off. Afterwards
    ``torch.set_float32_matmul_precision`` and ``fp32_precision`` are restored."""
    before = [choice.fp32_precision for choice in _CHOICES]
    with ExitStack() as stack:
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        try:
            for choice in _CHOICES:
                choice.fp32_precision = "ieee"
            yield
        finally:
            for choice, precision in zip(_CHOICES, before, strict=True):
                choice.fp32_precision = "none"  # it was inherited from a more general setting
                if choice.fp32_precision != precision:
                    choice.fp32_precision = precision
