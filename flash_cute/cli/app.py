"""The commands. Each says in its help what it prints; this file holds no more than arguments."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from flash_cute import kernels
from flash_cute.cli import beside, info, options, profile, tables, tune
from flash_cute.cli.options import (
    Batch,
    Causal,
    Dtype,
    GpuName,
    HeadDim,
    HeadDimV,
    Heads,
    HeadsK,
    Json,
    Op,
    Seqlen,
    SeqlenK,
)  # fmt: skip
from flash_cute.lab import __main__ as laboratory
from flash_cute.library import can_use_cuda
from flash_cute.testing import fuzz as trials

app = typer.Typer(
    name="flash-cute",
    help="See, explain, time and profile flash_cute's kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
_PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


@app.command("info")
def show_info(as_json: Json = False) -> None:
    """The GPUs, torch, the library and its kernels; what cannot be asked is said to be so."""
    found = info.gather()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for name, part in found.items():
        typer.secho(name, bold=True)
        for line in _lines(part):
            typer.echo(f"  {line}")


def _lines(part: Any) -> list[str]:
    if isinstance(part, dict):
        return [f"{name}: {'-' if x is None else x}" for name, x in part.items()] or ["none"]
    return [", ".join(_lines(x)) for x in part] or ["none"]


@app.command("list")
def show_list(
    match: Annotated[str, typer.Argument(help="only kernels with this in their id")] = "",
    gpu: GpuName = None,
    as_json: Json = False,
) -> None:
    """Every kernel: tile, stages, registers, shared memory, and how many fit an SM."""
    rows = [kernel for kernel in kernels.kernels() if match in kernel.id]
    if not rows:
        raise typer.BadParameter(f"no kernel's id contains {match!r}")
    if as_json:
        typer.echo(json.dumps([asdict(kernel) for kernel in rows], indent=1))
        return
    tables.console().print(tables.of_kernels(rows, options.described(gpu)))


@app.command("explain")
def show_explanation(
    op: Annotated[Op, typer.Option(help="decode: over a key/value cache")] = Op.fwd,
    batch: Batch = 1,
    heads: Heads = 16,
    heads_k: HeadsK = None,
    seqlen: Seqlen = 4096,
    seqlen_k: SeqlenK = None,
    head_dim: HeadDim = 128,
    head_dim_v: HeadDimV = None,
    dtype: Dtype = "bf16",
    causal: Causal = False,
    window: Annotated[str, typer.Option(help="LEFT,RIGHT; -1 is unbounded")] = "-1,-1",
    softcap: Annotated[bool, typer.Option("--softcap")] = False,
    alibi: Annotated[bool, typer.Option("--alibi")] = False,
    dropout: Annotated[bool, typer.Option("--dropout")] = False,
    varlen: Annotated[bool, typer.Option("--varlen", help="packed sequences")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="of bwd")] = False,
    page_size: Annotated[int, typer.Option(min=0, help="of decode; 0: no pages")] = 0,
    tile: Annotated[str, typer.Option(help="Bc,Br of flash_attention_forward")] = "",
    gpu: GpuName = None,
    every: Annotated[bool, typer.Option("--all", help="kernels of other dtypes too")] = False,
    as_json: Json = False,
) -> None:
    """Which kernel a call runs, and why no other does, in the words of the call's own errors."""
    problem = options.problem(
        op=op.value, dtype=options.dtype(dtype), batch=batch, heads=heads, heads_k=heads_k,
        seqlen_q=seqlen, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal,
        window_size=_pair("--window", window), softcap=softcap, alibi=alibi, dropout=dropout,
        varlen=varlen, deterministic=deterministic, page_size=page_size,
    )  # fmt: skip
    where = options.gpu(gpu)
    rows = kernels.explain(problem, where)
    shown = [row for row in rows if every or "computes in" not in row.reason]
    chosen = any(row.verdict == "chosen" for row in rows)
    plan = kernels.plan(problem, where) if chosen else None
    if as_json:
        found = {
            "problem": str(problem),
            "plan": plan and asdict(plan),
            "kernels": [asdict(row) for row in shown],
            "notes": tables.notes(problem),
        }
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(f"{problem} on {options.described(gpu).name}")
    for note in tables.notes(problem):
        typer.echo(note)
    if plan is None:
        typer.echo("no kernel can do it")
    else:
        typer.echo(f"plan: {plan}")
        m, n = plan.kernel.block_m, plan.kernel.block_n
        typer.echo(f"tile: {m} queries x {n} keys, {plan.kernel.smem_bytes} bytes of shared memory")
        if tile:
            bc, br = _pair("--tile", tile)
            near = kernels.nearest(problem, br, bc, where)
            typer.echo(f"nearest to Bc={bc}, Br={br}: {near}")
    tables.console().print(tables.of_verdicts(shown))
    if len(shown) < len(rows):
        typer.echo(f"{len(rows) - len(shown)} kernels of other dtypes: --all")


