"""The commands that run attention: bench, demo, fuzz, tune."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from . import bundled, options
from .options import Causal, Device, HeadDim, Heads, HeadsK, Json

_DTYPES = ("bf16", "fp16", "e4m3")  # of the benchmarks' cases
_DIRECTIONS = ("fwd", "bwd", "fwd,bwd")


def run_bench(
    batch: Annotated[
        int | None, typer.Option("--batch", "-b", min=1, help="sequences [4, on a CPU 1]")
    ] = None,
    heads: Heads = 16,
    heads_k: HeadsK = None,
    seqlen: Annotated[
        list[int] | None,
        typer.Option("--seqlen", "-s", min=1, help="once or more [1024 4096, on a CPU 256 1024]"),
    ] = None,
    head_dim: HeadDim = 128,
    dtype: Annotated[
        str, typer.Option(metavar="|".join(_DTYPES), help="dtype of q, k, v")
    ] = "bf16",
    causal: Causal = False,
    direction: Annotated[
        str, typer.Option(metavar="|".join(_DIRECTIONS), help="forward, backward or both")
    ] = "fwd,bwd",
    rivals: Annotated[
        str | None, typer.Option(metavar="A,B", help="other libraries [all that are there]")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="turns of each library [5, on a CPU 3]")
    ] = None,
    sustained: Annotated[
        bool, typer.Option("--sustained", help="turns of 0.3 s instead of 50 ms")
    ] = False,
    device: Device = "",
    plot: Annotated[Path | None, typer.Option(help="write a plot to this image")] = None,
    to_json: Annotated[
        Path | None, typer.Option("--json", help="write every measurement to this file")
    ] = None,
) -> None:
    """Times your shapes and other libraries, and checks the results."""
    for name, given, known in (
        ("--dtype", dtype, _DTYPES),
        ("--direction", direction, _DIRECTIONS),
    ):
        if given not in known:
            raise typer.BadParameter(f"{name} {given}: expected one of {', '.join(known)}")
    with options.errors_in_one_line():
        device = options.device(device)
        benchmark = bundled.module("benchmarks.attention")
    on_cpu = device == "cpu"
    batch = batch or (1 if on_cpu else 4)
    rounds = rounds or (3 if on_cpu and not sustained else None)
    arguments = ["--device", device, "--direction", direction]
    for rows in seqlen or ([256, 1024] if on_cpu else [1024, 4096]):
        sizes = f"b{batch} h{heads}/{heads_k or heads} q{rows} k{rows} d{head_dim}/{head_dim}"
        arguments += ["--case", f"{dtype} {sizes} {'causal' if causal else 'full'}"]
    named = {"--rivals": rivals, "--rounds": rounds, "--plot": plot, "--json": to_json}
    for name, x in named.items():
        arguments += [] if x is None else [name, str(x)]
    try:
        parsed = benchmark.read([*arguments, *["--sustained"] * sustained])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with options.errors_in_one_line():
        raise typer.Exit(benchmark.measured(parsed))


def _waits_without_spinning() -> None:
    """Before torch is imported: on a busy CPU OpenMP's threads that spin as they wait for each
    other make short operations take many times as long."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run_demo(
    device: Device = "",
    seqlen: Annotated[
        int, typer.Option("--seqlen", "-s", min=1, help="queries of a sequence")
    ] = 512,
) -> None:
    """A first look, in seconds: beside the formula and torch's SDPA."""
    _waits_without_spinning()
    with options.errors_in_one_line():
        arguments = ["--device", options.device(device), "--seqlen", str(seqlen)]
        raise typer.Exit(bundled.module("demos.attention").main(arguments))


def run_fuzz(
    cases: Annotated[
        int | None, typer.Option(min=1, help="how many [2000; with --seconds no limit]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of the cases [a fresh one, printed]")] = None,
    seconds: Annotated[float | None, typer.Option(help="start no case after that time")] = None,
    device: Device = "",
    case: Annotated[
        str | None, typer.Option(metavar="JSON", help="one case, as a failure printed it")
    ] = None,
    to_json: Annotated[
        Path | None, typer.Option("--json", help="file for the seed and the failures")
    ] = None,
) -> None:
    """Random cases of all features against the fp64 reference. Exits with 1 if one fails."""
    _waits_without_spinning()
    from flash_cute.testing import fuzz
    from flash_cute.testing.trials import Trial

    try:
        if case is not None:
            Trial.from_json(case)
    except (ValueError, TypeError, AttributeError) as error:
        raise typer.BadParameter(f"--case {case}: {error}") from None
    with options.errors_in_one_line():
        arguments = ["--device", options.device(device)]
    named = {"--cases": cases, "--seed": seed, "--seconds": seconds, "--case": case}
    for name, x in (named | {"--json": to_json}).items():
        arguments += [] if x is None else [name, str(x)]
    raise typer.Exit(fuzz.main(arguments))


def run_tune(
    shapes: Annotated[
        list[str] | None, typer.Argument(help="'fwd bf16 b4 h32/8 q4096 k4096 d128 causal' ...")
    ] = None,
    path: Annotated[Path | None, typer.Option(help="the calibration file")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each kernel")] = 9,
    show: Annotated[
        bool, typer.Option("--show", help="print what the file holds; measures nothing")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measures the kernels for these shapes; a file if that pays."""
    from flash_cute.native.library import can_use_cuda

    from . import tables, tune

    if show == bool(shapes):
        raise typer.BadParameter("give shapes to measure, or --show alone")
    if as_json and not show:
        raise typer.BadParameter("--json belongs to --show")
    with options.errors_in_one_line():
        if show and (as_json or not tables.is_terminal()):
            typer.echo(json.dumps(tune.show(path), indent=1))
        elif show:
            for line in tune.lines(tune.show(path)):
                tables.say(line)
        else:
            problems = [tune.parse(text) for text in shapes or []]
            if not can_use_cuda():
                raise RuntimeError("tuning needs a GPU that has kernels, and there is none here")
            tables.say(str(tune.run(problems, path, rounds)))
