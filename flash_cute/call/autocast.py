"""Calls that autocast leaves alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast on the device, which may be one that has none."""
    if device.type not in ("cpu", "cuda"):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
