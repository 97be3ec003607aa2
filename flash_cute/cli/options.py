"""Options that several commands share: a call in sizes, and a GPU."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import torch
import typer

from flash_cute import kernels
from flash_cute.kernels import GPUS, Gpu, Problem
from flash_cute.library import can_use_cuda

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


class Op(str, Enum):
    """The ops that have kernels."""

    fwd = "fwd"
    bwd = "bwd"
    decode = "decode"


Batch = Annotated[int, typer.Option("--batch", "-b", min=0, help="sequences")]
Heads = Annotated[int, typer.Option("--heads", min=1, help="query heads")]
HeadsK = Annotated[int | None, typer.Option("--heads-k", min=1, help="kv heads [as many]")]
Seqlen = Annotated[int, typer.Option("--seqlen", "-s", min=0, help="queries of a sequence")]
SeqlenK = Annotated[int | None, typer.Option("--seqlen-k", min=0, help="keys [as many]")]
HeadDim = Annotated[int, typer.Option("--head-dim", "-d", min=1, help="of q and k")]
HeadDimV = Annotated[int | None, typer.Option("--head-dim-v", min=1, help="of v [the same]")]
Dtype = Annotated[str, typer.Option("--dtype", help=", ".join(DTYPES))]
Causal = Annotated[bool, typer.Option("--causal", help="a causal mask")]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output")]
GpuName = Annotated[
    str | None,
    typer.Option("--gpu", help=f"{', '.join(GPUS)}, or the index of one [it, else h100]"),
]


def dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise typer.BadParameter(f"--dtype {name}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def gpu(name: str | None) -> str | int | None:
    """As kernels.plan() takes it."""
    if name is None or name in GPUS:
        return name
    if name.isdigit() and can_use_cuda():
        return int(name)
    raise typer.BadParameter(f"--gpu {name}: expected {', '.join(GPUS)}, or a GPU that is there")


def described(name: str | None) -> Gpu:
    """The GPU that a command means."""
    given = gpu(name)
    if given is None and not can_use_cuda():
        given = "h100"
    return GPUS[given] if isinstance(given, str) else kernels.gpu(given)


def problem(**sizes: object) -> Problem:
    try:
        return Problem(**sizes)  # type: ignore[arg-type]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
