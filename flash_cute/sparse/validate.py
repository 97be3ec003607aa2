"""What the constructors of :class:`flash_cute.Sparse`, and calls with one, accept. Nothing here
waits for the device: indices that name nothing are ignored where they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_cute.sparse.estimate import STRIDES
from flash_cute.sparse.lists import TILE, tiles_of

if TYPE_CHECKING:
    from flash_cute.sparse.value import Sparse

_INTS = (torch.int32, torch.int64)
_LAYOUTS = {"bshk": "(batch, seqlen_q, heads_k, k)", "bhsk": "(batch, heads_k, seqlen_q, k)"}


def ints(name: str, x: Any, dims: int, shape: str) -> None:
    """An int32 or int64 tensor of so many dimensions."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor {shape}")
    if x.dtype not in _INTS:
        raise TypeError(f"{name} has dtype {x.dtype}; expected torch.int32 or torch.int64")
    if x.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {shape}")


def function(name: str, fn: Any) -> None:
    if not callable(fn):
        raise TypeError(
            f"{name} is {type(fn).__name__}; expected a function (batch, head, query, key) -> bool"
        )


def length(name: str, x: Any) -> int:
    if type(x) is not int:
        raise TypeError(f"{name} is {x!r}; expected an int")
    if x < 0:
        raise ValueError(f"{name} is {x}; expected 0 or more")
    return x


