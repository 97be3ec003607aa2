"""The ops that make the lists of sparse calls (:mod:`flash_cute.sparse.lists`), on the CPU and for
tracing. They have no gradient: all is int32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_cute.sparse.lists import QUADRANTS, codes_of


def register(library: torch.library.Library) -> None:
    for name, fake, kernel in (
        ("tile_lists", _room, _compacted),
        ("transposed_tile_lists", _room_of_columns, _transposed),
    ):
        torch.library.register_fake(f"flash_cute::{name}", fake, lib=library)
        library.impl(name, kernel, "CPU")
        mapped = partial(_mapped, getattr(torch.ops.flash_cute, name))
        torch.library.register_vmap(f"flash_cute::{name}", mapped, lib=library)


def _mapped(op: Any, info: Any, in_dims: Sequence[int | None], x: Tensor, count: int) -> Any:
    """The rule of ``torch.vmap``: samples become part of the batch, the first dimension of all."""
    (dim, _) = in_dims
    assert dim is not None  # else nothing is mapped
    samples = x.movedim(dim, 0)
    found = op(samples.flatten(0, 1).contiguous(), count)
    sizes = samples.shape[:2]
    if isinstance(found, Tensor):
        return found.unflatten(0, sizes), 0
    return tuple(result.unflatten(0, sizes) for result in found), (0, 0)


def _room(codes: Tensor, capacity: int) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], 1 + capacity, 2))


def _room_of_columns(lists: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    shape = (*lists.shape[:2], tiles, 1 + lists.shape[2])
    return lists.new_empty((*shape, 2)), lists.new_empty(shape)


def _compacted(codes: Tensor, capacity: int) -> Tensor:
    """Lists of the entries of each row of ``codes`` that are not 0."""
    _check(codes, 4, "codes", capacity, "capacity")
    if capacity == 0 or codes.numel() == 0:
        return codes.new_zeros((*codes.shape[:-1], 1 + capacity, 2))
    places = (codes != 0).cumsum(-1, dtype=torch.int32)
    counts = places[..., -1:].clamp_max(capacity)
    entries = torch.arange(1, capacity + 1, dtype=torch.int32, device=codes.device)
    wanted = entries.expand(*codes.shape[:-1], capacity).contiguous()
    found = torch.searchsorted(places, wanted, out_int32=True)  # the n-th step of the sum
    absent = entries > counts
    found = found.masked_fill(absent, 0)
    of_found = codes.gather(-1, found.long()).masked_fill(absent, 0)
    tiles = torch.cat((counts, found), -1)
    is_whole = ((codes == 0) | (codes == QUADRANTS - 1)).all(-1, keepdim=True) & (counts > 0)
    of_all = torch.where(is_whole, QUADRANTS - 1, 0).int()
    return torch.stack((tiles, torch.cat((of_all, of_found), -1)), -1)


def _transposed(lists: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Lists whose rows are the ``tiles`` columns of ``lists``, and for each entry the number of
    those before it in the list that it comes from."""
    _check(lists, 5, "lists", tiles, "tiles")
    rows = lists.shape[2]
    codes = codes_of(lists, tiles)
    of_columns = _compacted(codes.transpose(-1, -2).contiguous(), rows)
    before = ((codes != 0).cumsum(-1, dtype=torch.int32) - 1).clamp_min_(0)
    ranks = lists.new_zeros(of_columns.shape[:-1])
    if rows > 0:
        entries = torch.arange(rows, dtype=torch.int32, device=lists.device)
        of_entries = before.transpose(-1, -2).gather(-1, of_columns[..., 1:, 0].long())
        ranks[..., 1:] = of_entries.masked_fill(entries >= of_columns[..., :1, 0], 0)
    return of_columns, ranks


def _check(x: Tensor, dims: int, name: str, count: int, name_of_count: str) -> None:
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; expected int32")
    if x.dim() != dims or not x.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; expected {dims} "
            "dimensions, contiguous"
        )
    if count < 0:
        raise ValueError(f"{name_of_count} is {count}; expected a count")
