"""Models of the tests of flash_cute.hardware, and what a step of training takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import flash_cute

CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


class Attention(nn.Module):
    """A layer with flash_cute's attention, sizes under the usual names."""

    def __init__(self, d_model: int = 64, num_heads: int = 4) -> None:
        super().__init__()
        self.d_model, self.num_heads = d_model, num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        return self.out(flash_cute.flash_attn_qkvpacked_func(qkv).flatten(2))


class Restless(nn.Module):
    """Changes its buffer, an attribute and the random state in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.steps, self.last = 0, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.last = self.norm(self.linear(x)) + torch.rand(8, device=x.device)
        return self.last


class Opaque(nn.Module):
    """What it takes does not follow from its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)


class ByValues(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else x


def mlp(width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def encoder(batch_first: bool = True) -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=batch_first)


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3))


def training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A step of training in its steady state."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(x.clone()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def weight_bytes(model: nn.Module) -> int:
    return sum(x.nbytes for x in [*model.parameters(), *model.buffers()])


def allocator_peak(run: Callable[[], object]) -> int:
    """The most bytes that torch's allocator of the CPU had given out at once during ``run``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most
