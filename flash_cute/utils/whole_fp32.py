"""Products whose operands keep their dtype's whole mantissa, whatever the process has chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
_CHOICES: tuple[Any, ...] = (  # of fp32_precision: "ieee", "tf32", "bf16", or "none" of its own
    torch.backends.cuda.matmul, _cudnn.conv, _cudnn.rnn, _mkldnn.matmul, _mkldnn.conv, _mkldnn.rnn,
)  # fmt: skip


@contextmanager
def whole_fp32(device: torch.device) -> Iterator[None]:
    """Inside, fp32 is neither TF32 nor bf16 in products, and autocast is off: what
    ``torch.set_float32_matmul_precision`` and ``fp32_precision`` say holds again afterwards."""
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
                choice.fp32_precision = "none"  # what a more general choice says is not its own
                if choice.fp32_precision != precision:
                    choice.fp32_precision = precision
