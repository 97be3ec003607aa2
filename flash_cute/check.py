"""Checks the values of index tensors, and warns of shapes that are likely mistakes.

Kernels clamp bad offsets and lengths silently, as reading them would synchronise the host. If
``FLASH_CUTE_CHECK=1`` is in the environment when flash_cute is imported, or inside of
:func:`switched`, every public function reads them: ``ValueError`` names the argument, the position
and the values of the first that is wrong. That waits for the GPU, so calls that are compiled,
traced, transformed or captured into a CUDA graph are not checked.
:func:`flash_cute.flash_attn_with_kvcache` checks one call with ``check_indices=True``.

Offsets must begin with 0, ascend, and cover every row. Padding behind the last sequence is allowed
with ``zero_tensors=True``; calls over a cache, which have no such argument, warn of it.
``max_seqlen`` may be larger than the longest sequence, not smaller.

On the CPU, where reading is free, varlen calls always warn, once a process for each kind: of
offsets that do not begin with 0, do not ascend or look like lengths, and of a ``max_seqlen`` that
cuts sequences.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from flash_cute import ops
from flash_cute.call import validate
from flash_cute.call.sizes import cache_capacity
from flash_cute.call.validate import OF_BOTH, OF_K, OF_Q
from flash_cute.ops.typed import FwdKvcacheCall

_environment = os.environ.get("FLASH_CUTE_CHECK", "")
if _environment not in ("", "0", "1"):
    raise ImportError(f"FLASH_CUTE_CHECK is {_environment!r}; expected 0 or 1")
_on = _environment == "1"
_MOST_KV_HEADS = 128  # of known models
_OF_LENGTHS = (
    "Of lengths they are torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))"
)
_warned: set[str] = set()  # texts of warnings, without their numbers


def is_on() -> bool:
    """Whether calls are checked."""
    return _on


@contextmanager
def switched(on: bool = True) -> Iterator[None]:
    """Inside, calls are checked, or not: overrides ``FLASH_CUTE_CHECK`` for all threads.

    Example::

        import flash_cute
        import torch

        q, k, v = torch.randn(3, 100, 8, 64).unbind()
        cu_seqlens = torch.tensor([0, 60, 100], dtype=torch.int32)
        with flash_cute.check.switched():
            out = flash_cute.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 60, 60)
    """
    global _on
    validate.flag("on", on)
    before, _on = _on, bool(on)
    try:
        yield
    finally:
        _on = before


def wanted(q: Tensor) -> bool:
    """Whether to check the call of ``q``: checks are on, and values can be read."""
    return _on and is_readable(q)


def is_readable(q: Tensor) -> bool:
    """Whether values can be read now: nothing is compiled, captured or transformed."""
    return (
        not torch.compiler.is_compiling()
        and has_values(q)
        and not (q.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def has_values(q: Tensor) -> bool:
    """Whether values of a call of ``q`` can be read: it is not fake, and not transformed."""
    plain = type(q) in (Tensor, torch.nn.Parameter)  # not fake, not a wrapper of another tensor
    return plain and q.device.type != "meta" and not ops.transformed()


def dense(q: Tensor, k: Tensor) -> None:
    """Warns of q and k that are likely (batch, heads, seqlen, dim); called by public functions.

    Such tensors have more heads than tokens. Short sequences do, too, so it warns only if there are
    more kv heads than models have, or if seqlen looks like grouped heads: fewer keys than queries,
    their number a divisor, and as many kv heads as query heads.
    """
    if not wanted(q):
        return
    (seqlen_q, heads), (seqlen_k, heads_k) = q.shape[1:3], k.shape[1:3]
    if not (0 < seqlen_q < heads and 0 < seqlen_k < heads_k):
        return
    grouped = heads == heads_k and seqlen_k < seqlen_q and seqlen_q % seqlen_k == 0
    if heads_k > _MOST_KV_HEADS or grouped:
        warnings.warn(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}: more heads than tokens. Are seqlen "
            "and heads exchanged? The layout is (batch, seqlen, heads, dim): transpose(1, 2) makes "
            "it of (batch, heads, seqlen, dim)",
            stacklevel=3,
        )


def varlen(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    zero_tensors: bool,
    packed: bool = False,
) -> None:
    """Checks the index tensors of a varlen call; ``packed``: q and k share them. On the CPU, where
    reading is free, it warns of offsets even if checks are off."""
    validate.flag("zero_tensors", zero_tensors)
    names = OF_BOTH if packed else OF_Q
    if not wanted(q):
        if q.is_cpu and is_readable(q):
            _warn_once(names, len(q), cu_seqlens_q, max_seqlen_q, seqused_q, zero_tensors)
            if not packed and block_table is None:
                _warn_once(OF_K, len(k), cu_seqlens_k, max_seqlen_k, seqused_k, zero_tensors)
        return
    _sequences(names, len(q), cu_seqlens_q, max_seqlen_q, seqused_q, zero_tensors)
    if packed:
        return
    if block_table is None:
        _sequences(OF_K, len(k), cu_seqlens_k, max_seqlen_k, seqused_k, zero_tensors)
        return
    capacity = cache_capacity(k, block_table)
    if seqused_k is None:
        name, rows = OF_K[0], capacity * len(block_table)
        lengths = offsets(name, cu_seqlens_k.tolist(), rows, max_seqlen_k, OF_K[1])
    else:
        lengths, name = seqused_k.tolist(), OF_K[2]
    for b, length in enumerate(lengths):
        if not 0 <= length <= min(capacity, max_seqlen_k):
            raise ValueError(
                f"{name} gives sequence {b} a length of {length}; max_seqlen_k is {max_seqlen_k}, "
                f"and its pages hold {capacity} rows"
            )
    for b, ids in enumerate(block_table.tolist()):
        pages(b, ids, lengths[b], len(k), k.shape[1])


def _sequences(
    names: tuple[str, str, str],
    rows: int,
    cu_seqlens: Tensor,
    longest: int | None,
    used: Tensor | None,
    padded: bool,
) -> None:
    at = cu_seqlens.tolist()
    left = _unclaimed(names[0], at, rows)
    lengths = offsets(names[0], at, rows, longest, names[1])
    if left and not padded:
        raise ValueError(f"{left}; if they are padding, give zero_tensors=True")
    for b, length in enumerate([] if used is None else used.tolist()):
        if not 0 <= length <= lengths[b]:
            raise ValueError(f"{names[2]}[{b}] is {length}; sequence {b} has {lengths[b]} rows")


def _warn_once(
    names: tuple[str, str, str],
    rows: int,
    cu_seqlens: Tensor,
    longest: int | None,
    used: Tensor | None,
    padded: bool,
) -> None:
    """Warns of what :func:`_sequences` refuses, but of rows without a sequence only if the offsets
    look like lengths; once a process for each text, whatever its numbers."""
    try:
        _sequences(names, rows, cu_seqlens, longest, used, padded=True)
        at = [] if padded else cu_seqlens.tolist()
        if not at or at[-1] >= rows or sum(at) != rows:
            return
        text = f"{names[0]} sums up to the {rows} rows: are these lengths? {_OF_LENGTHS}"
    except ValueError as error:
        text = str(error)
    kind = re.sub(r"-?\d+", "#", text)
    if kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(
        f"{text}. Offsets and lengths are cut to what fits; FLASH_CUTE_CHECK=1 refuses them. This "
        "warning is given once",
        stacklevel=4,
    )


def over_a_cache(
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    k: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
) -> None:
    """Warns on the CPU, as :func:`varlen` does, of offsets over a cache. Rows of k behind the last
    sequence are allowed there, since ranks share k."""
    if _on or not (q.is_cpu and is_readable(q)):
        return
    if cu_seqlens_q is not None:
        _warn_once(OF_Q, len(q), cu_seqlens_q, max_seqlen_q, None, False)
    if cu_seqlens_k_new is not None and k is not None:
        names = ("cu_seqlens_k_new", "seqlen_new", "")
        _warn_once(names, len(k), cu_seqlens_k_new, None, None, True)


def padding(name: str, cu_seqlens: Tensor | None, x: Tensor | None) -> None:
    """Warns of rows of x behind the last sequence; called by public functions over a cache."""
    if cu_seqlens is None or x is None:
        return
    if left := _unclaimed(name, cu_seqlens.tolist(), len(x)):
        warnings.warn(f"{left}; ignore this if they are padding", stacklevel=3)


def _unclaimed(name: str, at: list[int], rows: int) -> str:
    """Text about the rows that belong to no sequence, "" if there are none; ValueError if offsets
    do not begin with 0."""
    if at[0] != 0:
        raise ValueError(f"{name}[0] is {at[0]}; offsets begin with 0. {_OF_LENGTHS}")
    if at[-1] >= rows:
        return ""
    return f"{name}[{len(at) - 1}] is {at[-1]}, and rows {[at[-1], rows]} belong to no sequence"


def offsets(
    name: str, at: list[int], rows: int, longest: int | None, longest_name: str = "max_seqlen_q"
) -> list[int]:
    """The lengths between offsets into ``rows`` rows; ValueError for the first bad offset."""
    for b, (begin, end) in enumerate(pairwise(at)):
        if not 0 <= begin <= end <= rows:
            raise ValueError(
                f"{name}[{b}:{b + 2}] is {[begin, end]}; offsets ascend within [0, {rows}]"
            )
        if longest is not None and end - begin > longest:
            raise ValueError(
                f"{name}[{b}:{b + 2}] is {[begin, end]}; {longest_name} is {longest}, which is less"
            )
    return [end - begin for begin, end in pairwise(at)]


def pages(b: int, ids: list[int], length: int, num_blocks: int, page_size: int) -> list[int]:
    """The pages that the first ``length`` rows of sequence b use; ValueError for the first that
    does not exist."""
    used = ids[: -(-length // max(page_size, 1))]
    for block, page in enumerate(used):
        if not 0 <= page < num_blocks:
            raise ValueError(f"block_table[{b}, {block}] is {page}; there are {num_blocks} pages")
    return used


def cache(call: FwdKvcacheCall) -> None:
    """ValueError for the first index of a call over a key/value cache that the kernels would
    clamp."""
    if not torch.compiler.is_compiling() and not has_values(call.q):
        raise NotImplementedError(
            "check_indices looks at the values of index tensors, which fake, meta and mapped calls "
            "do not have; leave it False"
        )
    queries = _rows(call.q, "cu_seqlens_q", call.cu_seqlens_q, call.max_seqlen_q)
    new = [0] * len(queries)
    if call.k is not None:
        new = _rows(call.k, "cu_seqlens_k_new", call.cu_seqlens_k_new, None)
    _places(call, new)
    if call.rotary_cos is not None:
        steps = call.is_causal or (call.window_size_left, call.window_size_right) != (-1, -1)
        rows = [max(n, s if steps else min(s, 1)) for n, s in zip(new, queries, strict=True)]
        _positions(call, len(call.rotary_cos), rows)


def _rows(x: Tensor, name: str, cu_seqlens: Tensor | None, longest: int | None) -> list[int]:
    """Rows of x that each sequence has; ``name`` is that of its offsets, if there are any."""
    if cu_seqlens is None:
        return [x.shape[1]] * len(x)
    return offsets(name, cu_seqlens.tolist(), len(x), longest)


def _places(call: FwdKvcacheCall, seqlens_new: list[int]) -> None:
    """ValueError for the first index that leaves the caches, or row that two sequences append."""
    cache_seqlens, cache_batch_idx = call.cache_seqlens, call.cache_batch_idx
    k_cache, cache_leftpad, block_table = call.k_cache, call.cache_leftpad, call.block_table
    page_size, capacity = k_cache.shape[1], cache_capacity(k_cache, block_table)
    used = [capacity] * len(seqlens_new) if cache_seqlens is None else cache_seqlens.tolist()
    for b, (length, new) in enumerate(zip(used, seqlens_new, strict=True)):
        if not 0 <= length <= capacity - new:
            raise ValueError(
                f"cache_seqlens[{b}] is {length}; expected [0, {capacity - new}], with room for "
                f"{new} new rows"
            )
    for b, pad in enumerate([] if cache_leftpad is None else cache_leftpad.tolist()):
        if not 0 <= pad <= used[b]:
            raise ValueError(f"cache_leftpad[{b}] is {pad}; expected [0, {used[b]}]")
    rows = [] if cache_batch_idx is None else cache_batch_idx.tolist()
    for b, row in enumerate(rows):
        if not 0 <= row < len(k_cache):
            raise ValueError(f"cache_batch_idx[{b}] is {row}; expected [0, {len(k_cache)})")
        if seqlens_new[b] > 0 and row in rows[:b]:
            raise ValueError(
                f"cache_batch_idx[{b}] is {row}, and so is cache_batch_idx[{rows.index(row)}]; two "
                "sequences may share a row of the cache only without new k and v"
            )
    written: dict[int, tuple[int, int]] = {}  # entry of the table by page that k and v append to
    for b, ids in enumerate([] if block_table is None else block_table.tolist()):
        in_use = pages(b, ids, used[b] + seqlens_new[b], len(k_cache), page_size)
        for block, page in enumerate(in_use):
            if seqlens_new[b] == 0 or (block + 1) * page_size <= used[b]:
                continue
            other = written.setdefault(page, (b, block))
            if other != (b, block):
                raise ValueError(
                    f"block_table[{b}, {block}] is {page}, and so is block_table{list(other)}; two "
                    "sequences may share a page only if no new k and v are written to it"
                )


def _positions(call: FwdKvcacheCall, known: int, rows: list[int]) -> None:
    """ValueError for the first sequence whose rotated rows exceed the rotary positions."""
    name = "cache_seqlens" if call.rotary_seqlens is None else "rotary_seqlens"
    starts = call.cache_seqlens if call.rotary_seqlens is None else call.rotary_seqlens
    assert starts is not None  # rotary embedding is for new keys, which need cache_seqlens
    for b, (start, count) in enumerate(zip(starts.tolist(), rows, strict=True)):
        if count > 0 and not 0 <= start <= known - count:
            raise ValueError(
                f"{name}[{b}] is {start}, and {count} rows from there on are rotated; rotary_cos "
                f"has {known} positions"
            )