def _pair(name: str, text: str) -> tuple[int, int]:
    try:
        first, second = map(int, text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{name} {text}: expected two numbers, A,B") from None
    return first, second


@app.command("bench")
def run_bench(
    batch: Batch = 4,
    heads: Heads = 16,
    heads_k: HeadsK = None,
    seqlen: Annotated[
        list[int] | None, typer.Option("--seqlen", "-s", min=1, help="once or more [1024 4096]")
    ] = None,
    head_dim: HeadDim = 128,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or e4m3")] = "bf16",
    causal: Causal = False,
    direction: Annotated[str, typer.Option(help="fwd, bwd or fwd,bwd")] = "fwd,bwd",
    rivals: Annotated[str | None, typer.Option(help="comma-separated [all that are there]")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="of each candidate")] = None,
    sustained: Annotated[bool, typer.Option("--sustained", help="longer rounds")] = False,
    device: Annotated[str, typer.Option(help="[cuda, or without one cpu]")] = "",
    plot: Annotated[Path | None, typer.Option(help="an image for the plot")] = None,
    to_json: Annotated[Path | None, typer.Option("--json", help="every measurement")] = None,
) -> None:
    """Times shapes of your own beside rivals, results checked, and plots them."""
    device = device or ("cuda" if can_use_cuda() else "cpu")
    if rivals is None and device == "cpu":
        rivals = "math"
    mask = "causal" if causal else "full"
    arguments = ["--device", device, "--direction", direction]
    for rows in seqlen or [1024, 4096]:
        sizes = f"b{batch} h{heads}/{heads_k or heads} q{rows} k{rows} d{head_dim}/{head_dim}"
        arguments += ["--case", f"{dtype} {sizes} {mask}"]
    given = {"--rivals": rivals, "--rounds": rounds, "--plot": plot, "--json": to_json}
    for name, x in given.items():
        arguments += [] if x is None else [name, str(x)]
    raise typer.Exit(
        beside.module("benchmarks.attention").main([*arguments, *["--sustained"] * sustained])
    )


@app.command("profile")
def run_profile(
    op: Annotated[Op, typer.Option(help="decode: over a key/value cache")] = Op.fwd,
    batch: Batch = 4,
    heads: Heads = 16,
    heads_k: HeadsK = None,
    seqlen: Seqlen = 4096,
    seqlen_k: SeqlenK = None,
    head_dim: HeadDim = 128,
    head_dim_v: HeadDimV = None,
    dtype: Dtype = "bf16",
    causal: Causal = False,
    report: Annotated[Path, typer.Option(help="kept, for ncu-ui")] = Path("flash_cute.ncu-rep"),
    as_json: Json = False,
) -> None:
    """Runs a call under Nsight Compute: shares of each roof, and what warps wait for."""
    name = str(options.dtype(dtype)).removeprefix("torch.")
    problem = options.problem(
        op=op.value, dtype=options.dtype(dtype), batch=batch, heads=heads, heads_k=heads_k,
        seqlen_q=seqlen, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal,
    )  # fmt: skip
    arguments = {
        "op": op.value, "dtype": name, "batch": batch, "heads": heads, "heads_k": heads_k or heads,
        "seqlen_q": seqlen, "seqlen_k": seqlen if seqlen_k is None else seqlen_k,
        "head_dim": head_dim, "head_dim_v": head_dim_v or head_dim, "causal": causal,
    }  # fmt: skip
    try:
        profile.find_ncu()
        if not can_use_cuda():
            raise profile.ProfileError("there is no GPU here, or a library without kernels for it")
        found = profile.run([json.dumps(arguments)], report)
    except profile.ProfileError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps([asdict(kernel) for kernel in found], indent=1))
        return
    typer.echo(f"{problem} on {torch.cuda.get_device_name()}; report: {report}")
    tables.console().print(tables.of_profiles(found))


@app.command("demo")
def run_demo(
    device: Annotated[str, typer.Option(help="[cuda, or without one cpu]")] = "",
    seqlen: Seqlen = 512,
) -> None:
    """Attention beside softmax(q k^T) v written out: the largest difference, and both times."""
    device = device or ("cuda" if can_use_cuda() else "cpu")
    arguments = ["--device", device, "--seqlen", str(seqlen)]
    raise typer.Exit(beside.module("demos.attention").main(arguments))


@app.command("fuzz", context_settings=_PASSED_ON)
def run_fuzz(context: typer.Context) -> None:
    """Random cases of all features against the fp64 reference; its options: fuzz --help."""
    raise typer.Exit(trials.main(context.args))


@app.command("lab", context_settings=_PASSED_ON)
def run_lab(context: typer.Context) -> None:
    """The laboratory's kernels: list, check or progression; their options: lab --help."""
    raise typer.Exit(laboratory.main(context.args, "flash-cute lab"))


@app.command("tune")
def run_tune(
    shapes: Annotated[
        list[str] | None, typer.Argument(help="'fwd bf16 b4 h32/8 q4096 k4096 d128 causal' ...")
    ] = None,
    path: Annotated[Path | None, typer.Option(help="the calibration file")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="of each kernel")] = 9,
    show: Annotated[bool, typer.Option("--show", help="what the file holds; measures nothing")] = (
        False
    ),
) -> None:
    """Measures the kernels that can do these shapes, reports the gain on other shapes, and writes a
    file for kernels.use_calibration() if it pays."""
    if show == bool(shapes):
        raise typer.BadParameter("give shapes to measure, or --show alone")
    if show:
        typer.echo(json.dumps(tune.show(path), indent=1))
        return
    try:
        typer.echo(str(tune.run(shapes or [], path, rounds)))
    except (RuntimeError, NotImplementedError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
