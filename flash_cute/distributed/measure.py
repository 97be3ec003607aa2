"""``measure_links``: the speeds that strategy "auto" reckons with, of the ranks at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from flash_cute.call import validate
from flash_cute.distributed import comm
from flash_cute.distributed.agreement import agree
from flash_cute.distributed.arguments import check_group
from flash_cute.distributed.costs import Links
from flash_cute.distributed.groups import device_of, group_of_hosts
from flash_cute.functional import flash_attn_func


def measure_links(group: Any = None, *, megabytes: float = 64, rounds: int = 5) -> Links:
    """Times a few messages, copies and attentions, on all ranks of a group, which all call it.

    Nothing calls it by itself. It takes some seconds; do it once, on ranks that are idle.

    Args:
        group: a torch.distributed group; None is all ranks, or this process alone if
            torch.distributed is not initialised.
        megabytes: that a rank sends to each other one in a message, in 1e6 bytes.
        rounds: of each measurement, of which the median counts, after one that does not.

    Returns:
        Links, the same on every rank: ``gb_s`` the slower of all_gather and of sending to the next
        rank, what it is by default if there is one rank; ``tflops`` of attention's forward;
        ``memory_gb_s`` of a copy. Each is the slowest rank's.

    Raises:
        TypeError: group is no torch.distributed group, megabytes no number, rounds no int.
        ValueError: megabytes or rounds are not positive, or ranks give different ones; this process
            is not in the group.

    Example::

        from flash_cute.distributed import ContextParallel, measure_links

        cp = ContextParallel(links=measure_links())
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None:
        check_group("group", group, "a ProcessGroup of this process, or None")
    hosts = None if group is None else group_of_hosts(group, None)
    agree(hosts, f"measure_links of {megabytes} MB, {rounds} rounds", _problem(megabytes, rounds))
    ranks = 1 if group is None else dist.get_world_size(group)
    device = device_of(group)
    if group is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())

    def seconds(call: Callable[[], Any]) -> float:
        """The slowest rank's median."""
        times = []
        for _ in range(rounds + 1):
            _idle(device, group)
            start = time.perf_counter()
            call()
            _idle(device, None)
            times.append(time.perf_counter() - start)
        slowest = torch.tensor([median(times[1:])], dtype=torch.float64, device=device)
        if group is not None:
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        return slowest.item()

    sent = torch.zeros(max(1, int(megabytes * 1e6)), dtype=torch.uint8, device=device)
    links = Links()
    gb_s = links.gb_s
    if ranks > 1:
        gathered = (ranks - 1) * len(sent) / seconds(lambda: comm.all_gather(sent, group)[1].wait())
        rotated = len(sent) / seconds(lambda: comm.rotate(sent, 1, group)[1].wait())
        gb_s = min(gathered, rotated) / 1e9
    to = torch.empty_like(sent)
    memory = 2 * len(sent) / seconds(lambda: to.copy_(sent)) / 1e9
    on_gpu = device.type == "cuda"
    seqlen, dtype = (8192, torch.bfloat16) if on_gpu else (256, torch.float32)
    q = torch.randn(1, seqlen, 16, 128, device=device, dtype=dtype)
    attention = seconds(lambda: flash_attn_func(q, q, q))
    return Links(gb_s, 4 * seqlen**2 * 16 * 128 / attention / 1e12, memory)


def _problem(megabytes: Any, rounds: Any) -> Exception | None:
    """The error of these numbers, which all ranks raise; None if they are valid."""
    for name, x, kinds in (("megabytes", megabytes, (int, float)), ("rounds", rounds, (int,))):
        if isinstance(x, bool) or not isinstance(x, kinds):
            return TypeError(f"{name} is {validate.kind_of(x)}; expected a number")
    if not 0 < megabytes < math.inf or rounds < 1:
        return ValueError(
            f"megabytes is {megabytes} and rounds {rounds}; expected more than 0, and at least 1"
        )
    return None


def _idle(device: torch.device, group: Any) -> None:
    """Waits for this rank's GPU, and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if group is not None:
        dist.barrier(group)
