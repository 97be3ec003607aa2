"""Random problems over a key/value cache, and the checks against the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_cute import reference
from flash_cute.call import validate
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.testing import bounds
from flash_cute.testing.cases import Problem, lay_out

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class CacheCase(Problem):
    """Sequences whose first `lengths` rows are in the cache; the cache's other rows are NaN.

    `seqlens_q` is one length for all, or one a sequence (packed queries); so is `seqlens_new`, the
    appended rows. With `page_size` the cache is pages in random order. `rotary` is "",
    "interleaved" or "halves". `batch_idx` puts sequences into random rows of a larger cache.
    `packed_cache`: K and V of a row are adjacent in one tensor.
    """

    lengths: tuple[int, ...] = (33, 0, 130)
    seqlens_q: int | tuple[int, ...] = 1
    seqlens_new: int | tuple[int, ...] = 0
    page_size: int | None = None
    capacity: int | None = None
    leftpad: bool = False
    batch_idx: bool = False
    packed_cache: bool = False
    rotary: str = ""
    rotary_dim: int = 32
    rotary_seqlens: bool = False
    num_splits: int = 0
    split_size: int = 0


@dataclass(frozen=True)
class CacheInputs:
    """The arguments of one call of the op, by name."""

    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def changed(self, **changes: Any) -> CacheInputs:
        """These inputs with some arguments replaced; lists become int32 tensors."""
        device = self["q"].device
        tensors = {
            name: torch.tensor(x, dtype=torch.int32, device=device) if isinstance(x, list) else x
            for name, x in changes.items()
        }
        return CacheInputs(self.arguments | tensors)

    def fresh(self) -> CacheInputs:
        """These inputs with caches of their own, laid out as they were."""
        k_cache, v_cache = self["k_cache"], self["v_cache"]
        if k_cache.untyped_storage().data_ptr() != v_cache.untyped_storage().data_ptr():
            return CacheInputs(
                self.arguments | {"k_cache": k_cache.clone(), "v_cache": v_cache.clone()}
            )
        both = torch.cat((k_cache, v_cache), -1)
        dims = [k_cache.shape[-1], v_cache.shape[-1]]
        return CacheInputs(
            self.arguments | dict(zip(("k_cache", "v_cache"), both.split(dims, -1), strict=True))
        )

    def run(self) -> tuple[Tensor, Tensor]:
        """(out, softmax_lse) of the op; the caches are written."""
        return torch.ops.flash_cute.fwd_kvcache(**self.arguments)

    def reference(self, **changes: Any) -> reference.CachedAttention:
        arguments = self.arguments | changes
        for name in ("num_splits", "split_size"):
            arguments.pop(name)
        return reference.attention_kvcache(**arguments)


def make_cache_inputs(case: CacheCase, device: torch.device | str, seed: int = 0) -> CacheInputs:
    """Fresh normal values for `case`. Equal seeds give equal values on every device."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads_k = len(case.lengths), case.heads_k or case.heads
    dim_v = case.dim_v or case.dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    def integers(values: Iterable[int]) -> Tensor:
        return torch.tensor(tuple(values), dtype=torch.int32, device=device)

    def packed(lengths: int | tuple[int, ...], heads: int, dim: int) -> Tensor:
        shape = (batch, lengths) if isinstance(lengths, int) else (sum(lengths),)
        return normal(*shape, heads, dim)

    def offsets(lengths: int | tuple[int, ...]) -> Tensor | None:
        return (
            None if isinstance(lengths, int) else integers(itertools.accumulate(lengths, initial=0))
        )

    new = case.seqlens_new
    new_rows = (new,) * batch if isinstance(new, int) else new
    longest = max((a + b for a, b in zip(case.lengths, new_rows, strict=True)), default=0)
    capacity = case.capacity or longest + 3
    page_size = case.page_size or capacity
    blocks = -(-capacity // page_size)
    pages = batch * blocks + (5 if case.page_size or case.batch_idx else 0)
    order = torch.randperm(pages, generator=generator, dtype=torch.int32)[: batch * blocks]
    if not case.page_size and not case.batch_idx:
        order = torch.arange(batch, dtype=torch.int32)
    table = order.view(batch, blocks)

    both = torch.full((pages, page_size, heads_k, case.dim + dim_v), NAN, dtype=case.dtype)
    pads = [length // 3 if case.leftpad else 0 for length in case.lengths]
    for b, (pad, length) in enumerate(zip(pads, case.lengths, strict=True)):
        rows = torch.arange(pad, length)
        place = table[b].long()[rows // page_size], rows % page_size
        both[place] = normal(len(rows), heads_k, case.dim + dim_v)
    k_cache, v_cache = both.to(device).split([case.dim, dim_v], -1)
    if not case.packed_cache:
        k_cache, v_cache = (lay_out(x.contiguous(), case.layout) for x in (k_cache, v_cache))

    longest_q = case.seqlens_q if isinstance(case.seqlens_q, int) else max(case.seqlens_q)
    q = packed(case.seqlens_q, case.heads, case.dim) * case.spread
    has_new = any(new_rows)
    arguments = {
        "q": q.to(device),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": packed(new, heads_k, case.dim).to(device) if has_new else None,
        "v": packed(new, heads_k, dim_v).to(device) if has_new else None,
        "cache_seqlens": integers(case.lengths),
        "cache_batch_idx": table[:, 0].contiguous().to(device) if case.batch_idx else None,
        "cache_leftpad": integers(pads) if case.leftpad else None,
        "block_table": table.to(device) if case.page_size else None,
        "cu_seqlens_q": offsets(case.seqlens_q),
        "max_seqlen_q": 0 if isinstance(case.seqlens_q, int) else longest_q,
        "cu_seqlens_k_new": offsets(new) if has_new else None,
        "softmax_scale": case.softmax_scale,
        "is_causal": case.is_causal,
        "window_size_left": case.window[0],
        "window_size_right": case.window[1],
        "softcap": case.softcap,
        "alibi_slopes": None,
        "sink": normal(case.heads).to(device, case.sink_dtype) if case.sink else None,
        "num_splits": case.num_splits,
        "split_size": case.split_size,
    }
    if case.alibi:
        shape = (batch, case.heads) if case.alibi == "batch" else (case.heads,)
        arguments["alibi_slopes"] = 0.5 * torch.rand(shape, generator=generator).to(device)
    if case.rotary:
        angles = torch.rand(longest + longest_q + 9, case.rotary_dim // 2, generator=generator)
        angles = (6.3 * angles).to(device)
        arguments |= {
            "rotary_cos": angles.cos().to(case.dtype),
            "rotary_sin": angles.sin().to(case.dtype),
            "rotary_interleaved": case.rotary == "interleaved",
        }
    if case.rotary_seqlens:
        arguments["rotary_seqlens"] = integers(length // 2 for length in case.lengths)
    return CacheInputs(arguments)


def check(inputs: CacheInputs) -> tuple[Tensor, Tensor]:
    """Runs the op, and asserts out, softmax_lse and the caches against the oracle.

    Values in the cache are the given ones, bit by bit; so are keys without rotary embedding, whose
    rounding may differ. Raises AssertionError with the worst coordinate.
    """
    oracle, expected = cache_oracle(inputs)
    ran = inputs.fresh()
    out, lse = ran.run()
    bounds.check_same_bits("v_cache", ran["v_cache"], expected.v_cache)
    if inputs.arguments.get("rotary_cos") is None:
        bounds.check_same_bits("k_cache", ran["k_cache"], expected.k_cache)
    else:
        unit = bounds.ROUNDING_UNIT[out.dtype]
        arithmetic = bounds.ROUNDING_UNIT[torch.promote_types(out.dtype, torch.float32)]
        exact, size = expected.k_cache.double(), bounds.largest(inputs["k"])
        bound = 2 * unit * exact.abs() + 4 * arithmetic * size + 2 * bounds.smallest(out.dtype)
        bounds.compare("k_cache", ran["k_cache"], exact, bound)
    bounds.check_forward(out, lse, oracle)
    return out, lse


def cache_oracle(
    inputs: CacheInputs, weights: torch.dtype | None = None
) -> tuple[bounds.Oracle, reference.CachedAttention]:
    """The oracle of :mod:`flash_cute.testing.bounds` for a cache, and the reference's result. The
    dtype of ``weights`` is q's, if it is None."""
    dtype = inputs["q"].dtype

    def values(change: Any, **options: Any) -> reference.CachedAttention:
        v = inputs["v"]
        changed = {"v_cache": change(inputs["v_cache"]), "v": None if v is None else change(v)}
        return inputs.reference(**changed, **options)

    expected = inputs.reference()
    both = values(lambda v: torch.cat((v, v.abs()), -1))
    out, out_of_abs_v = both.out.chunk(2, -1)
    smallest = torch.full_like(out, bounds.smallest(dtype))
    if (weights or dtype) == torch.float16:
        off = {"softcap": 0.0, "alibi_slopes": None, "sink": None, "softmax_scale": 0.0}
        mean = values(torch.abs, **off)
        largest = (both.row_max - both.softmax_lse).exp().nan_to_num(0.0)
        count = (mean.softmax_lse.exp() * largest).transpose(-1, -2)[..., None]
        smallest += bounds.smallest(torch.float16) * mean.out * count
    scale = inputs["softmax_scale"]
    keys = [inputs["k_cache"]] + ([] if inputs["k"] is None else [inputs["k"]])
    size = inputs["q"].shape[-1] ** -0.5 if scale is None else abs(scale)
    size *= bounds.row_norm(inputs["q"]) * max(bounds.row_norm(x) for x in keys)
    if inputs["alibi_slopes"] is not None:
        size += bounds.largest(both.row_max) + 10
    oracle = bounds.Oracle(
        out, both.softmax_lse, both.row_max, out, out_of_abs_v, smallest, logit_size=size
    )
    return oracle, expected


def unsupported_on_cuda(case: CacheCase) -> str | None:
    """The name of the first feature of `case` without a CUDA kernel, if there is one."""
    if case.dtype not in validate_kvcache.KVCACHE_CUDA_DTYPES:
        return "dtype"
    dims = (case.dim, case.dim_v or case.dim)
    if max(dims) > validate.CUDA_MAX_HEAD_DIM:
        return "head dim"
    return None
