"""Cases: the shapes that are measured, the work in them, and their inputs."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}

# What a case may ask for besides its mask: options of flash_cute's ops. ALiBi's slopes and the
# random numbers of dropout are tensors, which make_inputs adds.
FEATURES: dict[str, dict[str, Any]] = {
    "dropout0.1": {"dropout_p": 0.1},
    "alibi": {},
    "window1024": {"window_size_left": 1024},
    "softcap30": {"softcap": 30.0},
    "deterministic": {"deterministic": True},
}
# What a case of decoding may ask for: pages of 16 rows in a random order; lengths of sequences in a
# tensor; a token that joins the cache, with rotary embedding, and with such lengths.
CACHE_FEATURES = ("pages16", "lengths", "append")

_NAME = re.compile(
    rf"({'|'.join(DTYPES)}) b(\d+) h(\d+)/(\d+) q(\d+) k(\d+) d(\d+)/(\d+) (full|causal)"
    rf"(?: \+({'|'.join(map(re.escape, (*FEATURES, *CACHE_FEATURES)))}))?"
)


@dataclass(frozen=True)
class Case:
    """One attention problem: q (batch, seqlen_q, heads, dim), v (batch, seqlen_k, heads_k, dim_v).

    A causal case of fewer queries than keys is a chunk of a prompt: its queries are those of the
    last keys, which lie in a cache. `feature` is "", one of FEATURES, or over a cache (with one
    query, or a chunk) one of CACHE_FEATURES. Raises ValueError if heads is no multiple of heads_k,
    for a causal case of more queries than keys, for a window that is not causal, for lengths of a
    chunk's cache or a token that joins it, and for one of FEATURES over a chunk.
    """

    dtype: str
    batch: int
    heads: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    dim: int
    dim_v: int
    causal: bool
    feature: str = ""

    def __post_init__(self) -> None:
        if self.heads % self.heads_k:
            raise ValueError(f"heads {self.heads} is no multiple of heads_k {self.heads_k}")
        if self.causal and self.seqlen_q > self.seqlen_k:
            raise ValueError(f"a causal case needs a key for each query, got {self}")
        if self.window is not None and not self.causal:
            raise ValueError(f"a window needs a causal case, got {self}")
        if self.feature == "pages16" and not self.cached:
            raise ValueError(f"pages16 needs one query or a chunk, got {self}")
        if self.feature in ("lengths", "append") and self.seqlen_q != 1:
            raise ValueError(f"{self.feature} needs one query, got {self}")
        if self.feature in FEATURES and self.chunk:
            raise ValueError(f"{self.feature} needs as many queries as keys, got {self}")

    @classmethod
    def parse(cls, name: str) -> Case:
        """The case that `str(case)` wrote, e.g. "bf16 b4 h32/8 q4096 k4096 d128/128 causal"."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"no case: {name!r}, expected {_NAME.pattern}")
        dtype, *sizes, mask, feature = match.groups()
        batch, heads, heads_k, seqlen_q, seqlen_k, dim, dim_v = map(int, sizes)
        return cls(
            dtype, batch, heads, heads_k, seqlen_q, seqlen_k, dim, dim_v,
            causal=mask == "causal", feature=feature or "",
        )  # fmt: skip

    @property
    def seed(self) -> int:
        """A number of the case's own, whatever else is measured."""
        return zlib.crc32(str(self).encode())

    def __str__(self) -> str:
        return (
            f"{self.dtype} b{self.batch} h{self.heads}/{self.heads_k} q{self.seqlen_q} "
            f"k{self.seqlen_k} d{self.dim}/{self.dim_v} {'causal' if self.causal else 'full'}"
            f"{self.feature and ' +' + self.feature}"
        )

    @property
    def chunk(self) -> bool:
        """Whether the queries are the last part of a prompt."""
        return self.causal and self.seqlen_q < self.seqlen_k

    @property
    def cached(self) -> bool:
        """Whether K and V are a cache."""
        return self.seqlen_q == 1 or self.chunk

    @property
    def beside(self) -> Case:
        """What a case with a feature is measured beside: one without, but a token that joins beside
        lengths."""
        return replace(self, feature="lengths" if self.feature == "append" else "")

    @property
    def window(self) -> int | None:
        """How many keys before its own a query sees; None: all."""
        return FEATURES.get(self.feature, {}).get("window_size_left")

    @property
    def directions(self) -> tuple[str, ...]:
        """What can be measured: caches and fp8 are forward only, determinism is backward's."""
        if self.feature == "deterministic":
            return ("bwd",)
        return ("fwd",) if self.cached or self.dtype == "e4m3" else ("fwd", "bwd")

    @property
    def metric(self) -> str:
        """The unit of `rate`: decode is bound by reading K and V, everything else by arithmetic."""
        return "GB/s" if self.seqlen_q == 1 else "TFLOP/s"

    def flops(self, direction: str) -> float:
        """4·b·h·pairs·mean(dim, dim_v), 2.5 times for "bwd".

        Pairs are sq·sk, less sq²/2 when causal and the pairs that a window w hides: (sk - w)²/2.
        """
        pairs = self.seqlen_q * (self.seqlen_k - (0.5 * self.seqlen_q if self.causal else 0.0))
        if self.window is not None:
            pairs -= max(self.seqlen_k - self.window, 0) ** 2 / 2
        forward = 2.0 * self.batch * self.heads * pairs * (self.dim + self.dim_v)
        return forward * (2.5 if direction == "bwd" else 1.0)

    def kv_bytes(self) -> int:
        """Bytes of K and V together."""
        elements = self.batch * self.seqlen_k * self.heads_k * (self.dim + self.dim_v)
        return elements * DTYPES[self.dtype].itemsize

    @property
    def brief(self) -> bool:
        """Whether kernels may take less time than launching them: replays of a graph are timed."""
        return self.cached or self.flops("fwd") < 3e10

    @property
    def calls_a_graph(self) -> int:
        """Calls in such a graph: a model decodes a token in one graph, with a call a layer."""
        return 8 if self.metric == "GB/s" else 1

    def rate(self, direction: str, ms: float) -> float:
        """Throughput of one call that took `ms` milliseconds, in units of `metric`."""
        if self.metric == "GB/s":
            return self.kv_bytes() / ms / 1e6
        return self.flops(direction) / ms / 1e9


