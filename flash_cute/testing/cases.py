"""Random attention problems: a frozen description, and its tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flash_cute
from flash_cute import ops, reference
from flash_cute.call import validate
from flash_cute.cpu import sparse as cpu_sparse
from flash_cute.functional import gathered
from flash_cute.ops.typed import BwdCall, FwdCall, VarlenBwdCall, VarlenFwdCall
from flash_cute.sparse.lists import QUADRANTS, tile_lists, tiles_of

LAYOUTS = (
    "contiguous",
    "heads_first",
    "sequence_first",
    "qkvpacked",
    "kvpacked",
    "expanded_heads",
    "expanded_batch",
    "padded_rows",
    "odd_rows",
    "offset",
    "wild_unit_strides",
)
"""Ways to lay q, k and v out in memory. See `lay_out`; every gap they leave holds NaN."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The fields of dense and varlen cases. `alibi` is "", "heads" or "batch": the slopes' shape.

    `spread` scales q, hence the standard deviation of the logits (about 1 by default). `sparse` is
    "", or what visible tiles are: "whole", "halves" (quadrants of them), or "pairs" (some with a
    mask of pairs); `list_heads` is "one", "keys" or "queries": whose heads have lists of their own.
    """

    heads: int = 2
    heads_k: int | None = None
    dim: int = 64
    dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""
    sink: bool = False
    sink_dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    layout: str = "contiguous"
    spread: float = 1.0
    sparse: str = ""
    list_heads: str = "one"


@dataclass(frozen=True, kw_only=True)
class Case(Problem):
    """A dense problem: q (batch, seqlen_q, heads, dim), k and v (batch, seqlen_k, heads_k, dim)."""

    batch: int = 2
    seqlen_q: int = 64
    seqlen_k: int = 64


@dataclass(frozen=True, kw_only=True)
class VarlenCase(Problem):
    """Sequences of several lengths in one tensor, q (total_q, heads, dim).

    `rows_before` and `rows_after` rows of q, k and v belong to no sequence. `used_q` and `used_k`
    cut sequences short. With `page_size`, k and v are pages in random order, with a block_table.
    `max_seqlen` replaces max_seqlen_q and max_seqlen_k.
    """

    lengths_q: tuple[int, ...] = (64, 0, 1, 33)
    lengths_k: tuple[int, ...] = (64, 0, 1, 33)
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    rows_before: int = 0
    rows_after: int = 0
    page_size: int | None = None
    max_seqlen: int | None = None


@dataclass(frozen=True)
class Inputs:
    """The tensors of one case, and calls of the op and of the oracle with them.

    `options` are the arguments that fwd, bwd and the reference share, `lengths` those that only
    varlen problems have (empty for a dense one), `lists` those that only sparse ones have. `dlse`
    is a random gradient of softmax_lse.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    options: dict[str, Any]
    lengths: dict[str, Any] = field(default_factory=dict)
    lists: dict[str, Any] = field(default_factory=dict)

    def forward(self, **extra: Any) -> tuple[Any, ...]:
        """(out, softmax_lse, row_max, softmax) of the op under test, called with `extra` too."""
        call = self._call(**extra)
        if self._has_no_kernel(call):
            return gathered.attend(call)
        results: tuple[Any, ...] = ops.OP_OF[type(call)](*call)
        return results

    def _call(self, **extra: Any) -> FwdCall | VarlenFwdCall:
        arguments = self.options | self.lists | extra
        kind: Any = VarlenFwdCall if self.lengths else FwdCall
        return kind(*self._operands(), **self.lengths, **arguments)

    def _operands(self) -> tuple[Tensor, ...]:
        """q, k and v, as public functions give them to an op."""
        tensors = self.q, self.k, self.v
        return tuple(map(gathered.stored, tensors)) if self.lists else tensors

    def _has_no_kernel(self, call: FwdCall | VarlenFwdCall) -> bool:
        """Sparse calls that public functions compute without one are tried, too."""
        return bool(self.lists) and gathered.is_needed(call, grad=True)

    def backward(
        self, out: Tensor, softmax_lse: Tensor, dlse: Tensor | None = None, **extra: Any
    ) -> dict[str, Tensor]:
        """The gradients of the op under test, by name: q, k, v, and sink where there is one."""
        lengths = {name: value for name, value in self.lengths.items() if name != "block_table"}
        dout = self.dout.contiguous() if self.lists else self.dout
        saved = (dout, *self._operands(), out, softmax_lse)
        arguments = lengths | self.options | self.lists_of_keys() | {"dlse": dlse} | extra
        op = torch.ops.flash_cute.varlen_bwd if self.lengths else torch.ops.flash_cute.bwd
        if self._has_no_kernel(self._call(deterministic=extra.get("deterministic", False))):
            kind: Any = VarlenBwdCall if self.lengths else BwdCall
            call = kind(*saved, **arguments)
            compute: Any = cpu_sparse.varlen_bwd if self.lengths else cpu_sparse.bwd
            dq, dk, dv, dsink, _ = compute(call, call.tile_lists, call.tile_bits)
        else:
            dq, dk, dv, dsink, _ = op(*saved, **arguments)
        grads = {"q": dq, "k": dk, "v": dv}
        return grads if self.options["sink"] is None else {**grads, "sink": dsink}

    def lists_of_keys(self) -> dict[str, Any]:
        """What backward's op takes in the place of `lists`."""
        if not self.lists:
            return {}
        seqlen_k = self.lengths["max_seqlen_k"] if self.lengths else self.k.shape[1]
        lists, ranks = torch.ops.flash_cute.transposed_tile_lists(
            self.lists["tile_lists"], tiles_of(seqlen_k)
        )
        return self.lists | {"tile_lists": lists, "tile_ranks": ranks}

    def attend(self, **extra: Any) -> Any:
        """The result of the public function; it draws its own dropout state, not `rng`."""
        call: Callable[..., Any]
        call = flash_cute.flash_attn_varlen_func if self.lengths else flash_cute.flash_attn_func
        options = {name: x for name, x in self.options.items() if name != "rng"}
        left, right = options.pop("window_size_left"), options.pop("window_size_right")
        options |= {"causal": options.pop("is_causal"), "window_size": (left, right)}
        return call(self.q, self.k, self.v, **self.lengths, **(options | extra))

    def reference(
        self, dtype: torch.dtype | None = torch.float64, **changes: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The oracle's result; `changes` replaces q, k, v or any option."""
        call: Callable[..., Any] = reference.attention
        if self.lengths:
            call = reference.attention_varlen
        tensors = {"q": self.q, "k": self.k, "v": self.v}
        return call(**(tensors | self.lengths | self.options | self.lists | changes), dtype=dtype)


def make_inputs(case: Case | VarlenCase, device: torch.device | str, seed: int = 0) -> Inputs:
    """Fresh normal values for `case`. Equal seeds give equal values on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads_k = case.heads_k or case.heads
    dim_v = case.dim_v or case.dim
    rows_q, rows_k = _row_shapes(case)
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    q = normal(*rows_q, case.heads, case.dim) * case.spread
    k = normal(*rows_k, heads_k, case.dim)
    v = normal(*rows_k, heads_k, dim_v)
    dout = normal(*rows_q, case.heads, dim_v)
    dlse = normal(*rows_q, case.heads).transpose(-1, -2).to(device, lse_dtype)
    q, k, v, dout = (x.to(device, case.dtype) for x in (q, k, v, dout))
    lengths = _lengths(case, generator, device) if isinstance(case, VarlenCase) else {}
    if isinstance(case, VarlenCase) and case.page_size:
        k, v = (_paged(x, lengths, case.page_size) for x in (k, v))
    return Inputs(
        *lay_out_inputs(q, k, v, case.layout),
        dout=dout if "packed" in case.layout else lay_out(dout, case.layout),
        dlse=dlse.contiguous(),
        options=_options(case, generator, seed, device),
        lengths=lengths,
        lists=_lists(case, generator, device),
    )


def lay_out_inputs(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with `layout` in memory."""
    if layout == "qkvpacked":
        q, k, v = torch.stack((q, k, v), -3).unbind(-3)
    elif layout == "kvpacked":
        k, v = torch.stack((k, v), -3).unbind(-3)
    else:
        q, k, v = (lay_out(x, layout) for x in (q, k, v))
    return q, k, v


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A tensor of `x`'s shape and values with `layout` in memory, NaN in the gaps it leaves.

    Only the expanded layouts change values: they repeat the first head or batch with stride 0.

    Raises:
        ValueError: `layout` is not a layout of one tensor.
    """
    match layout:
        case "contiguous":
            return x
        case "heads_first":
            return x.transpose(-2, -3).contiguous().transpose(-2, -3)
        case "sequence_first":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        case "expanded_heads":
            return x[..., :1, :].contiguous().expand_as(x)
        case "expanded_batch":
            return x[:1].contiguous().expand_as(x)
        case "padded_rows" | "odd_rows":
            padding = 8 if layout == "padded_rows" else 1
            rows = x.new_full((*x.shape[:-1], x.shape[-1] + padding), float("nan"))
            return rows[..., : x.shape[-1]].copy_(x)
        case "offset":
            flat = x.new_full((x.numel() + 2,), float("nan"))
            return flat[1:-1].view(x.shape).copy_(x)
        case "wild_unit_strides":
            pairs = zip(x.shape, x.stride(), strict=True)
            return x.as_strided(x.shape, [99990001 if n == 1 else stride for n, stride in pairs])
    raise ValueError(f"layout: got {layout!r}, supported are {', '.join(LAYOUTS)}")


def unsupported_on_cuda(case: Case | VarlenCase) -> str | None:
    """The name of the first feature of `case` without a CUDA kernel, if there is one."""
    if case.dtype not in validate.CUDA_DTYPES:
        return str(case.dtype).removeprefix("torch.")
    if max(case.dim, case.dim_v or 0) > validate.CUDA_MAX_HEAD_DIM:
        return "head dim"
    if case.sink_dtype not in validate.CUDA_SINK_DTYPES:
        return "sink"
    return None


def _row_shapes(case: Case | VarlenCase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of q and of k before (heads, dim)."""
    if isinstance(case, Case):
        return (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
    extra = case.rows_before + case.rows_after
    return (sum(case.lengths_q) + extra,), (sum(case.lengths_k) + extra,)


def _options(
    case: Case | VarlenCase, generator: torch.Generator, seed: int, device: torch.device | str
) -> dict[str, Any]:
    _, batch = _sizes(case)
    slopes_shape = {"": None, "heads": (case.heads,), "batch": (batch, case.heads)}[case.alibi]
    slopes = None if slopes_shape is None else 0.5 * torch.rand(slopes_shape, generator=generator)
    sink = torch.randn(case.heads, generator=generator) if case.sink else None
    sink = None if sink is None else sink.to(device, case.sink_dtype)
    rng = torch.tensor([1234567890123 + seed, 4 * seed], device=device) if case.dropout_p else None
    return {
        "softmax_scale": case.softmax_scale,
        "is_causal": case.is_causal,
        "window_size_left": case.window[0],
        "window_size_right": case.window[1],
        "softcap": case.softcap,
        "alibi_slopes": None if slopes is None else slopes.to(device),
        "sink": sink,
        "dropout_p": case.dropout_p,
        "rng": rng,
    }


def _lists(
    case: Case | VarlenCase, generator: torch.Generator, device: torch.device | str
) -> dict[str, Any]:
    """Random lists: rows of any density, 0 and 1 among them."""
    if not case.sparse:
        return {}
    seqlens, batch = _sizes(case)
    heads = {"one": 1, "keys": case.heads_k or case.heads, "queries": case.heads}[case.list_heads]
    shape = (batch, heads, *map(tiles_of, seqlens))

    def uniform(*sizes: int) -> Tensor:
        return torch.rand(sizes, generator=generator)

    quadrants = torch.randint(1, 16, shape, generator=generator)
    whole = uniform(*shape) < (1.0 if case.sparse == "whole" else 0.5)
    codes = quadrants.masked_fill(whole, QUADRANTS - 1)
    density = uniform(*shape[:3], 1) * 1.5 - 0.25
    codes = codes.masked_fill(uniform(*shape) >= density, 0)
    masked = (codes > 0) & (uniform(*shape) < (0.4 if case.sparse == "pairs" else 0.0))
    number = masked.flatten().cumsum(0).view(shape)
    codes = torch.where(masked, codes + QUADRANTS * number, codes).int()
    words = (int(masked.sum()), 128, 4)
    bits = torch.randint(-(2**31), 2**31, words, generator=generator, dtype=torch.int32)
    return {
        "tile_lists": tile_lists(codes.to(device)),
        "tile_bits": bits.to(device) if case.sparse == "pairs" else None,
    }


def _sizes(case: Case | VarlenCase) -> tuple[tuple[int, int], int]:
    """The announced lengths of queries and keys, and the number of sequences."""
    if isinstance(case, Case):
        return (case.seqlen_q, case.seqlen_k), case.batch
    longest = (max(x, default=0) for x in (case.lengths_q, case.lengths_k))
    seqlens = [n if case.max_seqlen is None else case.max_seqlen for n in longest]
    return (seqlens[0], seqlens[1]), len(case.lengths_q)


def _lengths(
    case: VarlenCase, generator: torch.Generator, device: torch.device | str
) -> dict[str, Any]:
    def integers(values: Sequence[int] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    def offsets(lengths: Sequence[int]) -> Tensor | None:
        return integers(tuple(itertools.accumulate(lengths, initial=case.rows_before)))

    longest_k = max(case.lengths_k, default=0)
    announced, _ = _sizes(case)
    lengths = {
        "cu_seqlens_q": offsets(case.lengths_q),
        "cu_seqlens_k": offsets(case.lengths_k),
        "max_seqlen_q": announced[0],
        "max_seqlen_k": announced[1],
        "seqused_q": integers(case.used_q),
        "seqused_k": integers(case.used_k),
    }
    if case.page_size is None:
        return lengths
    pages = -(-longest_k // case.page_size)
    order = torch.randperm(len(case.lengths_k) * pages, generator=generator, dtype=torch.int32)
    return {**lengths, "block_table": order.view(len(case.lengths_k), pages).to(device)}


def _paged(x: Tensor, lengths: dict[str, Any], page_size: int) -> Tensor:
    """The rows of `x` (total_k, heads_k, dim) in pages, NaN in the rows that no sequence fills."""
    table, offsets = lengths["block_table"].tolist(), lengths["cu_seqlens_k"].tolist()
    pages = x.new_full((lengths["block_table"].numel(), page_size, *x.shape[1:]), float("nan"))
    for ids, (first, last) in zip(table, itertools.pairwise(offsets), strict=True):
        for page, start in zip(ids, range(first, last, page_size), strict=False):
            rows = x[start : min(start + page_size, last)]
            pages[page, : len(rows)] = rows
    return pages
