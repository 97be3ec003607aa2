"""DTensors that are sharded along tokens, as what each rank has of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flash_cute.distributed.context import ContextParallel

Wrap = Any  # (mesh, placements) of DTensors, None of plain tensors


def to_local(
    cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Wrap]:
    """Local tensors, and how the result is wrapped.

    Raises:
        TypeError: some are DTensors and some are not.
        ValueError: they are on another mesh, or sharded along another dimension.
    """
    module = sys.modules.get("torch.distributed.tensor")
    are_dtensors = [module is not None and isinstance(x, module.DTensor) for x in (q, k, v)]
    if not any(are_dtensors):
        return q, k, v, None
    if not all(are_dtensors):
        raise TypeError("some of q, k and v are DTensors and some are not; give three of a kind")
    assert module is not None
    tokens = q.dim() - 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        mesh: Any = x.device_mesh  # type: ignore[attr-defined]
        if cp.mesh is None or mesh != cp.mesh:
            raise ValueError(f"{name} is on {mesh}; expected the ContextParallel's {cp.mesh}")
        placements = x.placements  # type: ignore[attr-defined]
        if any(not placement.is_shard(tokens) for placement in placements):
            raise ValueError(
                f"{name} is placed {placements}; expected Shard({tokens}), along tokens"
            )
    wrap = (cp.mesh, q.placements, q.shape)  # type: ignore[attr-defined]
    return *(x.to_local() for x in (q, k, v)), wrap  # type: ignore[attr-defined]


def from_local(out: Tensor, wrap: Wrap) -> Tensor:
    """The result as the inputs were."""
    if wrap is None:
        return out
    from torch.distributed.tensor import DTensor

    mesh, placements, of_q = wrap
    like = torch.empty((*of_q[:-1], out.shape[-1]), device="meta")
    return DTensor.from_local(
        out.contiguous(), mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
