"""Options that several commands share: a call in sizes, a device, and a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from . import cards

if TYPE_CHECKING:
    import torch

    from flash_cute.kernels import Gpu, Problem

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


class Op(str, Enum):
    """The ops that have kernels."""

    fwd = "fwd"
    bwd = "bwd"
    decode = "decode"


Batch = Annotated[int, typer.Option("--batch", "-b", min=0, help="sequences")]
Heads = Annotated[int, typer.Option("--heads", min=1, help="query heads")]
HeadsK = Annotated[
    int | None, typer.Option("--heads-k", min=1, help="key/value heads [as many as query heads]")
]
Seqlen = Annotated[int, typer.Option("--seqlen", "-s", min=0, help="queries of a sequence")]
SeqlenK = Annotated[
    int | None, typer.Option("--seqlen-k", min=0, help="keys of a sequence [as many as queries]")
]
HeadDim = Annotated[int, typer.Option("--head-dim", "-d", min=1, help="head dim of q and k")]
HeadDimV = Annotated[
    int | None, typer.Option("--head-dim-v", min=1, help="head dim of v [that of q and k]")
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="|".join(DTYPES), help="dtype of q, k, v")]
Causal = Annotated[bool, typer.Option("--causal", help="with a causal mask")]
Json = Annotated[bool, typer.Option("--json", help="print JSON to standard output")]
Device = Annotated[
    str, typer.Option("--device", metavar="cuda|cpu", help="[cuda if it can be used, else cpu]")
]


def gpu_help() -> str:
    """What ``--gpu`` takes."""
    names = ", ".join((*cards.KNOWN, *cards.CARDS))
    return f"{names}, an arch such as sm_89, or the index of one [the first one, else h100]"


GpuName = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help=gpu_help())]


def dtype(name: str) -> torch.dtype:
    """The dtype of an option's value."""
    import torch

    if name not in DTYPES:
        raise typer.BadParameter(f"--dtype {name}: expected one of {', '.join(DTYPES)}")
    found: torch.dtype = getattr(torch, DTYPES[name])
    return found


def gpu(name: str | None) -> Gpu | int | None:
    """As kernels.plan() takes it."""
    from flash_cute.native.library import can_use_cuda

    if name is None:
        return None
    if name in cards.NAMES:
        found: Gpu = cards.card(name)
        return found
    if name.isdigit() and can_use_cuda():
        return int(name)
    raise typer.BadParameter(
        f"--gpu {name}: expected {', '.join(cards.NAMES)}, or the index of a GPU that is there"
    )


def described(name: str | None) -> Gpu:
    """The GPU of an option's value."""
    from flash_cute import kernels
    from flash_cute.native import library

    given = gpu(name)
    if given is None and not library.can_use_cuda():
        return kernels.GPUS["h100"]
    return kernels.gpu(given) if given is None or isinstance(given, int) else given


def device(name: str) -> str:
    """The device that a command runs on; "" is CUDA if it can be used, else the CPU."""
    from flash_cute.native.library import can_use_cuda

    if name in ("", "cpu"):
        return name or ("cuda" if can_use_cuda() else "cpu")
    if name.partition(":")[0] != "cuda":
        raise typer.BadParameter(f"--device {name}: expected cuda, cuda:N or cpu")
    if not can_use_cuda():
        raise RuntimeError(
            f"--device {name}: there is no GPU here, or the library has no kernels for one; "
            "`flash-cute info` says which, and --device cpu runs on the CPU"
        )
    return name


def problem(**sizes: object) -> Problem:
    """The call in sizes; its errors are raised as errors of the options."""
    from flash_cute.kernels import Problem

    try:
        found = Problem(**sizes)  # type: ignore[arg-type]
        found.request()  # which refuses options of other ops
    except ValueError as error:
        raise typer.BadParameter(str(error).replace("lists is", "sparse is")) from None
    return found


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Inside, an error is one line on standard error, and the status 1."""
    try:
        yield
    except typer.Exit:  # a RuntimeError
        raise
    except (RuntimeError, NotImplementedError, ImportError, OSError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