def _square(
    dims: tuple[int, ...], shapes: tuple[tuple[int, int], ...], dtype: str = "bf16"
) -> list[Case]:
    """MHA of hidden size 2048 over (batch, seqlen) shapes, full and causal."""
    return [
        Case(dtype, batch, 2048 // dim, 2048 // dim, seqlen, seqlen, dim, dim, causal)
        for dim in dims
        for causal in (False, True)
        for batch, seqlen in shapes
    ]


def _featured(shapes: tuple[tuple[int, int, int], ...]) -> list[Case]:
    """Each feature once over (dim, batch, seqlen) shapes, the window causal, the others full."""
    return [
        Case("bf16", batch, 2048 // dim, 2048 // dim, seqlen, seqlen, dim, dim, causal, feature)
        for dim, batch, seqlen in shapes
        for feature in ("", *FEATURES)
        for causal in (feature == "window1024",)
    ]


def _grouped() -> list[Case]:
    """Several query heads a kv head, under each mask: their order of work differs."""
    shapes = [(4, 32, 8, 4096, 128), (1, 64, 8, 2048, 128), (1, 64, 8, 8192, 128),
              (1, 64, 8, 32768, 128), (4, 32, 8, 4096, 64), (4, 16, 4, 4096, 256)]  # fmt: skip
    return [
        Case("bf16", batch, heads, heads_k, seqlen, seqlen, dim, dim, causal, feature)
        for batch, heads, heads_k, seqlen, dim in shapes
        for causal, feature in ((False, ""), (True, ""), (True, "window1024"))
    ]


def _decode() -> list[Case]:
    """Decode of one token: K and V of each case are larger than the L2 of an H200."""
    sizes = {
        (32, 8): [(1, 32768), (1, 131072), (4, 8192), (16, 8192), (64, 4096), (128, 2048),
                  (128, 8192)],
        (64, 8): [(1, 32768), (16, 8192), (128, 4096)],
        (32, 32): [(1, 16384), (16, 8192), (128, 2048)],
    }  # fmt: skip
    return [
        Case("bf16", batch, heads, heads_k, 1, seqlen_k, dim, dim, causal=False)
        for dim in (128, 64)
        for (heads, heads_k), pairs in sizes.items()
        for batch, seqlen_k in pairs
    ] + [
        Case("bf16", batch, 32, 8, 1, seqlen_k, 128, 128, False, feature)
        for feature in CACHE_FEATURES
        for batch, seqlen_k in [(1, 32768), (16, 8192), (128, 8192)]
    ]


def _decode_short() -> list[Case]:
    """Decode of one token over caches that an H200's L2 holds: latency counts, not bandwidth."""
    sizes = ((1, 2048), (1, 8192), (4, 2048), (8, 1024), (16, 512))
    return [
        Case("bf16", batch, 32, 8, 1, seqlen_k, dim, dim, causal=False)
        for dim in (128, 64)
        for batch, seqlen_k in sizes
    ]


def _few() -> list[Case]:
    """One sequence of so few heads, queries or keys that a GPU has SMs without a tile."""
    square = [(16, 16, 512, 128), (16, 16, 1024, 128), (32, 32, 512, 64), (8, 8, 1024, 256),
              (32, 8, 1024, 128), (32, 8, 2048, 128), (32, 1, 4096, 128)]  # fmt: skip
    chunks = [(64, 32768), (128, 8192), (128, 32768), (256, 32768)]
    return [
        Case("bf16", 1, heads, heads_k, seqlen, seqlen, dim, dim, causal)
        for heads, heads_k, seqlen, dim in square
        for causal in (False, True)
    ] + [
        Case("bf16", 1, 32, 8, seqlen_q, seqlen_k, 128, 128, False) for seqlen_q, seqlen_k in chunks
    ]


def _chunks() -> list[Case]:
    """Chunks of prompts over caches, dense and in pages of 16 rows."""
    shapes = [(8, seqlen_q, 8192, 32, 8, 128) for seqlen_q in (4, 8, 16, 32, 64, 128, 256, 512)]
    shapes += [
        (1, seqlen_q, 32768, 32, 8, 128) for seqlen_q in (4, 16, 32, 64, 128, 256, 512, 2048)
    ]
    shapes += [(1, 128, 2048, 32, 8, 128), (4, 512, 2048, 32, 8, 128), (8, 16, 8192, 64, 8, 128),
               (32, 16, 2048, 32, 8, 128), (8, 16, 8192, 32, 32, 128), (64, 2, 8192, 32, 8, 128),
               (8, 32, 8192, 32, 8, 64)]  # fmt: skip
    return [
        Case("bf16", batch, heads, heads_k, seqlen_q, seqlen_k, dim, dim, True, feature)
        for batch, seqlen_q, seqlen_k, heads, heads_k, dim in shapes
        for feature in ("", "pages16")
    ]


def _deterministic() -> list[Case]:
    """Sums of dQ in a fixed order, each beside the default."""
    return [
        Case("bf16", batch, heads, heads_k, seqlen, seqlen, dim, dim_v, causal, "deterministic")
        for dim, dim_v, heads, heads_k in (
            (64, 64, 32, 32), (128, 128, 16, 16), (128, 128, 32, 8), (192, 192, 8, 8),
            (192, 128, 8, 8), (256, 256, 8, 8),
        )
        for batch, seqlen in ((16, 1024), (4, 4096))
        for causal in (False, True)
    ]  # fmt: skip


SUITES: dict[str, list[Case]] = {
    "smoke": [Case.parse("bf16 b1 h4/2 q64 k64 d64/64 causal")],
    "quick": [
        *_square((64, 128), ((16, 1024), (4, 4096))),
        Case.parse("bf16 b4 h32/8 q4096 k4096 d128/128 causal"),
    ],
    "train": [
        *_square((64, 128, 256), ((16, 1024), (4, 4096), (2, 8192), (1, 16384))),
        Case.parse("bf16 b4 h32/8 q4096 k4096 d128/128 causal"),
        Case.parse("bf16 b1 h64/8 q2048 k2048 d128/128 full"),
        Case.parse("bf16 b1 h64/8 q8192 k8192 d128/128 full"),
        Case.parse("bf16 b1 h64/8 q32768 k32768 d128/128 full"),
        Case.parse("bf16 b1 h64/8 q32768 k32768 d128/128 causal"),
        Case.parse("fp16 b4 h16/16 q4096 k4096 d128/128 causal"),
    ],
    "short": _square((64, 128, 256), ((32, 512), (8, 2048))),
    "few": _few(),
    "grouped": _grouped(),
    "decode": _decode(),
    "decode_short": _decode_short(),
    "chunks": _chunks(),
    "deterministic": _deterministic(),
    "features": _featured(((128, 4, 4096), (64, 4, 4096), (128, 1, 16384))),
    "fp8": _square((64, 128, 256), ((4, 4096), (1, 16384)), "e4m3"),
}


@dataclass(frozen=True)
class Inputs:
    """The tensors of one case, shared by all candidates; dout has out's shape.

    `options` are its feature, as arguments of flash_cute's ops.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)


def make_inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    """Standard normal tensors in the case's dtype (dout of an fp8 case is bf16)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        shape = (case.batch, seqlen, heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(DTYPES[case.dtype])

    dout = normal(case.seqlen_q, case.heads, case.dim_v)
    return Inputs(
        q=cast(normal(case.seqlen_q, case.heads, case.dim)),
        k=cast(normal(case.seqlen_k, case.heads_k, case.dim)),
        v=cast(normal(case.seqlen_k, case.heads_k, case.dim_v)),
        dout=dout if case.dtype == "e4m3" else cast(dout),
        options=_options(case, device, seed),
    )


def _options(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    options = dict(FEATURES.get(case.feature, {}))
    if case.feature == "alibi":  # the slopes of its paper, arXiv 2108.12409
        exponents = torch.arange(1, case.heads + 1, device=device) * (-8.0 / case.heads)
        options["alibi_slopes"] = torch.exp2(exponents)
    if "dropout_p" in options:
        options["rng"] = torch.tensor([seed, 0], device=device)
    return options
