"""What the id of a kernel says: ``bwd_sm80_bf16_plain_d64x64_m64_n128_s2_w4_c2``."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

_ID = re.compile(r"(fwd|bwd)_sm\d+_(fp16|bf16|tf32|tf32x3)_(plain|rich)_d(\d+)x(\d+)_.*")


class Kernel(NamedTuple):
    """One kernel of the library; `precision` is its dtype, or the way it computes fp32."""

    op: str
    precision: str
    tier: str
    dim: int
    dim_v: int

    @property
    def dtype(self) -> torch.dtype:
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.precision, torch.float32)

    @property
    def other_op(self) -> str:
        """The op that a test of this one needs too."""
        return "bwd" if self.op == "fwd" else "fwd"


def parse(kernel: str) -> Kernel:
    """The kernel with this id. Raises ValueError for what is none."""
    match = _ID.fullmatch(kernel)
    if match is None:
        raise ValueError(f"{kernel!r} is no kernel's id")
    op, precision, tier, dim, dim_v = match.groups()
    return Kernel(op, precision, tier, int(dim), int(dim_v))
