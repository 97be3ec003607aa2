"""What tests need to know of a kernel by its id."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from flash_cute import kernels, library


class Kernel:
    """One kernel of the library; `precision` is its dtype, or the way it computes fp32."""

    def __init__(self, config: kernels.KernelConfig) -> None:
        self.config = config
        self.op, self.arch, self.tier = config.op, config.arch, config.tier
        self.precision, self.dim, self.dim_v = config.dtype, config.head_dim, config.head_dim_v

    @property
    def dtype(self) -> torch.dtype:
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.precision, torch.float32)

    @cached_property
    def has_dropout(self) -> bool:
        return self.op != "decode" and self._can("dropout")

    @cached_property
    def vector(self) -> int:
        """Head dims of its tensors are multiples of this."""
        return 1 if self._can("unaligned") else 8

    def _can(self, flag: str) -> bool:
        problem = kernels.Problem(
            self.op, self.dtype, head_dim=self.dim, head_dim_v=self.dim_v, seqlen_q=64,
            allow_tf32=self.precision == "tf32",
        )  # fmt: skip
        with_flag: dict[str, Any] = {flag: True}
        problem = replace(problem, **with_flag)
        (found,) = (x for x in kernels.explain(problem, "h100") if x.id == self.config.id)
        return found.verdict != "refused"

    @property
    def other_op(self) -> str:
        """The op that a test of this one needs too."""
        return "bwd" if self.op == "fwd" else "fwd"


def forward_families(device: torch.device) -> list[str]:
    """Beginnings of the ids of forward kernels that run on a GPU: one a family, oldest first.

    Which one does a call depends on its layout, and so do the last bits of its result.
    """
    major_minor = torch.cuda.get_device_capability(device)
    built = {f"fwd_sm{config.arch}_" for config in kernels.kernels() if config.built}
    return sorted(built & {"fwd_sm80_", "fwd_sm90_"} if major_minor == (9, 0) else {"fwd_sm80_"})


def decode_choices() -> list[str]:
    """What ids of decoding's kernels begin with: of all, and of those that every GPU has, where
    this one has others, too, which do most small problems."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    others = any(kernel.startswith("decode_sm90_") for kernel in library.kernels())
    return ["decode_", "decode_sm80_"] if hopper and others else ["decode_"]


def parse(kernel: str) -> Kernel:
    """The kernel with this id. Raises ValueError for what is none."""
    for config in kernels.kernels():
        if config.id == kernel:
            return Kernel(config)
    raise ValueError(f"{kernel!r} is no kernel's id")
