"""Which strategy a plan takes: the least expected time of forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_cute.distributed.arguments import check_positive

GATHERED_BYTES = 16 * 2**30  # all_gather's keys and values of one layer may take so much memory
MERGE_BYTES = 24  # of memory that one merged element of the output moves
BACKWARD = 2.5  # times forward's products


@dataclass(frozen=True)
class Links:
    """Speeds that times are expected from, of one GPU.

    Attributes:
        gb_s: bytes that it sends in a second, in 1e9; NCCL counts 360 for the NVLink of a Hopper.
        tflops: of attention, in 1e12 a second.
        memory_gb_s: of its memory, in 1e9.

    Raises:
        TypeError, ValueError: one is no finite number above 0.

    Example::

        from flash_cute.distributed import ContextParallel, Links

        cp = ContextParallel(links=Links(gb_s=25.0))  # GPUs of several hosts, for example
    """

    gb_s: float = 360.0
    tflops: float = 600.0
    memory_gb_s: float = 3000.0

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            check_positive(name, x)


@dataclass(frozen=True)
class Sizes:
    """Of a batch and its attention; ``pairs`` of a query and a key that it sees, of one head."""

    total: int
    pairs: int
    heads: int
    heads_k: int
    head_dim: int
    dtype: torch.dtype


def expected_times(sizes: Sizes, ranks: int, links: Links) -> dict[str, float]:
    """Seconds of forward and backward of one layer, by strategy; of those that can do it.

    What is hidden under products: the ring's travels, all but the first of all_gather's groups
    of heads, nothing of ulysses.
    """
    element = sizes.dtype.itemsize
    width_k, width = (2 * n * sizes.head_dim for n in (sizes.heads_k, sizes.heads))
    flops = 2 * sizes.pairs * width / ranks
    products = (1 + BACKWARD) * flops / (links.tflops * 1e12)
    share = (ranks - 1) / ranks
    kv = share * sizes.total * width_k  # elements that a rank sends to give its keys to all
    travels = (2 * element + 4) * kv / (links.gb_s * 1e9)  # forward, backward, gradients in fp32
    merged = share * sizes.total * width / 2 * MERGE_BYTES / (links.memory_gb_s * 1e9)
    times = {"ring": max(products, travels) + merged}
    if sizes.total * width_k * element <= GATHERED_BYTES:
        times["all_gather"] = max(products, travels / 2) + travels / 2
    if sizes.heads % ranks == 0:
        copies = width_k * max(1, ranks / sizes.heads_k)
        exchanged = share * sizes.total / ranks * (width + copies)
        times["ulysses"] = products + 2 * element * exchanged / (links.gb_s * 1e9)
    return times


def strategy(sizes: Sizes, ranks: int, links: Links) -> str:
    """The fastest; all_gather where others are no faster than by one part in a hundred."""
    times = expected_times(sizes, ranks, links)
    best = min(times, key=lambda name: times[name])
    gathered = times.get("all_gather")
    return "all_gather" if gathered is not None and gathered <= 1.01 * times[best] else best
