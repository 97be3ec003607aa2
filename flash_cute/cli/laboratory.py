"""``flash-cute lab``: the commands of :mod:`flash_cute.lab`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Annotated

import typer

from . import options

app = typer.Typer(
    help="Kernels in which each technique can be left out.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
def show_list() -> None:
    """The kernels of this build."""
    from flash_cute.lab.kernel_configs import get_kernels_to_build

    from . import tables

    for config in get_kernels_to_build():
        tables.say(str(config))


@app.command("check")
def run_check(
    seed: Annotated[int | None, typer.Option(help="of the inputs [a fresh one]")] = None,
) -> None:
    """Compares every kernel with the fp64 reference, on a GPU. Exits with 1 if one is wrong."""
    from flash_cute.lab import __main__ as laboratory

    with options.errors_in_one_line():
        options.device("cuda")
        raise typer.Exit(laboratory.check(Namespace(seed=seed)))


@app.command("progression")
def run_progression(
    every: Annotated[
        bool, typer.Option("--every", help="every kernel of the build instead")
    ] = False,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp16", help="dtype of q, k, v")] = "bf16",
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 4,
    seq_len: Annotated[int, typer.Option(min=1, help="queries and keys of a sequence")] = 4096,
    heads: Annotated[int, typer.Option(min=1, help="heads")] = 16,
    d_head: Annotated[int, typer.Option(metavar="64|128", help="head dim")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each kernel")] = 9,
    to_json: Annotated[Path | None, typer.Option("--json", help="write what was measured")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="write a plot")] = None,
) -> None:
    """Times the kernels step by step, on a GPU, and plots them."""
    from flash_cute.lab import __main__ as laboratory

    for name, given, known in (
        ("--dtype", dtype, ("bf16", "fp16")),
        ("--d-head", d_head, (64, 128)),
    ):
        if given not in known:
            raise typer.BadParameter(f"{name} {given}: expected {known[0]} or {known[1]}")
    arguments = Namespace(
        every=every, dtype=dtype, batch=batch, seq_len=seq_len, heads=heads, d_head=d_head,
        rounds=rounds, json=to_json, plot=plot,
    )  # fmt: skip
    with options.errors_in_one_line():
        options.device("cuda")
        raise typer.Exit(laboratory.measure(arguments))
