"""``kernels.Problem``: the sizes and options of an attention call, from which plans are made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call.fp8 import DTYPES as FP8_DTYPES
from flash_cute.call.sizes import batch_of, cache_capacity, longest_queries
from flash_cute.call.validate import INT64_MAX
from flash_cute.ops import switches
from flash_cute.ops.typed import (
    AttendKvcacheCall,
    AttendQuantizedKvcacheCall,
    BwdCall,
    FwdCall,
    FwdKvcacheCall,
    VarlenBwdCall,
    VarlenFwdCall,
)

OPS = ("fwd", "bwd", "decode")
_OP_OF: dict[type, str] = {
    FwdCall: "fwd", VarlenFwdCall: "fwd", BwdCall: "bwd", VarlenBwdCall: "bwd",
    FwdKvcacheCall: "decode", AttendKvcacheCall: "decode",
    AttendQuantizedKvcacheCall: "decode",
}  # fmt: skip
_SIXTEEN_BITS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_E4M3 = torch.float8_e4m3fn
_EIGHT_BITS = {_E4M3: "e4m3", torch.int8: "int8"}  # of caches
# Fields for which the ops of e4m3 inputs have no argument, and the attention functions' names.
_WIDENING = {
    "softcap": "softcap", "dropout": "dropout_p", "alibi": "alibi_slopes", "lists": "sparse",
    "return_softmax": "return_attn_probs", "return_row_max": "return_max_logits",
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """The sizes and options of a call. ``None`` means heads for heads_k, seqlen_q for seqlen_k,
    head_dim for head_dim_v, and batch times length for totals.

    ``op`` "decode" is :func:`flash_cute.flash_attn_with_kvcache`, with the cache's capacity as
    seqlen_k. ``dtype`` torch.float8_e4m3fn means q, k and v. It has the plan of bf16, as e5m2 has,
    where :func:`flash_cute.kernels.why_widened` has reasons to widen it.

    Raises:
        ValueError: a size is not an int, negative, or beyond int64; heads are not a multiple of
            heads_k; the op or the dtype is unknown; a flag is not a bool, window_size not two ints
            >= -1, softmax_scale not a number that fp32 holds; or both num_splits and split_size
            are given.

    Example::

        from flash_cute import kernels

        prompt = kernels.Problem(batch=4, heads=32, heads_k=8, seqlen_q=4096, causal=True)
        step = kernels.Problem("decode", batch=4, heads=32, heads_k=8, seqlen_q=1, seqlen_k=8192)
        print(kernels.plan(prompt, gpu="h100").kernel.id, kernels.plan(step, gpu="h100").kernel.id)
    """

    op: str = "fwd"
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    heads: int = 1
    heads_k: int | None = None
    seqlen_q: int = 1
    seqlen_k: int | None = None
    head_dim: int = 128
    head_dim_v: int | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float = 1.0  # only its sign matters
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    varlen: bool = False
    lists: bool = False  # sparse; fwd and bwd
    total_q: int | None = None
    total_k: int | None = None
    unaligned: bool = False  # some vectors of q, k and v do not begin on 16-byte boundaries
    deterministic: bool = False  # bwd
    fp32_gradients: bool = False  # bwd: of 16-bit inputs, in buffers of bwd.out
    allow_tf32: bool = False  # fp32
    seqused_q: bool = False  # fwd, as the next two
    return_row_max: bool = False
    return_softmax: bool = False
    sink: bool = False  # bwd
    page_size: int = 0  # fwd and decode; 0: no pages
    max_blocks: int | None = None  # pages of a sequence; None: as many as seqlen_k needs
    lengths: bool = False  # decode, as all below: lengths of sequences are only on the device
    leftpad: bool = False
    append: bool = False
    rotary: bool = False
    cache_batch_idx: bool = False
    cu_seqlens_k_new: bool = False
    num_splits: int = 0
    split_size: int = 0
    cache_dtype: torch.dtype | None = None  # of a cache of 8 bits; None: dtype

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op is {self.op!r}; expected one of {', '.join(OPS)}")
        known = (*_SIXTEEN_BITS, torch.float32, *FP8_DTYPES)
        if self.dtype not in known:
            raise ValueError(
                f"dtype {self.dtype} has no CUDA kernel; expected {', '.join(map(str, known))}"
            )
        if self.cache_dtype is not None and self.cache_dtype not in _EIGHT_BITS:
            listed = ", ".join(map(str, _EIGHT_BITS))
            raise ValueError(f"cache_dtype is {self.cache_dtype!r}; expected None, {listed}")
        least = {"heads": 1, "heads_k": 1, "head_dim": 1, "head_dim_v": 1}
        sizes = ("batch", "seqlen_q", "seqlen_k", "total_q", "total_k", "page_size", "max_blocks",
                 "num_splits", "split_size", *least)  # fmt: skip
        for name in sizes:
            size, at_least = getattr(self, name), least.get(name, 0)
            if size is None and name in _MAY_BE_NONE:
                continue
            if type(size) is not int or not at_least <= size <= INT64_MAX:
                raise ValueError(f"{name} is {size!r}; expected an int >= {at_least}")
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False")
        window = self.window_size
        if not (
            isinstance(window, tuple)
            and len(window) == 2
            and all(type(x) is int and -1 <= x <= INT64_MAX for x in window)
        ):
            raise ValueError(
                f"window_size is {window!r}; expected two ints, -1 or counts that fit int64"
            )
        scale = self.softmax_scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise ValueError(f"softmax_scale is {scale!r}; expected a number")
        if not abs(scale) <= torch.finfo(torch.float32).max:
            raise ValueError(f"softmax_scale is {scale!r}; expected a number that fp32 holds")
        if self.num_splits and self.split_size:
            raise ValueError(
                f"num_splits is {self.num_splits} and split_size {self.split_size}; "
                "give one of them"
            )
        if self.heads % (self.heads_k or self.heads):
            raise ValueError(
                f"heads is {self.heads}; expected a multiple of heads_k, {self.heads_k}"
            )

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, op: str = "fwd", **options: Any) -> Problem:
        """The problem of dense q (batch, seqlen_q, heads, dim), k and v, with other fields."""
        dtype = _dtype_of(q, k, v)
        return cls(
            op, dtype, len(q), q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3],
            v.shape[3], unaligned=_are_unaligned(dtype, q, k, v), **options,
        )  # fmt: skip

    @classmethod
    def of_call(cls, call: Any, op: str | None = None) -> Problem:
        """The problem of a call of any attention op (:mod:`flash_cute.ops.typed`); with ``op``
        "bwd" that of the backward of a forward call."""
        own = _OP_OF.get(type(call))
        if own is None:
            raise TypeError(
                f"call is a {type(call).__name__}; expected a call of an attention op, such as "
                "flash_cute.ops.typed.FwdCall"
            )
        op = own if op is None else op
        if op != own and (own, op) != ("fwd", "bwd"):
            raise ValueError(f"op is {op!r}; a {type(call).__name__} is of op {own!r}")
        over_cache = own == "decode"
        q, k, v = (call.q, call.k_cache, call.v_cache) if over_cache else (call.q, call.k, call.v)
        dtype = q.dtype if over_cache else _dtype_of(q, k, v, getattr(call, "sink", None))
        given: dict[str, Any] = {
            "op": op, "dtype": dtype, "heads": q.shape[-2], "heads_k": k.shape[-2],
            "head_dim": q.shape[-1], "head_dim_v": v.shape[-1], "causal": call.is_causal,
            "window_size": (call.window_size_left, call.window_size_right),
            "softmax_scale": 1.0 if call.softmax_scale is None else call.softmax_scale,
            "softcap": call.softcap > 0, "alibi": call.alibi_slopes is not None,
            **_sequences(call, op, q, k),
        }  # fmt: skip
        if over_cache:
            return cls(**given | _of_cache(call, q, k, v))
        given |= {
            "unaligned": _are_unaligned(dtype, q, k, v), "dropout": call.dropout_p > 0,
            "lists": call.tile_lists is not None and q.numel() > 0 and k.numel() > 0,
            "allow_tf32": switches.allow_tf32(q),
        }  # fmt: skip
        if op == "bwd":
            deterministic = switches.deterministic(call.deterministic)
            return cls(**given, deterministic=deterministic, sink=call.sink is not None)
        return cls(
            **given, seqused_q=getattr(call, "seqused_q", None) is not None,
            return_row_max=call.return_row_max, return_softmax=call.return_softmax,
        )  # fmt: skip

    def __str__(self) -> str:
        """Sizes as the benchmarks write them, then options that differ from their defaults."""
        name = str(self.dtype).removeprefix("torch.")
        heads_k, seqlen_k = self.heads_k or self.heads, self._seqlen_k
        sizes = (
            f"{self.op} {name} b{self.batch} h{self.heads}/{heads_k} q{self.seqlen_q} "
            f"k{seqlen_k} d{self.head_dim}/{self.head_dim_v or self.head_dim}"
        )
        numbers = ("window_size", "page_size", "num_splits", "split_size")
        defaults = {f.name: f.default for f in fields(self)}
        rest = [name for name in _FLAGS if getattr(self, name)]
        if self.cache_dtype is not None:
            rest.append(f"cache={_EIGHT_BITS[self.cache_dtype]}")
        rest += [
            f"{name}={getattr(self, name)}".replace(" ", "")
            for name in numbers
            if getattr(self, name) != defaults[name]
        ]
        return " ".join([sizes, *rest])

    @property
    def _seqlen_k(self) -> int:
        return self.seqlen_q if self.seqlen_k is None else self.seqlen_k

    @property
    def reasons_to_widen(self) -> tuple[str, ...]:
        """Why the ops of e4m3 inputs do not compute a call with fp8 q and k on any device, so that
        it is widened to 16 bits; none if they do, or if the dtype is no fp8."""
        if self.dtype not in FP8_DTYPES:
            return ()
        reasons = [] if self.dtype == _E4M3 else [f"q has dtype {self.dtype}"]
        if self.op != "fwd":
            reasons.append(f"op is {self.op}")
        reasons += [f"{given} is given" for name, given in _WIDENING.items() if getattr(self, name)]
        return tuple(reasons)

    @property
    def is_widened(self) -> bool:
        """Whether there are :attr:`reasons_to_widen`."""
        return bool(self.reasons_to_widen)

    def request(self) -> dict[str, Any]:
        """The fields for the library, by name; those with default values are left out.

        Raises:
            ValueError: a field belongs to another op.
        """
        left, right = self.window_size
        given = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        for name in given:
            ops = _OF_OPS.get(name, OPS)
            if self.op not in ops:
                take = f"{ops[0]} takes" if len(ops) == 1 else f"{' and '.join(ops)} take"
                raise ValueError(f"{name} is {given[name]!r} and op {self.op!r}; only {take} it")
        for name in ("window_size", "causal", "allow_tf32"):
            given.pop(name, None)
        given["dtype"] = _SIXTEEN_BITS.get(self.dtype, "bf16" if self.is_widened else "e4m3")
        if self.dtype == torch.float32:
            given["dtype"] = "tf32" if self.allow_tf32 else "tf32x3"
        if self.cache_dtype is not None:
            given["cache_dtype"] = _EIGHT_BITS[self.cache_dtype]
        given["window_size_left"], given["window_size_right"] = left, 0 if self.causal else right
        return given


def _dtype_of(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> torch.dtype:
    """q's dtype; if it is fp8, and no field says why the call is widened, the dtype after that."""
    if q.dtype not in FP8_DTYPES:
        return q.dtype
    has_gradient = sink is not None and sink.requires_grad and torch.is_grad_enabled()
    if q.dtype == k.dtype == v.dtype and not has_gradient and not hasattr(q, "placements"):
        return q.dtype
    return v.dtype if v.dtype in _SIXTEEN_BITS else torch.bfloat16


