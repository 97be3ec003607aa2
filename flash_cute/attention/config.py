"""The configs of attention modules: sizes, patterns and options."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from enum import Enum
from typing import Any

import torch

from flash_cute.call import validate
from flash_cute.call.validate import options as validate_options
from flash_cute.core.multihead import check_heads
from flash_cute.hardware.devices import named_device
from flash_cute.ops.typed import FwdCall
from flash_cute.sparse.estimate import STRIDES
from flash_cute.sparse.patterns import FOLLOW_CONTENT, SparsePattern


class AttentionPatterns(Enum):
    """Which keys a query sees, and on which devices they are.

    FULL and CAUSAL run on one device, RING and CONTEXT_PARALLEL on several. SPARSE leaves out most
    pairs of tokens: :class:`SparseAttentionConfig` says which.
    """

    FULL = "full"
    CAUSAL = "causal"
    RING = "ring"
    CONTEXT_PARALLEL = "context_parallel"
    SPARSE = "sparse"


@dataclass(frozen=True)
class AttentionConfig:
    """The sizes and options of an attention module; every field is checked when it is made.

    Args:
        d_model: width of tokens, a multiple of ``num_heads``.
        num_heads: heads of queries.
        pattern: an :class:`AttentionPatterns`, or its value: "full", "causal", ...
        num_kv_heads: heads of keys and values, which divide ``num_heads``; None means as many (GQA,
            arXiv 2305.13245).
        dropout: probability that an attention weight is dropped, in training alone.
        bias: whether both projections have one.
        window_size: (left, right): how many keys before and behind its own a query sees; -1 is
            unbounded. CAUSAL makes right 0.
        softmax_scale: factor of q k^T; None means ``head_dim ** -0.5``.
        softcap: c > 0 replaces scores s by ``c * tanh(s / c)``; 0 is off.
        deterministic: backward is bitwise repeatable. Forward always is.
        device: of the parameters; None is torch's default.
        dtype: of the parameters, fp16, bf16, fp32 or fp64; None is torch's default.
        context_parallel_size: devices, or ranks, that share a sequence; for CONTEXT_PARALLEL only.
        max_sequence_length: longer sequences are refused; for RING only.
        embed_dim: another name for ``d_model``, as an argument only; the attribute is ``d_model``.

    Raises:
        TypeError, ValueError: names the field, what was given and what is supported.

    Example::

        import dataclasses

        from flash_cute.attention import AttentionConfig, AttentionPatterns

        config = AttentionConfig(d_model=512, num_heads=8, pattern=AttentionPatterns.CAUSAL)
        longer = dataclasses.replace(config, num_kv_heads=2, window_size=(1023, 0))
    """

    d_model: int = 0
    num_heads: int = 0
    pattern: AttentionPatterns = AttentionPatterns.FULL
    num_kv_heads: int | None = None
    dropout: float = 0.0
    bias: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    deterministic: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    context_parallel_size: int = 1
    max_sequence_length: int = 1_000_000
    embed_dim: InitVar[int | None] = None

    def __post_init__(self, embed_dim: int | None) -> None:
        if embed_dim is not None:
            if self.d_model not in (0, embed_dim):
                raise ValueError(
                    f"d_model is {self.d_model} and embed_dim {embed_dim}; they are two names of "
                    "one field: give one"
                )
            object.__setattr__(self, "d_model", embed_dim)
        object.__setattr__(self, "pattern", _pattern(self.pattern))
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        check_heads(self.d_model, self.num_heads, kv_heads, self.dropout)
        if not isinstance(self.bias, bool):
            raise TypeError(f"bias is {type(self.bias).__name__}; expected a bool")
        if self.dtype is not None and self.dtype not in validate.DTYPES:
            supported = ", ".join(map(str, validate.DTYPES))
            raise TypeError(f"dtype is {self.dtype}; supported: None, {supported}")
        if self.device is not None:
            checked_device("device", self.device)
        for name in ("context_parallel_size", "max_sequence_length"):
            if isinstance(x := getattr(self, name), bool) or not isinstance(x, int):
                raise TypeError(f"{name} is {type(x).__name__}; expected an int")
            if x < 1:
                raise ValueError(f"{name} is {x}; expected at least 1")
        q = torch.empty(1, 1, self.num_heads, self.head_dim, device="meta")
        window = validate_options.sides(self.window_size)
        call = FwdCall(q, q, q, self.softmax_scale, False, *window, self.softcap, None, None)
        call = call._replace(dropout_p=self.dropout, deterministic=self.deterministic)
        validate_options.check(call, 1)

    @property
    def head_dim(self) -> int:
        """Dims of a head."""
        return self.d_model // self.num_heads

    def score(self) -> dict[str, Any]:
        """The options of :func:`flash_cute.flash_attn_func` from the config, without dropout."""
        return {
            "causal": self.pattern is AttentionPatterns.CAUSAL,
            "window_size": tuple(self.window_size),
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "deterministic": self.deterministic,
        }


@dataclass(frozen=True)
class FP8AttentionConfig(AttentionConfig):
    """An :class:`AttentionConfig` whose q, k and v are rounded to fp8.

    Hopper has kernels for e4m3 in 16-bit modules. What training keeps of q, k and v is fp8
    (:class:`flash_cute.attention.FP8Attention`).

    Args:
        format: "e4m3" (4 bits of exponent, 3 of mantissa, up to 448) or "e5m2" (5 and 2, up to
            57344; arXiv 2209.05433); or an Enum with such a value.
        scaling: "tensor": one scale each for q, k and v in a call; "head": one for each head.

    The other arguments are :class:`AttentionConfig`'s.

    Raises:
        TypeError, ValueError: names the field, what was given and what is supported.

    Example::

        from flash_cute.attention import FP8AttentionConfig, create_attention

        attention = create_attention(FP8AttentionConfig(d_model=512, num_heads=8, format="e5m2"))
    """

    format: str = "e4m3"
    scaling: str = "tensor"

    def __post_init__(self, embed_dim: int | None) -> None:
        super().__post_init__(embed_dim)
        object.__setattr__(self, "format", getattr(self.format, "value", self.format))
        for name, supported in (("format", ("e4m3", "e5m2")), ("scaling", ("tensor", "head"))):
            if (given := getattr(self, name)) not in supported:
                raise ValueError(f"{name} is {given!r}; supported: {', '.join(supported)}")


@dataclass(frozen=True)
class SparseAttentionConfig(AttentionConfig):
    """An :class:`AttentionConfig` of pattern SPARSE, and which pairs of tokens it leaves out.

    Args:
        sparsity_ratio: share of the visible (query, key) pairs that is left out, 0 to 0.95; 0 is
            exact attention.
        sparse_pattern: a :class:`flash_cute.attention.SparsePattern`, or its value.
        causal: each token sees itself and those before it.
        threshold: in (0, 1]: keep the fewest blocks of each row that hold this share of its
            attention, instead of a ratio; for DYNAMIC_THRESHOLD and LEARNED only. A ratio fixes
            the cost, a threshold bounds the loss.
        stride: for DYNAMIC_THRESHOLD's estimate, a power of two up to 64: 8 costs twice as much as
            16, and finds more isolated keys.
        seed: for RANDOM: the same blocks in every call.

    The other arguments are :class:`AttentionConfig`'s; ``window_size`` must be unbounded.

    Raises:
        TypeError, ValueError: names the field, what was given and what is supported.
        NotImplementedError: a window.

    Example::

        from flash_cute.attention import SparseAttentionConfig, create_attention

        config = SparseAttentionConfig(512, 8, sparsity_ratio=0.8, sparse_pattern="local_global")
        attention = create_attention(config)
    """

    pattern: AttentionPatterns = AttentionPatterns.SPARSE
    sparsity_ratio: float = 0.9
    sparse_pattern: SparsePattern = SparsePattern.DYNAMIC_THRESHOLD
    causal: bool = False
    threshold: float | None = None
    stride: int = 16
    seed: int = 0

    def __post_init__(self, embed_dim: int | None) -> None:
        super().__post_init__(embed_dim)
        if self.pattern is not AttentionPatterns.SPARSE:
            raise ValueError(f"pattern is {self.pattern}; expected {AttentionPatterns.SPARSE}")
        try:
            object.__setattr__(self, "sparse_pattern", SparsePattern(self.sparse_pattern))
        except ValueError:
            supported = ", ".join(map(str, SparsePattern))
            raise ValueError(
                f"sparse_pattern is {self.sparse_pattern!r}; supported: {supported}"
            ) from None
        if tuple(self.window_size) != (-1, -1):
            raise NotImplementedError(
                f"window_size is {self.window_size}, which sparse patterns do not have; leave it "
                "out, or use sparse_pattern LOCAL_GLOBAL"
            )
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal is {type(self.causal).__name__}; expected a bool")
        self._check_ratio()
        self._check_options()

    def _check_ratio(self) -> None:
        _check_number("sparsity_ratio", self.sparsity_ratio)
        if not 0 <= self.sparsity_ratio <= 0.95:
            raise ValueError(f"sparsity_ratio is {self.sparsity_ratio}; expected 0 to 0.95")
        if self.threshold is None:
            return
        _check_number("threshold", self.threshold)
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; expected a share in (0, 1]")
        if self.sparse_pattern not in FOLLOW_CONTENT:
            supported = ", ".join(map(str, FOLLOW_CONTENT))
            raise ValueError(
                f"threshold is given with sparse_pattern {self.sparse_pattern}; use {supported}"
            )
        if self.sparsity_ratio != SparseAttentionConfig.sparsity_ratio:
            raise ValueError(
                f"sparsity_ratio is {self.sparsity_ratio} and threshold {self.threshold}; give one "
                "of them"
            )

    def _check_options(self) -> None:
        for name, pattern in (
            ("stride", SparsePattern.DYNAMIC_THRESHOLD), ("seed", SparsePattern.RANDOM),
        ):  # fmt: skip
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int):
                raise TypeError(f"{name} is {type(given).__name__}; expected an int")
            if given != getattr(SparseAttentionConfig, name) and self.sparse_pattern != pattern:
                raise ValueError(
                    f"{name} is {given} with sparse_pattern {self.sparse_pattern}; only {pattern} "
                    "takes it"
                )
        if self.stride not in STRIDES:
            raise ValueError(f"stride is {self.stride}; supported: {', '.join(map(str, STRIDES))}")

    def score(self) -> dict[str, Any]:
        return super().score() | {"causal": self.causal}


def _check_number(name: str, given: Any) -> None:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name} is {type(given).__name__}; expected a number")


def checked_device(name: str, given: torch.device | str | int) -> torch.device:
    """A device that is available to torch, or "meta".

    Raises:
        TypeError, ValueError: names the argument.
    """
    device = named_device(name, given)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{name} is {device}; torch has {torch.cuda.device_count()} GPUs here")
    return device


def _pattern(pattern: Any) -> AttentionPatterns:
    try:
        return AttentionPatterns(pattern)
    except ValueError:
        supported = ", ".join(map(str, AttentionPatterns))
        raise ValueError(f"pattern is {pattern!r}; supported: {supported}") from None
