"""``kernels.Problem``: a call of attention in sizes, of which kernels are planned."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.fp8 import DTYPES as FP8_DTYPES
from flash_cute.validate import INT64_MAX

OPS = ("fwd", "bwd", "decode")
_SIXTEEN_BITS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Problem:
    """A call in sizes. ``None`` is: as many heads_k as heads, seqlen_k as seqlen_q, head_dim_v as
    head_dim, and for totals batch times length.

    ``op`` "decode" is :func:`flash_cute.flash_attn_with_kvcache`, with seqlen_k the capacity of the
    cache, and varlen calls over pages in 16 bits. fp8 is planned as the 16 bits that it is widened
    to: see :func:`flash_cute.flash_attn_func`.

    Raises:
        ValueError: a size is no int, negative, or beyond int64; heads are no multiple of heads_k;
            the op or the dtype is unknown; a flag is no bool, window_size not two ints from -1 on,
            or softmax_scale no number that fp32 holds; or num_splits and split_size are both given.
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
    softmax_scale: float = 1.0  # only its sign counts
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    varlen: bool = False
    total_q: int | None = None
    total_k: int | None = None
    unaligned: bool = False  # vectors of q, k and v do not all begin on 16-byte boundaries
    deterministic: bool = False  # bwd
    fp32_gradients: bool = False  # bwd: of 16-bit inputs, in buffers of bwd.out
    allow_tf32: bool = False  # fp32
    page_size: int = 0  # decode, as what follows; 0: no pages
    lengths: bool = False  # whether the device alone knows how long sequences are
    leftpad: bool = False
    num_splits: int = 0
    split_size: int = 0

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op is {self.op!r}; expected one of {', '.join(OPS)}")
        known = (*_SIXTEEN_BITS, torch.float32, *FP8_DTYPES)
        if self.dtype not in known:
            raise ValueError(
                f"dtype {self.dtype} has no CUDA kernel; expected {', '.join(map(str, known))}"
            )
        least = {"heads": 1, "heads_k": 1, "head_dim": 1, "head_dim_v": 1}
        sizes = ("batch", "seqlen_q", "seqlen_k", "total_q", "total_k", "page_size", "num_splits",
                 "split_size", *least)  # fmt: skip
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
        """Of dense q (batch, seqlen_q, heads, dim), k and v; other fields are ``options``."""
        return cls(
            op, q.dtype, len(q), q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3],
            v.shape[3], unaligned=not all(map(_is_aligned, (q, k, v))), **options,
        )  # fmt: skip

    @classmethod
    def of_packed(
        cls, q: Tensor, k: Tensor, v: Tensor, sequences: tuple[Any, ...], op: str = "fwd",
        **options: Any,
    ) -> Problem:  # fmt: skip
        """Of packed q (total_q, heads, dim), k and v, with ``sequences`` what the op varlen_fwd
        takes behind them. Over pages in 16 bits it is a call over a cache, but where vectors do
        not begin on 16-byte boundaries: keys are then laid out anew."""
        cu_seqlens_q, _, longest_q, longest_k, used_q, *_ = sequences
        block_table = sequences[7] if len(sequences) > 7 else None
        sizes: dict[str, Any] = {
            "dtype": q.dtype, "batch": len(cu_seqlens_q) - 1, "heads": q.shape[1],
            "heads_k": k.shape[-2], "seqlen_q": longest_q, "head_dim": q.shape[2],
            "head_dim_v": v.shape[-1], "varlen": True, "total_q": len(q),
            "unaligned": not all(map(_is_aligned, (q, k, v))), **options,
        }  # fmt: skip
        if block_table is None:
            return cls(op, seqlen_k=longest_k, total_k=len(k), **sizes)
        page_size, capacity = k.shape[1], block_table.shape[1] * k.shape[1]
        is_gathered = used_q is not None or sizes.get("dropout") or sizes["unaligned"]
        if q.dtype in _SIXTEEN_BITS and not is_gathered:
            return cls("decode", seqlen_k=capacity, page_size=page_size, lengths=True, **sizes)
        return cls(op, seqlen_k=min(longest_k, capacity), **sizes)

    def __str__(self) -> str:
        """Sizes as the benchmarks write them, then what differs from a plain call."""
        name = str(self.dtype).removeprefix("torch.")
        heads_k, seqlen_k = self.heads_k or self.heads, self._seqlen_k
        sizes = (
            f"{self.op} {name} b{self.batch} h{self.heads}/{heads_k} q{self.seqlen_q} "
            f"k{seqlen_k} d{self.head_dim}/{self.head_dim_v or self.head_dim}"
        )
        flags = ("causal", "softcap", "alibi", "dropout", "varlen", "unaligned", "deterministic",
                 "fp32_gradients", "allow_tf32", "lengths", "leftpad")  # fmt: skip
        numbers = ("window_size", "page_size", "num_splits", "split_size")
        defaults = {f.name: f.default for f in fields(self)}
        rest = [name for name in flags if getattr(self, name)]
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
    def is_widened(self) -> bool:
        """Whether q and k are fp8, which no kernel computes in yet."""
        return self.dtype in FP8_DTYPES

    def request(self) -> dict[str, Any]:
        """As the library takes it: what is not a default, by name."""
        left, right = self.window_size
        given = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        for name in ("window_size", "causal", "allow_tf32"):
            given.pop(name, None)
        given["dtype"] = _SIXTEEN_BITS.get(self.dtype, "bf16")
        if self.dtype == torch.float32:
            given["dtype"] = "tf32" if self.allow_tf32 else "tf32x3"
        given["window_size_left"], given["window_size_right"] = left, 0 if self.causal else right
        return given


def _is_aligned(x: Tensor) -> bool:
    """Whether every vector of x begins on a 16-byte boundary."""
    element = x.element_size()
    first = x.storage_offset() * element if internals.is_fake(x) else x.data_ptr()
    bytes_at = [first, *(stride * element for stride in x.stride()[:-1])]
    return x.stride(-1) == 1 and all(at % 16 == 0 for at in bytes_at)


_MAY_BE_NONE = ("heads_k", "seqlen_k", "head_dim_v", "total_q", "total_k")
_FLAGS = tuple(field.name for field in fields(Problem) if field.type == "bool")
