"""What the arguments of :class:`ContextParallel` and of plans may be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_cute.call import validate
from flash_cute.call.validate import options as validate_options


def whole_list(name: str, x: Any) -> list[Any]:
    """x as a list. Raises TypeError unless x is iterable and no str."""
    if isinstance(x, str) or not isinstance(x, Iterable):
        raise TypeError(f"{name} is {validate.kind_of(x)}; expected a sequence of ints")
    return list(x)


def check_positive(name: str, x: Any) -> None:
    """Refuses all but finite numbers above 0."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} is {validate.kind_of(x)}; expected a number")
    if not (math.isfinite(x) and x > 0):
        raise ValueError(f"{name} is {x}; expected a finite number above 0")


def check_timeout(timeout: Any) -> None:
    """Raises unless timeout is None (the default), or above 0."""
    if timeout is None:
        return
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is {validate.kind_of(timeout)}; expected a timedelta, or None")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout is {timeout}; expected more than 0")


def check_one_of(name: str, given: Any, supported: tuple[str, ...]) -> None:
    """Refuses names that are not supported."""
    if given not in supported:
        raise ValueError(f"{name} is {given!r}; supported: {', '.join(supported)}")


def check_ranks(ranks: Any) -> None:
    """Raises unless ranks is None, or a group or mesh that includes this process."""
    if ranks is None:
        return
    if isinstance(ranks, DeviceMesh):
        if ranks.ndim > 2:
            raise ValueError(
                f"the mesh has {ranks.ndim} dimensions {ranks.mesh_dim_names}; expected those that "
                "share tokens, one or two: mesh['cp']"
            )
        is_member = ranks.get_coordinate() is not None
    else:
        check_group("ranks", ranks, "a DeviceMesh, a ProcessGroup of this process, or None")
        is_member = True
    if not is_member:
        raise ValueError(f"ranks is {ranks}; this process is none of them")


def check_group(name: str, group: Any, expected: str) -> None:
    """Refuses all but groups that include this process. To other processes new_group returns a
    number."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{name} is {validate.kind_of(group)}; expected {expected}")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name} is {group}; this process is none of its ranks")


def check_heads(heads: Any, heads_k: Any) -> None:
    """Refuses numbers of heads that no call can have; None means that a number is not known."""
    for name, x in (("heads", heads), ("heads_k", heads_k)):
        if x is not None:
            validate.count(name, x, 1)
    if heads_k is None:
        return
    if heads is None:
        raise ValueError(f"heads_k is {heads_k} without heads; give both, or neither")
    if heads % heads_k:
        raise ValueError(
            f"heads is {heads} and heads_k {heads_k}; heads must be a multiple of heads_k"
        )


def check_dtype(dtype: Any) -> None:
    """Refuses all but dtypes."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {validate.kind_of(dtype)}; expected a torch.dtype")


def check_window(window_size: Any) -> None:
    """Refuses windows that :func:`flash_cute.flash_attn_func` refuses."""
    validate_options.window(*validate_options.sides(window_size))


def lengths(seqlen: Any, cu_seqlens: Sequence[int] | Tensor | None) -> tuple[int, ...]:
    """Tokens of each document, from seqlen or cu_seqlens, exactly one of which must be given."""
    if (seqlen is None) == (cu_seqlens is None):
        raise ValueError(
            "give seqlen for a dense batch or cu_seqlens for packed documents, not both"
        )
    if seqlen is not None:
        validate.length("seqlen", seqlen)
        found: tuple[int, ...] = (int(seqlen),)
    else:
        given: Any = cu_seqlens
        if isinstance(given, Tensor):
            if given.is_meta:
                raise ValueError("cu_seqlens is on meta, which holds no values; give them")
            given = given.flatten().tolist()
        given = whole_list("cu_seqlens", given)
        for offset in given:
            if isinstance(offset, bool) or not isinstance(offset, int):
                kind = validate.kind_of(offset)
                raise TypeError(f"cu_seqlens has entries of {kind}; expected ints")
        if len(given) < 2 or given[0] != 0 or sorted(given) != given:
            raise ValueError(
                f"cu_seqlens is {given[:8]}; expected ascending offsets from 0 to the number of "
                "all tokens"
            )
        found = tuple(b - a for a, b in itertools.pairwise(given))
    if sum(found) == 0:
        raise ValueError("the batch has no tokens")
    return found
