"""The commands that run no attention: info, list, explain."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import cards, cpu, options
from .options import (
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

if TYPE_CHECKING:
    from flash_cute.kernels import Problem


def show_info(as_json: Json = False) -> None:
    """Versions, library, GPUs and machine: what a bug report needs."""
    from . import info, tables

    found = info.gather()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for name, part in found.items():
        typer.secho(name, bold=True)
        for line in info.lines(name, part):
            tables.say(line, indent=2)


def show_list(
    match: Annotated[str, typer.Argument(help="only kernels with this in their id")] = "",
    gpu: GpuName = None,
    as_json: Json = False,
) -> None:
    """Every kernel: tile, registers, shared memory, CTAs an SM."""
    from flash_cute import kernels

    rows = [kernel for kernel in kernels.kernels() if match in kernel.id]
    if not rows:
        raise typer.BadParameter(f"no kernel's id contains {match!r}")
    if as_json:
        typer.echo(json.dumps([asdict(kernel) for kernel in rows], indent=1))
        return
    from . import tables

    tables.of_kernels(rows, options.described(gpu)).show()


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
    window: Annotated[
        str, typer.Option(metavar="LEFT,RIGHT", help="keys that a query sees; -1: all")
    ] = "-1,-1",
    softcap: Annotated[bool, typer.Option("--softcap", help="a flag: any softcap")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="a flag: with ALiBi slopes")] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="a flag: with dropout")] = False,
    varlen: Annotated[bool, typer.Option("--varlen", help="packed sequences")] = False,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="fwd, bwd: tiles of a flash_cute.Sparse alone")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="bwd: the same bits in every run")
    ] = False,
    page_size: Annotated[int, typer.Option(min=0, help="decode: rows of a page; 0: none")] = 0,
    tile: Annotated[
        str, typer.Option(metavar="Bc,Br", help="also name flash_attention_forward's kernel")
    ] = "",
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help=f"cpu, {options.gpu_help()}"),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="the ids of all kernels, also of other dtypes and calls"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Which kernel a call runs, and why no other does. Exits with 1 if none can do it."""
    problem = options.problem(
        op=op.value, dtype=options.dtype(dtype), batch=batch, heads=heads, heads_k=heads_k,
        seqlen_q=seqlen, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal,
        window_size=_pair("--window", window), softcap=softcap, alibi=alibi, dropout=dropout,
        varlen=varlen, lists=sparse, deterministic=deterministic, page_size=page_size,
    )  # fmt: skip
    pair = _pair("--tile", tile) if tile else None
    if gpu == "cpu":
        _explain_cpu(problem, as_json)
    else:
        _explain_gpu(problem, gpu, pair, every, as_json)


def _explain_cpu(problem: Problem, as_json: bool) -> None:
    from . import tables

    why = cpu.reasons(problem)
    if as_json:
        found = {"problem": str(problem), "path": cpu.path(problem), "reasons": why}
        typer.echo(json.dumps(found, indent=1))
        return
    tables.say(f"{problem} on the CPU")
    tables.say(f"path: {cpu.path(problem)}")
    tables.say(f"why: {', '.join(why) or 'the call is plain'}")
    if problem.varlen or problem.op == "decode":
        tables.say("each sequence is computed by itself, and takes the path of its own lengths")
    for line in tables.notes(problem.reasons_to_widen):
        tables.say(line)


def _explain_gpu(
    problem: Problem, gpu: str | None, tile: tuple[int, int] | None, every: bool, as_json: bool
) -> None:
    from flash_cute import kernels

    from . import tables

    where = options.gpu(gpu)
    rows, notes = kernels.explain(problem, where), tables.notes(kernels.why_widened(problem, where))
    walks_lists = {kernel.id: kernel.tiles == "list" for kernel in kernels.kernels()}
    alike = [row for row in rows if every or walks_lists[row.id] == problem.lists]
    shown = [row for row in alike if every or "computes in" not in row.reason]
    chosen = any(row.verdict == "chosen" for row in rows)
    plan = kernels.plan(problem, where) if chosen else None
    if as_json:
        found: dict[str, Any] = {
            "problem": str(problem),
            "plan": plan and asdict(plan),
            "kernels": [asdict(row) for row in shown],
            "notes": notes,
        }
        typer.echo(json.dumps(found, indent=1))
        raise typer.Exit(int(plan is None))
    heading = f"{problem} on {gpu if gpu in cards.ARCHS else options.described(gpu).name}"
    for line in (heading, *notes):
        tables.say(line)
    if plan is not None:
        tables.say(f"plan: {plan}")
        m, n = plan.kernel.block_m, plan.kernel.block_n
        tables.say(f"tile: {m} queries x {n} keys, {plan.kernel.smem_bytes} bytes of shared memory")
        if tile:
            near = kernels.nearest(problem, tile[1], tile[0], where)
            tables.say(f"nearest to Bc={tile[0]}, Br={tile[1]}: {near}")
    tables.say_verdicts(shown, every)
    for left_out, kind in (
        (len(alike) - len(shown), "other dtypes"),
        (len(rows) - len(alike), "dense calls" if problem.lists else "sparse calls"),
    ):
        if left_out:
            tables.say(f"{left_out} kernels of {kind}: --all")
    tables.say(f"chosen: {plan.kernel.id}" if plan else "no kernel can do it")
    raise typer.Exit(int(plan is None))


def _pair(name: str, text: str) -> tuple[int, int]:
    try:
        first, second = map(int, text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{name} {text}: expected two numbers, A,B") from None
    return first, second