def _are_unaligned(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """The field ``unaligned``. What is widened has new memory; v of e4m3 may lie anywhere."""
    read = [x for x in (q, k, v) if x.dtype == dtype]
    return not all(map(_is_aligned, read[:2] if dtype == _E4M3 else read))


def _is_aligned(x: Tensor) -> bool:
    """Whether every vector of x begins on a 16-byte boundary."""
    element = x.element_size()
    first = x.storage_offset() * element if internals.is_fake(x) else x.data_ptr()
    steps = [n for n, rows in zip(x.stride()[:-1], x.shape[:-1], strict=True) if rows > 1]
    bytes_at = [first, *(step * element for step in steps)]
    return x.stride(-1) == 1 and all(at % 16 == 0 for at in bytes_at)


def _sequences(call: Any, op: str, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Lengths of a call, dense or packed, as fields of a Problem."""
    offsets, table = getattr(call, "cu_seqlens_q", None), getattr(call, "block_table", None)
    sizes: dict[str, Any] = {"batch": batch_of(call), "seqlen_q": longest_queries(call)}
    if offsets is not None:
        sizes |= {"varlen": True, "total_q": len(q)}
    if table is not None:
        longest = cache_capacity(k, table) if op == "decode" else call.max_seqlen_k
        blocks = None if op == "decode" else table.shape[1]
        return sizes | {"seqlen_k": longest, "page_size": k.shape[1], "max_blocks": blocks}
    if op == "decode" or offsets is None:
        return sizes | {"seqlen_k": k.shape[1]}
    return sizes | {"seqlen_k": call.max_seqlen_k, "total_k": len(k)}


def _of_cache(call: Any, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> dict[str, Any]:
    """The fields of a Problem that only calls over a cache have."""
    rotary = getattr(call, "rotary_cos", None) is not None
    read = (k_cache, v_cache) if rotary else (q, k_cache, v_cache)
    new = getattr(call, "k", None)
    return {
        "unaligned": not all(map(_is_aligned, read)), "rotary": rotary,
        "append": new is not None and new.numel() > 0,
        "cu_seqlens_k_new": getattr(call, "cu_seqlens_k_new", None) is not None,
        "lengths": call.cache_seqlens is not None, "leftpad": call.cache_leftpad is not None,
        "cache_batch_idx": call.cache_batch_idx is not None,
        "num_splits": call.num_splits, "split_size": call.split_size,
        "cache_dtype": k_cache.dtype if k_cache.dtype in _EIGHT_BITS else None,
    }  # fmt: skip


_OF_OPS = {  # fields that not every op has
    **dict.fromkeys(("seqused_q", "return_row_max", "return_softmax", "max_blocks"), ("fwd",)),
    "page_size": ("fwd", "decode"),
    "lists": ("fwd", "bwd"),
    **dict.fromkeys(("deterministic", "fp32_gradients", "sink"), ("bwd",)),
    **dict.fromkeys(
        (
            "lengths", "leftpad", "append", "rotary", "cache_batch_idx", "cu_seqlens_k_new",
            "num_splits", "split_size", "cache_dtype",
        ),
        ("decode",),
    ),
}  # fmt: skip
_MAY_BE_NONE = ("heads_k", "seqlen_k", "head_dim_v", "total_q", "total_k", "max_blocks")
_FLAGS = tuple(field.name for field in fields(Problem) if field.type == "bool")
