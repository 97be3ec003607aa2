"""How the ops take DTensors: sharded in the batch or in the heads, each device for itself.

Along a dimension of the mesh all tensors are replicated, or sharded

- in the batch, if calls are dense;
- in the heads, if each device's query heads read kv heads of its own; or in the query heads alone,
  if there is one kv head.

Others are brought to the cheapest of these by DTensor. Sharding along the sequence, for which
devices would have to exchange keys, raises NotImplementedError, and so does dropout, whose weights
depend on the place in the whole batch and in all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from math import prod
from typing import Any

import torch

from flash_cute import _torch_internals as internals
from flash_cute.ops.schema import CALLS, bwd, fwd, varlen_bwd, varlen_fwd
from flash_cute.ops.when_imported import when_imported

# Where tensors have the batch and the heads, dense and varlen.
_ROWS = {"q", "k", "v", "dout", "out", "dq", "dk", "dv"}
_OF_KEYS = {"k", "v", "dk", "dv"}
_STATISTICS = {"softmax_lse", "dlse", "row_max", "softmax_d"}
_OF_SEQUENCES = {
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table", "rng",
}  # fmt: skip
# Arguments whose places are known; a call with others is refused.
_KNOWN = _ROWS | _STATISTICS | _OF_SEQUENCES | {"alibi_slopes", "sink"}
_FLAG_OF_RESULT = {"row_max": "return_row_max", "softmax": "return_softmax"}


def register(_: torch.library.Library) -> None:
    """With DTensor, which is not loaded for it."""
    when_imported("torch.distributed.tensor", _register)


def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for op in (fwd, varlen_fwd, bwd, varlen_bwd):
        register_sharding(op)(partial(_shardings, op))


def _shardings(op: Any, *args: Any, **named: Any) -> list[tuple[list[Any], list[Any]]]:
    """(placements of results, placements of the tensors among the arguments), all that are right
    along one dimension of the mesh."""
    call = CALLS[op](*args, **named)
    given = dict(zip(call._fields, args, strict=False)) | named  # in the order that torch expects
    tensors = {name: x for name, x in given.items() if hasattr(x, "placements")}
    _refuse(op, call, tensors)
    from torch.distributed.tensor import Partial, Replicate, Shard

    places: list[Callable[[str], Any]] = [lambda name: Replicate()]
    is_dense = op in (fwd, bwd)
    heads, heads_k = call.q.shape[-2], call.k.shape[-2]
    if is_dense:

        def in_batch(name: str) -> Any:
            if name == "dsink":
                return Partial()
            if name == "sink" or (name == "alibi_slopes" and len(getattr(call, name).shape) == 1):
                return Replicate()
            return Shard(0)

        places.append(in_batch)
    mesh = call.q.mesh
    if heads_k == 1 or _divides(mesh, heads, heads_k):

        def in_heads(name: str) -> Any:
            if name in _OF_KEYS and heads_k == 1:
                return Partial() if name.startswith("d") else Replicate()
            if name in _ROWS:
                return Shard(2 if is_dense else 1)
            if name in _STATISTICS:
                return Shard(1 if is_dense else 0)
            if name == "softmax":
                return Shard(1)
            if name == "alibi_slopes":
                return Shard(len(getattr(call, name).shape) - 1)
            return Shard(0) if name in ("sink", "dsink") else Replicate()

        if heads_k != 1 or _divides(mesh, heads, heads):
            places.append(in_heads)
    results = internals.results(op)
    return [
        (
            [place(name) if _is_there(call, name) else None for name in results],
            [place(name) for name in tensors],
        )
        for place in places
    ]


def _is_there(call: Any, result: str) -> bool:
    """Whether a call has this optional result, or the gradient of an optional argument."""
    if result in _FLAG_OF_RESULT:
        return bool(getattr(call, _FLAG_OF_RESULT[result]))
    return getattr(call, result.removeprefix("d"), call.q) is not None


def _divides(mesh: Any, heads: int, heads_k: int) -> bool:
    """Whether devices get whole groups of heads, however many dimensions of the mesh share them."""
    sizes = [mesh.size(i) for i in range(mesh.ndim)]
    shares = {prod(x) for n in range(1, len(sizes) + 1) for x in combinations(sizes, n)}
    return all(heads_k % n == 0 for n in shares if n <= heads_k) and heads_k >= min(sizes)


def _refuse(op: Any, call: Any, tensors: dict[str, Any]) -> None:
    is_dense = op in (fwd, bwd)
    for name in ("q", "k", "v"):
        dims = {x.dim for x in tensors[name].placements if x.is_shard()}
        if (1 if is_dense else 0) in dims:
            raise NotImplementedError(
                f"{name} is sharded along the sequence ({tensors[name].placements}), and devices "
                "would have to exchange keys; redistribute it to Replicate(), or shard the batch "
                "or the heads"
            )
    if call.tile_lists is not None:
        raise NotImplementedError(
            "sparse is given, and q, k and v are DTensors; use "
            "torch.distributed.tensor.experimental.local_map, with a Sparse of each device's heads"
        )
    for name in sorted(tensors.keys() - _KNOWN):
        raise NotImplementedError(
            f"{name} is given, and q, k and v are DTensors; use "
            "torch.distributed.tensor.experimental.local_map"
        )
    if call.dropout_p and any(x.is_shard() for x in tensors["q"].placements):
        raise NotImplementedError(
            "dropout_p is not 0, and q is sharded: what is dropped depends on the place in the "
            "whole; use torch.distributed.tensor.experimental.local_map, with an rng of each device"
        )
