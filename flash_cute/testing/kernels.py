"""Properties of kernels, parsed from their ids, for tests."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flash_cute import kernels
from flash_cute.native import library

_ID = re.compile(
    r"(fwd|bwd|decode)_sm(\d+)_(fp16|bf16|tf32|tf32x3|e4m3)_(plain|rich)_d(\d+)x(\d+)_.*_w\d+_.*?"
    r"(?:_(e4m3|int8))?"
)


class Kernel(NamedTuple):
    """One kernel of the library; `precision` is its dtype, or how it computes fp32."""

    id: str
    op: str
    arch: int
    precision: str
    tier: str
    dim: int
    dim_v: int
    cache: str | None = None  # of 8 bits: "e4m3" or "int8"

    @property
    def cache_dtype(self) -> torch.dtype | None:
        return {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}.get(self.cache or "")

    @property
    def dtype(self) -> torch.dtype:
        names = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
        return names.get(self.precision, torch.float32)

    @property
    def has_dropout(self) -> bool:
        return self.op != "decode" and self._can("dropout")

    @property
    def walks_lists(self) -> bool:
        """Whether it is for sparse calls."""
        return self.id.endswith("_list")

    @property
    def packs_tokens(self) -> bool:
        """Whether its rows are the query heads of tokens, so that it needs several a kv head."""
        return self.id.endswith("_tokens")

    @property
    def vector(self) -> int:
        """Head dims of its tensors are multiples of this."""
        return 16 if self.cache else 1 if self._can("unaligned") else 8

    def _can(self, flag: str) -> bool:
        problem = kernels.Problem(
            self.op, self.dtype, head_dim=self.dim, head_dim_v=self.dim_v, seqlen_q=64,
            allow_tf32=self.precision == "tf32", lists=self.op != "decode" and self.walks_lists,
            heads=2, heads_k=1, cache_dtype=self.cache_dtype,
        )  # fmt: skip
        with_flag: dict[str, Any] = {flag: True}
        problem = replace(problem, **with_flag)
        (found,) = (x for x in kernels.explain(problem, "h100") if x.id == self.id)
        return found.verdict != "refused"

    @property
    def other_op(self) -> str:
        """The other op that a test of this one needs."""
        return "bwd" if self.op == "fwd" else "fwd"


def forward_families(device: torch.device) -> list[str]:
    """Beginnings of the ids of forward kernels that run on a GPU: one a family, oldest first.

    Which one does a call depends on its layout, and so do the last bits of its result.
    """
    major_minor = torch.cuda.get_device_capability(device)
    built = {f"fwd_sm{config.arch}_" for config in kernels.kernels() if config.built}
    return sorted(built & {"fwd_sm80_", "fwd_sm90_"} if major_minor == (9, 0) else {"fwd_sm80_"})


def decode_choices() -> list[str]:
    """Beginnings of the ids of decode kernels: of all, and, if this GPU has its own that do most
    small problems, of those that every GPU has."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    others = any(kernel.startswith("decode_sm90_") for kernel in library.kernels())
    return ["decode_", "decode_sm80_"] if hopper and others else ["decode_"]


def decode_kernels(eight_bits: bool = False) -> list[str]:
    """The ids of the library's decode kernels over caches of q's dtype, or of those of 8 bits."""
    names = [name for name in library.kernels() if name.startswith("decode_")]
    return [name for name in names if (parse(name).cache is not None) == eight_bits]


def parse(kernel: str) -> Kernel:
    """The kernel with this id. Raises ValueError if there is none."""
    match = _ID.fullmatch(kernel)
    if match is None:
        raise ValueError(f"{kernel!r} is no kernel's id")
    op, arch, precision, tier, dim, dim_v, cache = match.groups()
    return Kernel(kernel, op, int(arch), precision, tier, int(dim), int(dim_v), cache)