def device(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {given!r}; expected one that torch has") from None


def block(sizes: Any) -> tuple[int, int]:
    """Queries and keys of a block."""
    if isinstance(sizes, int):
        sizes = (sizes, sizes)
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 2:
        raise TypeError(f"block is {sizes!r}; expected two ints, queries and keys of a block")
    for size in sizes:
        if type(size) is not int or size < 1 or (size != 64 and size % TILE):
            raise ValueError(f"block is {tuple(sizes)}; expected sizes of 64 or multiples of 128")
    return sizes[0], sizes[1]


def seqlens(given: Any, blocks_q: int, size: int) -> tuple[int, int] | None:
    """Lengths of queries and keys that fit lists of ``blocks_q`` blocks; None if not given."""
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"seqlens is {given!r}; expected two ints, queries and keys")
    seqlen_q, seqlen_k = (length(f"seqlens[{i}]", x) for i, x in enumerate(given))
    if -(-seqlen_q // size) != blocks_q:
        raise ValueError(
            f"seqlens has {seqlen_q} queries, {-(-seqlen_q // size)} blocks of {size}; there are "
            f"lists for {blocks_q} blocks"
        )
    return seqlen_q, seqlen_k


def lists_of_blocks(name: str, index: Any, of_counts: str, counts: Any) -> None:
    ints(name, index, 4, "(batch or 1, heads or 1, query blocks, capacity)")
    ints(of_counts, counts, 3, "(batch or 1, heads or 1, query blocks)")
    if counts.shape != index.shape[:3]:
        raise ValueError(
            f"{of_counts} has shape {tuple(counts.shape)}, and {name} {tuple(index.shape)}; "
            "expected a count for each list"
        )
    same_device(name, index, of_counts, counts)


def same_blocks(index: Tensor, full_index: Tensor) -> None:
    if index.shape[:3] != full_index.shape[:3]:
        raise ValueError(
            f"full_index has shape {tuple(full_index.shape)}, and index {tuple(index.shape)}; "
            "expected lists for the same batch, heads and query blocks"
        )
    same_device("index", index, "full_index", full_index)


def same_device(name: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.device != y.device:
        raise ValueError(f"{name} is on {x.device}, and {other} on {y.device}; expected one device")


def map_of_blocks(map: Any) -> None:
    if not isinstance(map, Tensor) or map.dtype != torch.bool:
        kind = map.dtype if isinstance(map, Tensor) else type(map).__name__
        raise TypeError(f"map is {kind}; expected a bool tensor")
    if map.dim() != 4:
        raise ValueError(
            f"map has shape {tuple(map.shape)}; expected (batch or 1, heads or 1, query blocks, "
            "key blocks)"
        )


def keys_of_map(map: Tensor, size: int, seqlen_k: int) -> None:
    if -(-seqlen_k // size) != map.shape[3]:
        raise ValueError(
            f"seqlens has {seqlen_k} keys, {-(-seqlen_k // size)} blocks of {size}; map has "
            f"{map.shape[3]} blocks of keys"
        )


def granularity(keys: Any) -> None:
    if type(keys) is not int or keys not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(f"granularity is {keys!r}; expected 1, 2, 4, 8, 16, 32, 64 or 128 keys")


def by_sequence(
    indices: Any, layout: Any, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None
) -> Tensor:
    """Indices of all layouts as (batch, heads_k, seqlen_q, k)."""
    if layout not in _LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected 'bshk' or 'bhsk'")
    if (cu_seqlens_q is None) != (max_seqlen_q is None):
        raise ValueError("cu_seqlens_q and max_seqlen_q go together; give both, or neither")
    if cu_seqlens_q is None or max_seqlen_q is None:
        ints("indices", indices, 4, _LAYOUTS[layout])
        return indices.transpose(1, 2) if layout == "bshk" else indices
    ints("indices", indices, 3, "(total_q, heads_k, k) with cu_seqlens_q")
    ints("cu_seqlens_q", cu_seqlens_q, 1, "(sequences + 1,)")
    same_device("indices", indices, "cu_seqlens_q", cu_seqlens_q)
    if layout != "bshk":
        raise ValueError("layout is 'bhsk', and cu_seqlens_q is given; packed indices are 'bshk'")
    return _unpacked(indices, cu_seqlens_q, length("max_seqlen_q", max_seqlen_q))


def _unpacked(indices: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Packed (total, heads, k) as (sequences, heads, longest, k), -1 behind each sequence's end."""
    offsets = cu_seqlens.long().clamp(0, len(indices))
    rows = offsets[:-1, None] + torch.arange(longest, device=indices.device)
    behind = rows >= offsets[1:, None]
    if len(indices) == 0:
        return indices.new_full((*rows.shape, *indices.shape[1:]), -1).transpose(1, 2)
    found = indices[rows.masked_fill(behind, 0)].masked_fill(behind[..., None, None], -1)
    return found.transpose(1, 2)


def intervals(first: Any, last: Any) -> tuple[Tensor, Tensor]:
    """Both as (batch, heads, seqlen_q, n)."""
    shape = "(batch or 1, heads or 1, seqlen_q[, n])"
    dims = 4 if isinstance(first, Tensor) and first.dim() == 4 else 3
    ints("first", first, dims, shape)
    ints("last", last, dims, shape)
    if first.shape != last.shape:
        raise ValueError(
            f"first has shape {tuple(first.shape)}, and last {tuple(last.shape)}; expected one "
            "shape"
        )
    same_device("first", first, "last", last)
    if dims == 4 and not 1 <= first.shape[3] <= 2:
        raise ValueError(
            f"first has {first.shape[3]} intervals a query; expected 1 or 2: use "
            "Sparse.from_mask_function for others"
        )
    return (first, last) if dims == 4 else (first[..., None], last[..., None])


def columns(startend_row_indices: Any, causal: Any) -> None:
    shape = "(batch or 1, heads or 1, seqlen_k, 1, 2 or 4)"
    ints("startend_row_indices", startend_row_indices, 4, shape)
    if type(causal) is not bool:
        raise TypeError(f"causal is {causal!r}; expected True or False")
    count, expected = startend_row_indices.shape[3], (1, 2) if causal else (2, 4)
    if count not in expected:
        raise ValueError(
            f"startend_row_indices has {count} numbers a key, and causal is {causal}; expected "
            f"{expected[0]} or {expected[1]}"
        )


def kept_keys(keys: Any, sparse: Sparse) -> None:
    """Which keys take part, of a value that exists."""
    if not isinstance(keys, Tensor) or keys.dtype != torch.bool:
        kind = keys.dtype if isinstance(keys, Tensor) else type(keys).__name__
        raise TypeError(f"keys is {kind}; expected a bool tensor, True for keys that take part")
    batch, shape = sparse.batch, tuple(keys.shape)
    if keys.dim() != 2 or keys.shape[1] != sparse.seqlen_k:
        raise ValueError(f"keys has shape {shape}; expected (batch or 1, {sparse.seqlen_k})")
    if len(keys) not in (1, batch) and (batch != 1 or len(keys) == 0):
        raise ValueError(f"keys has shape {shape}; expected a batch of 1 or {batch}")
    same_device("keys", keys, "sparse", sparse.tile_lists)


def band(causal: Any, window_size: Any) -> None:
    """A call's causal mask and window."""
    if type(causal) is not bool:
        raise TypeError(f"causal is {causal!r}; expected True or False")
    is_pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not is_pair or any(type(x) is not int for x in window_size):
        raise TypeError(f"window_size is {window_size!r}; expected two ints, (left, right)")


def call(
    sparse: Sparse,
    batch: int,
    heads: int,
    heads_k: int,
    seqlens: tuple[int, int],
    device: torch.device,
    causal: bool,
) -> None:
    """See :meth:`flash_cute.Sparse.check`."""
    if sparse.batch not in (1, batch):
        raise ValueError(f"sparse is for a batch of {sparse.batch}; the call has {batch}")
    if sparse.list_heads not in (1, heads_k, heads):
        raise ValueError(
            f"sparse is for {sparse.list_heads} heads; expected 1, those of k, {heads_k}, or those "
            f"of q, {heads}"
        )
    own = (sparse.seqlen_q, sparse.seqlen_k)
    for name, mine, theirs in zip(("queries", "keys"), own, seqlens, strict=True):
        if theirs > mine or tiles_of(mine) != tiles_of(theirs):
            raise ValueError(
                f"sparse is for {mine} {name}, and the call has {theirs}; make it for as many, or "
                f"for as many as their tiles of {TILE} hold"
            )
    if sparse.device != device:
        raise ValueError(f"sparse is on {sparse.device}, and q on {device}; make it on that device")
    if sparse.needs_causal and not causal:
        raise ValueError(
            "sparse comes of FlashMask's columns for causal attention, and causal is False; pass "
            "causal=True"
        )


def choice(
    q: Any,
    k: Any,
    ratio: Any,
    threshold: Any,
    stride: Any,
    causal: Any,
    lengths: Any,
    softmax_scale: Any,
    seed: Any,
) -> None:
    """The arguments of :func:`flash_cute.sparse.choose_blocks`."""
    for name, x in (("q", q), ("k", k)):
        _floats(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected (batch, seqlen, heads, dim)"
            )
    same_device("q", q, "k", k)
    same = (q.shape[:2], q.shape[3]) == (k.shape[:2], k.shape[3])
    if not same or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, and k {tuple(k.shape)}; expected one batch, seqlen and "
            "dim, and heads of q that those of k divide"
        )
    if q.shape[1] == 0:
        raise ValueError("q has 0 tokens; expected 1 or more")
    for name, x, most in (("sparsity_ratio", ratio, 0.95), ("threshold", threshold, 1.0)):
        if x is None and name == "threshold":
            continue
        if isinstance(x, bool) or not isinstance(x, (int, float)):
            raise TypeError(f"{name} is {x!r}; expected a number")
        if not 0 <= x <= most:
            raise ValueError(f"{name} is {x}; expected 0 to {most}")
    if threshold == 0:
        raise ValueError("threshold is 0; expected a share of attention, above 0")
    if softmax_scale is not None:
        if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
            raise TypeError(f"softmax_scale is {softmax_scale!r}; expected a number or None")
        if not abs(softmax_scale) < float("inf"):
            raise ValueError(f"softmax_scale is {softmax_scale}; expected a finite number")
    if type(seed) is not int:
        raise TypeError(f"seed is {seed!r}; expected an int")
    if type(stride) is not int or stride not in STRIDES:
        raise ValueError(f"stride is {stride!r}; expected one of {STRIDES}")
    if type(causal) is not bool:
        raise TypeError(f"causal is {causal!r}; expected True or False")
    if lengths is not None:
        ints("lengths", lengths, 1, f"(batch,), ({len(q)},)")
        if len(lengths) != len(q):
            raise ValueError(f"lengths has {len(lengths)} sequences, and q {len(q)}")
        same_device("q", q, "lengths", lengths)


def indexer(q_idx: Any, k_idx: Any, k: Any, weights: Any, causal: Any, local_blocks: Any) -> None:
    """The arguments of :func:`flash_cute.sparse.indexer_topk`."""
    for name, x in (("q_idx", q_idx), ("k_idx", k_idx)):
        _floats(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected (batch, seqlen, heads, dim)"
            )
    same_device("q_idx", q_idx, "k_idx", k_idx)
    heads = q_idx.shape[2]
    fits = q_idx.shape[::3] == k_idx.shape[::3] and k_idx.shape[2] in (1, heads)
    if not fits:
        raise ValueError(
            f"q_idx has shape {tuple(q_idx.shape)}, and k_idx {tuple(k_idx.shape)}; expected one "
            "batch and dim, and 1 head of k_idx or as many as of q_idx"
        )
    if weights is not None:
        _floats("weights", weights)
        if weights.shape != q_idx.shape[:3]:
            raise ValueError(
                f"weights have shape {tuple(weights.shape)}; expected those of q_idx's heads, "
                f"{tuple(q_idx.shape[:3])}"
            )
        same_device("q_idx", q_idx, "weights", weights)
    if length("k", k) < 1:
        raise ValueError("k is 0; expected blocks to choose, 1 or more")
    if type(causal) is not bool:
        raise TypeError(f"causal is {causal!r}; expected True or False")
    if length("local_blocks", local_blocks) and not causal:
        raise ValueError(
            f"local_blocks is {local_blocks}, and causal is False; blocks before a query's own "
            "position need causal=True"
        )
    if local_blocks > k:
        raise ValueError(f"local_blocks is {local_blocks}, and k {k}; expected k or fewer")


def _floats(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} is {kind}; expected a tensor of floats")
