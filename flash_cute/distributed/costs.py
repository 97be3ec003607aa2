"""The inputs of the strategies' expected times: speeds of links, and sizes of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_cute.distributed.arguments import check_positive

BACKWARD = 2.5  # times forward's products


@dataclass(frozen=True)
class Links:
    """The speeds of one GPU from which times are estimated.

    Attributes:
        gb_s: bytes that it sends in a second, in 1e9; NCCL counts 360 for the NVLink of a Hopper.
        tflops: of attention, in 1e12 a second.
        memory_gb_s: of its memory, in 1e9.

    Raises:
        TypeError, ValueError: one is not a finite number above 0.

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
    """The sizes of a batch; ``pairs`` are the visible pairs of a query and a key, of one head."""

    total: int
    pairs: int
    heads: int
    heads_k: int
    head_dim: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Elements of a token's q and out."""
        return 2 * self.heads * self.head_dim

    @property
    def width_k(self) -> int:
        """Elements of a token's k and v."""
        return 2 * self.heads_k * self.head_dim

    def products(self, ranks: int, links: Links) -> float:
        """Seconds of a rank's matrix products, of forward and backward."""
        return (1 + BACKWARD) * 2 * self.pairs * self.width / ranks / (links.tflops * 1e12)

    def keys_to_all(self, ranks: int, links: Links) -> float:
        """Seconds of a rank to send its keys and values to all others in forward and backward, and
        to receive their gradients, in fp32."""
        elements = (ranks - 1) / ranks * self.total * self.width_k
        return (2 * self.dtype.itemsize + 4) * elements / (links.gb_s * 1e9)
