"""The checks that direct calls of the ops add to those of the functions: results of forward, and
tensors for results. Errors as in :mod:`flash_cute.call.validate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call import validate
from flash_cute.call.sizes import batch_of, longest_keys, longest_queries
from flash_cute.call.validate import options as validate_options
from flash_cute.call.validate.rng import check_rng

if TYPE_CHECKING:
    from flash_cute.ops.typed import VarlenFwdCall


def arguments(call: Any) -> None:
    """Checks a direct call of ``fwd``, ``bwd``, or their varlen forms, on the CPU."""
    q, k, v = call.q, call.k, call.v
    if hasattr(call, "cu_seqlens_q"):
        validate.varlen(
            q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k,
            call.seqused_q, call.seqused_k, getattr(call, "block_table", None),
        )  # fmt: skip
    else:
        validate.dense(q, k, v)
    batch = batch_of(call)
    validate_options.check(call, batch, validate_options.OF_OPS)
    if call.rng is not None:
        check_rng(call.rng, q)
    elif call.dropout_p > 0:
        raise ValueError(
            "rng is None; dropout needs an int64 tensor (seed, offset), e.g. flash_cute.rng_state()"
        )
    is_backward = hasattr(call, "softmax_lse")
    lists(call, batch, of_keys=is_backward)
    if is_backward:
        forward_results(q, call.v, call.out, call.softmax_lse, call.dout, call.dlse)


def lists(call: Any, batch: int, of_keys: bool) -> None:
    """Checks the lists of a sparse call, a list for each tile of 128 queries, or of 128 keys."""
    x, bits, q = call.tile_lists, call.tile_bits, call.q
    if x is None:
        for name in ("tile_bits", "tile_ranks"):
            if getattr(call, name, None) is not None:
                raise ValueError(f"{name} is given, and tile_lists is None; it needs tile_lists")
        return
    if getattr(call, "block_table", None) is not None or getattr(call, "return_softmax", False):
        raise NotImplementedError(
            "tile_lists (sparse) with block_table, or with return_softmax, is not supported"
        )
    tiles = -(-(longest_keys(call) if of_keys else longest_queries(call)) // 128)
    heads, heads_k = q.shape[-2], call.k.shape[-2]
    each = (1, heads_k, heads)
    _indices("tile_lists", x, q)
    # Of symbols of a graph `in` says False.
    fits = x.dim() == 5 and any(x.shape[0] == y for y in (1, batch)) and x.shape[1] in each
    if not fits or x.shape[2] != tiles or x.shape[3] < 1 or x.shape[4] != 2:
        raise ValueError(
            f"tile_lists has shape {tuple(x.shape)}; expected ({batch} or 1, "
            f"{' or '.join(map(str, each))}, {tiles}, 1 + entries, 2)"
        )
    ranks = getattr(call, "tile_ranks", None)
    if ranks is not None:
        _indices("tile_ranks", ranks, q)
        if ranks.shape != x.shape[:-1]:
            raise ValueError(
                f"tile_ranks has shape {tuple(ranks.shape)}; expected {tuple(x.shape[:-1])}, that "
                "of tile_lists without its last dimension"
            )
    if bits is not None:
        _indices("tile_bits", bits, q)
        if bits.dim() == 3 and bits.shape[0] > 2**22:
            raise ValueError(
                f"tile_bits has {bits.shape[0]} masks; at most {2**22} are supported, 8 GB"
            )
        if bits.dim() != 3 or bits.shape[1:] != (128, 4):
            raise ValueError(f"tile_bits has shape {tuple(bits.shape)}; expected (masks, 128, 4)")


def _indices(name: str, x: Tensor, q: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        raise TypeError(f"{name} is {validate.dtype_or_kind(x)}; expected int32")
    validate.strided(name, x)
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q on {q.device}; they must agree")
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}; it must be contiguous")


def forward_results(
    q: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> None:
    """Checks forward's results and their gradients, which are inputs of backward."""
    *lead, rows, heads, _ = q.shape
    shape = (*lead, rows, heads, v.shape[-1])
    _like("dout", dout, shape, q.dtype, q.device)
    _like("out", out, shape, q.dtype, q.device)
    _like("softmax_lse", softmax_lse, (*lead, heads, rows), statistic_dtype(q), q.device)
    if dlse is not None:
        _like("dlse", dlse, (*lead, heads, rows), statistic_dtype(q), q.device)


def statistic_dtype(q: Tensor) -> torch.dtype:
    """The dtype of softmax_lse and of other row statistics: fp32, fp64 for fp64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def outputs(
    call: Any,
    given: Mapping[str, Tensor | None],
    names: Sequence[str],
    compute: Callable[[Any], Sequence[Tensor | None]],
) -> dict[str, Tensor | None]:
    """The results by ``names`` of a call of an out overload, checked against the tensors ``given``.
    ``compute`` gets the call with optional results switched on, and with inputs in fp32 if the
    gradients are to be fp32."""
    there = {name: x for name, x in given.items() if x is not None}
    for name in ("row_max", "softmax"):
        if getattr(call, f"return_{name}", False) and name not in there:
            raise ValueError(f"return_{name}: the out overload needs {name}, a buffer for it")
    optional = {f"return_{name}": True for name in ("row_max", "softmax") if name in there}
    exact = call
    if fp32_gradients(call.q, given):
        arguments(call)
        read = ("dout", "q", "k", "v", "out")
        exact = call._replace(**{name: getattr(call, name).float() for name in read})
    results = dict(zip(names, compute(exact._replace(**optional)), strict=True))
    for name in there.keys() | {"dsink"} & results.keys():  # dsink goes with sink
        output(name, there.get(name), results[name])
    check_no_aliasing(there, call._asdict())
    return results


def fp32_gradients(q: Tensor, given: Mapping[str, Tensor | None]) -> bool:
    """Whether the buffers ``given`` for gradients of 16-bit inputs are fp32.

    Raises:
        TypeError: some of dq, dk and dv are fp32, and the others are not, or are missing.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        return False
    dtypes = {
        name: None if (x := given.get(name)) is None else x.dtype for name in ("dq", "dk", "dv")
    }
    if torch.float32 not in dtypes.values():
        return False
    if any(dtype != torch.float32 for dtype in dtypes.values()):
        of_each = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(
            f"dtypes of gradients are {of_each}; expected all three torch.float32, or those that "
            f"are given {q.dtype}, as q"
        )
    return True


