"""Random cases of attention that nobody tuned for: drawn from a seed, named, with their inputs."""

from __future__ import annotations

import math
import random
import re
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .suites import FEATURES, Case, Inputs

GROUPS = ("dense-forward", "dense-backward", "packed-forward", "packed-backward", "decode")
# (heads, heads_k, dim, mask): Qwen's, Gemma's.
MODELS = ((24, 2, 256, "causal"), (16, 8, 256, "window1024"))
LIKELY_DIMS = (64, 72, 80, 96, 128, 192, 256)
DIMS = range(40, 257, 8)
LENGTHS = (64, 65536)
GROUP_SIZES = (1, 2, 4, 5, 8, 16)  # query heads a kv head
MOST_DOCUMENTS, MOST_QUERIES, MOST_HEADS = 24, 16, 128
MOST_FLOPS = 3e12  # some ms on a Hopper GPU
MOST_BYTES = 2**31  # of q, k, v and the results

_TRIES = 50  # of numbers of heads for lengths: long ones fit with few
_N = r"[1-9]\d*"
_NAME = re.compile(
    rf"({'|'.join(GROUPS)}) h({_N})/({_N}) d({_N}) (full|causal|window1024) "
    rf"(?:({_N})x({_N})|({_N}(?:,{_N})*)(?: q({_N}) of ({_N}))?)"
)


@dataclass(frozen=True)
class RandomCase:
    """One problem in bf16. `lengths` are those of a dense batch, all alike, of packed documents, or
    of the sequences of a cache of so large a `capacity`, with so many `queries` each."""

    group: str
    heads: int
    heads_k: int
    dim: int
    mask: str  # full, causal or window1024, which is causal
    lengths: tuple[int, ...]
    queries: int = 0
    capacity: int = 0

    @classmethod
    def parse(cls, name: str) -> RandomCase:
        """The case that `str(case)` wrote, e.g. "dense-forward h16/2 d128 causal 2x8598",
        "packed-backward h24/2 d256 causal 17,300" or "decode h8/1 d128 causal 70,99 q4 of 128"."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"no case: {name!r}, expected {_NAME.pattern}")
        group, heads, heads_k, dim, mask, batch, seqlen, listed, queries, capacity = match.groups()
        lengths = (int(seqlen),) * int(batch) if batch else tuple(map(int, listed.split(",")))
        case = cls(
            *(group, int(heads), int(heads_k), int(dim), mask, lengths),
            *(int(queries or 0), int(capacity or 0)),
        )
        if int(heads) % int(heads_k) or str(case) != name or case.queries > min(lengths):
            raise ValueError(f"no case: {name!r}")
        if max(lengths) > case.capacity and group == "decode":
            raise ValueError(f"no case: {name!r} has sequences longer than its cache")
        return case

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.lengths))
        if self.group.startswith("dense"):
            lengths = f"{len(self.lengths)}x{self.lengths[0]}"
        if self.group == "decode":
            lengths += f" q{self.queries} of {self.capacity}"
        return f"{self.group} h{self.heads}/{self.heads_k} d{self.dim} {self.mask} {lengths}"

    @property
    def direction(self) -> str:
        return "bwd" if self.group.endswith("backward") else "fwd"

    @property
    def seed(self) -> int:
        """A number of the case's own, whatever else is measured."""
        return zlib.crc32(str(self).encode())

    @property
    def sequences(self) -> list[Case]:
        """Each sequence as a case of the suites."""
        causal, feature = self.mask != "full", self.mask if self.mask in FEATURES else ""
        sizes = (self.heads, self.heads_k)
        return [
            Case("bf16", 1, *sizes, self.queries or n, n, self.dim, self.dim, causal, feature)
            for n in self.lengths
        ]

    @property
    def flops(self) -> float:
        return sum(case.flops(self.direction) for case in self.sequences)

    @property
    def bytes(self) -> int:
        """Of q, k, v and the results, all of the cache included."""
        keys = len(self.lengths) * self.capacity or sum(self.lengths)
        queries = len(self.lengths) * self.queries or sum(self.lengths)
        elements = 2 * self.dim * (queries * self.heads + keys * self.heads_k)
        return elements * 2 * (2 if self.direction == "bwd" else 1)


def draw(group: str, seed: int, index: int) -> RandomCase:
    """Case number `index` of a group, the same whatever else is drawn of the seed."""
    rng = random.Random(f"{seed} {group} {index}")
    while True:
        size = _log_uniform(rng, *LENGTHS)
        model = rng.choice(MODELS) if rng.random() < 0.1 else None
        dim = rng.choice(LIKELY_DIMS) if rng.random() < 0.85 else rng.choice(DIMS)
        mask = rng.choice(("full", "causal", "causal"))
        for _ in range(_TRIES):
            heads_k = rng.choice((1, 2, 4, 8) if group == "decode" else (1, 2, 4, 8, 16, 32))
            heads = heads_k * rng.choice(GROUP_SIZES)
            shape = model or (heads, heads_k, dim, mask)
            case = _with_lengths(rng, group, shape, size)
            bounds = (MOST_HEADS, MOST_FLOPS, MOST_BYTES)
            if all(
                x <= y for x, y in zip((case.heads, case.flops, case.bytes), bounds, strict=True)
            ):
                return case


def _with_lengths(
    rng: random.Random, group: str, shape: tuple[int, int, int, str], size: int
) -> RandomCase:
    """Dense: sequences of ``size`` tokens. Packed: ``size`` tokens cut into documents. Decode:
    sequences in a cache, of about ``size`` tokens on average."""
    if group.startswith("dense"):
        return RandomCase(group, *shape, (size,) * _log_uniform(rng, 1, 32))
    if group.startswith("packed"):
        cuts = rng.sample(range(1, size), rng.randint(1, MOST_DOCUMENTS) - 1)
        bounds = [0, *sorted(cuts), size]
        lengths = tuple(b - a for a, b in pairwise(bounds))
        return RandomCase(group, *shape, lengths)
    least, most = max(LENGTHS[0], size * 2 // 5), min(LENGTHS[1], size * 8 // 5)
    lengths = tuple(rng.randint(least, most) for _ in range(_log_uniform(rng, 1, 64)))
    capacity = math.ceil(max(lengths) * rng.uniform(1, 1.3))
    queries = rng.choice((1, rng.randint(2, MOST_QUERIES)))
    return RandomCase(group, *shape[:3], "causal", lengths, queries, capacity)


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return min(most, int(math.exp(rng.uniform(math.log(least), math.log(most + 1)))))


def make_inputs(case: RandomCase, device: torch.device, seed: int) -> Inputs:
    """Standard normal tensors in bf16; `options` are mask and lengths, as flash_cute's ops take
    them."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: tuple[int, ...], heads: int) -> torch.Tensor:
        shape = (*rows, heads, case.dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def numbers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    options: dict[str, Any] = {"is_causal": case.mask != "full", **FEATURES.get(case.mask, {})}
    batch, longest = len(case.lengths), max(case.lengths)
    rows: tuple[int, ...] = (batch, longest)
    if case.group == "decode":
        rows = (batch, case.queries)
        options["cache_seqlens"] = numbers([*case.lengths])
    elif case.group.startswith("packed"):
        rows = (sum(case.lengths),)
        ends = numbers([sum(case.lengths[:i]) for i in range(batch + 1)])
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    rows_k = (batch, case.capacity) if case.group == "decode" else rows
    return Inputs(
        q=normal(rows, case.heads),
        k=normal(rows_k, case.heads_k),
        v=normal(rows_k, case.heads_k),
        dout=normal(rows, case.heads),
        options=options,
    )
