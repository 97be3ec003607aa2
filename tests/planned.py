"""What the library plans for sizes in a row, on an H100 if nothing else is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flash_cute import kernels
from flash_cute.kernels import Plan, Problem

# Which fields sizes without names are, and words of tests for others.
_SIZES = {
    "fwd": ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim"),
    "bwd": ("batch", "heads", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
    "decode": ("batch", "heads", "heads_k", "seqlen_q", "seqlen_k", "head_dim"),
}


def plan(op: str, *sizes: int, gpu: str = "h100", **options: Any) -> Plan | None:
    """None if no kernel can do it. ``left`` and ``right`` are the window; ``sms``, ``memory_gb_s``
    and ``smem_optin`` are the GPU's."""
    facts = ("sms", "memory_gb_s", "smem_optin")
    card = {name: options.pop(name) for name in facts if name in options}
    window = options.pop("left", -1), options.pop("right", -1)
    named = dict(zip(_SIZES[op], sizes, strict=True))
    problem = Problem(op, window_size=window, **named, **options)
    try:
        return kernels.plan(problem, replace(kernels.GPUS[gpu], **card))
    except RuntimeError as error:
        assert "no kernel for this call" in str(error)
        return None
