"""What tests of torch's attention functions ask of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def ops_of(run: Callable[[], Any]) -> set[str]:
    """The operators of flash_cute that a call runs."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return {event.key for event in profiler.key_averages() if event.key.startswith("flash_cute::")}


def gradients(out: torch.Tensor, leaves: list[torch.Tensor], seed: int = 1) -> list[torch.Tensor]:
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    return [out, *torch.autograd.grad(out, leaves, dout)]