def output(name: str, given: Tensor | None, result: Tensor | None) -> None:
    """Checks a tensor given to an out overload against the op's result, which may be None."""
    if given is None and result is None:
        return
    if result is None:
        raise ValueError(f"{name} is given, but this call has no such result")
    if given is None:
        raise ValueError(f"{name} is None; this call needs {result.dtype} {tuple(result.shape)}")
    buffer(name, given, tuple(result.shape), result.dtype, result.device)


def buffer(
    name: str, given: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Checks a tensor given to an out overload against this shape, dtype and device."""
    _like(name, given, shape, dtype, device)
    check_not_expanded(name, given)


def check_not_expanded(name: str, x: Tensor) -> None:
    """Refuses to write into a tensor whose strides overlap, such as an expanded one, or into a view
    with the negative bit, through which torch cannot write if an op takes several tensors."""
    if not torch.compiler.is_compiling() and x.is_neg():
        raise ValueError(f"{name} is a view with the negative bit; call {name}.resolve_neg()")
    if x.numel() > 0 and any(
        n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True)
    ):
        raise ValueError(f"{name} has elements that share memory, by its strides {x.stride()}")


def check_no_aliasing(outputs: Mapping[str, Tensor | None], given: Mapping[str, Any]) -> None:
    """Refuses a tensor given to an out overload that starts at the address of another tensor."""
    if all(x is None for x in outputs.values()):
        return
    read = ("q", "k", "v", "dout", "out", "softmax_lse", "dlse")
    inputs = {name: given.get(name) for name in read if name not in outputs}
    names = {place: name for name, x in inputs.items() if (place := address(x)) is not None}
    for name, x in outputs.items():
        place = address(x)
        other = name if place is None else names.setdefault(place, name)
        if other != name:
            raise ValueError(f"{name} shares memory with {other}; give each its own")


def address(x: Tensor | None) -> int | None:
    """The address of ``x``; None if it has no elements, or no memory of its own: fake, meta and
    vmapped tensors, and wrappers of other tensors."""
    if x is None or x.numel() == 0 or (type(x) is not Tensor and internals.is_fake(x)):
        return None
    try:
        place = x.data_ptr()
        return None if place == x.storage_offset() * x.element_size() else place
    except RuntimeError:
        return None


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one dtype share memory; False if the address of one is unknown.

    Exact if strides agree; else tensors that interleave without sharing elements count as well.
    """
    first, second, size = address(x), address(y), x.element_size()
    if first is None or second is None:
        return False
    distance = second - first
    ends = (
        sum((n - 1) * step for n, step in zip(z.shape, z.stride(), strict=True)) for z in (x, y)
    )
    last_x, last_y = (end * size for end in ends)
    if distance > last_x or -distance > last_y:
        return False
    steps = []  # stride, and the least and most that an index of x may be ahead of y's
    for n, m, of_x, of_y in zip(x.shape, y.shape, x.stride(), y.stride(), strict=True):
        if n > 1 and m > 1 and of_x != of_y:
            return True
        if n > 1 or m > 1:
            steps.append((of_x if n > 1 else of_y, 1 - m, n - 1))
    return distance % size != 0 or _is_reached(distance // size, sorted(steps, reverse=True))


def _is_reached(distance: int, steps: list[tuple[int, int, int]]) -> bool:
    """Whether ``distance`` is a sum of multiples of the strides, each within its bounds."""
    if not steps:
        return distance == 0
    (stride, least, most), *others = steps
    below = sum(step * low for step, low, _ in others)
    above = sum(step * high for step, _, high in others)
    first = max(least, -((above - distance) // stride))
    last = min(most, (distance - below) // stride)
    return any(_is_reached(distance - i * stride, others) for i in range(first, last + 1))


def no_gradient_of_pages(call: VarlenFwdCall) -> None:
    """Refuses tensors that require grad in a call with a block_table, and names them."""
    inputs = {"q": call.q, "k": call.k, "v": call.v, "sink": call.sink}
    names = [name for name, x in inputs.items() if _wants_gradient(x)]
    raise NotImplementedError(
        f"block_table is given and {' and '.join(names) or 'an argument'} require"
        f"{'' if len(names) > 1 else 's'} grad; attention over pages has no backward: detach() "
        "them, or call under torch.no_grad()"
    )


def _wants_gradient(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _like(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    validate.tensor(name, x)
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype}; expected {dtype}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {shape}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, the result on {device}")
