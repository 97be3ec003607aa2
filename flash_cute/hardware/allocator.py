"""Records the CPU allocations of a step, including workspaces inside of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.autograd.profiler import profile

from flash_cute import _torch_internals as internals

Events = list[tuple[int, int]]
"""(number of an allocation, its bytes, negative when it is freed), in order of time."""


def peak(events: Events) -> int:
    """The most bytes that were allocated at once."""
    live = most = 0
    for _, size in events:
        live += size
        most = max(most, live)
    return most


def recorded(run: Callable[[], Iterable[Tensor]]) -> Events:
    """The events of a run, without those of the tensors that it returns."""
    with profile(use_cpu=True, profile_memory=True) as profiled:
        kept = list(run())
    parts = (part for x in kept for part in internals.parts_of(x.detach()))
    left_out = {part.untyped_storage().data_ptr() for part in parts}
    living: dict[int, int] = {}  # numbers by address
    events: Events = []
    for address, size in internals.memory_events(profiled):
        if size > 0:
            living[address] = len(events)
            events.append((len(events), size))
        elif address in living:  # else it was allocated before the run
            events.append((living.pop(address), size))
    ignored = {number for address, number in living.items() if address in left_out}
    return [(number, size) for number, size in events if number not in ignored]


def extrapolated(
    events: tuple[Events, Events], batches: tuple[int, int], batch: int
) -> Events | None:
    """The events of a step of another batch, by linear extrapolation of each allocation from two
    steps. None if the steps differ in their allocations, or one shrinks as the batch grows."""
    first, second = events
    if [number for number, _ in first] != [number for number, _ in second]:
        return None
    found = []
    for (number, one), (_, two) in zip(first, second, strict=True):
        per_sample = (two - one) / (batches[1] - batches[0])
        at_zero = one - per_sample * batches[0]
        sign = 1 if one > 0 else -1
        if sign * per_sample < 0 or sign * at_zero < -0.01 * abs(one):
            return None
        found.append((number, round(at_zero + per_sample * batch)))
    return found
