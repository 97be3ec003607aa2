"""Strategies that exchange tokens for heads first, by the ops of
:mod:`flash_cute.distributed.exchange` (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from flash_cute.distributed.all_gather import AllGather
from flash_cute.distributed.costs import Links, Sizes
from flash_cute.distributed.ring import Ring


class Ulysses(AllGather):
    """Every rank has all tokens of its share of heads: the whole keys, of one rank."""

    name = "ulysses"
    balances = False
    takes_dropout = True

    def inner(self, ranks: int, mesh: DeviceMesh | None) -> int:
        return ranks

    def expected_time(self, sizes: Sizes, ranks: int, links: Links) -> float | None:
        """Nothing is hidden under products."""
        if sizes.heads % ranks:
            return None
        copies = sizes.width_k * max(1, ranks / sizes.heads_k)
        elements = (ranks - 1) / ranks * sizes.total / ranks * (sizes.width + copies)
        exchanged = 2 * sizes.dtype.itemsize * elements / (links.gb_s * 1e9)
        return sizes.products(ranks, links) + exchanged


class TwoDimensional(Ring):
    """A ring over the first dimension of a mesh, each of whose places is ranks that share heads."""

    name = "two_dimensional"
    is_2d = True

    def inner(self, ranks: int, mesh: DeviceMesh | None) -> int:
        assert mesh is not None
        return mesh.size(1)

    def expected_time(self, sizes: Sizes, ranks: int, links: Links) -> None:
        return None
