"""The app: its commands are functions of the other modules in :mod:`flash_cute.cli`."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from . import facts, laboratory, options, profile, runs
from .options import (
    Batch,
    Causal,
    Dtype,
    HeadDim,
    HeadDimV,
    Heads,
    HeadsK,
    Json,
    Op,
    Seqlen,
    SeqlenK,
)  # fmt: skip

_REPORT = Path("flash_cute.ncu-rep")

app = typer.Typer(
    name="flash-cute",
    help="See, explain, time and profile flash_cute's kernels.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,  # help says [defaults] in brackets, which is rich's markup
    context_settings={"help_option_names": ["-h", "--help"]},
)


def can_use_cuda() -> bool:
    """Whether there is a GPU, and the library holds kernels for one."""
    from flash_cute.native import library

    return library.can_use_cuda()


def _show_version(show: bool) -> None:
    if not show:
        return
    try:
        found = version("flash-cute")
    except PackageNotFoundError:  # a checkout
        from flash_cute import __version__ as found
    typer.echo(f"flash_cute {found}")
    raise typer.Exit


@app.callback()
def main(
    show: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """See, explain, time and profile flash_cute's kernels."""


app.command("info")(facts.show_info)
app.command("list")(facts.show_list)
app.command("explain")(facts.show_explanation)
app.command("bench")(runs.run_bench)
app.command("demo")(runs.run_demo)
app.command("fuzz")(runs.run_fuzz)
app.command("tune")(runs.run_tune)
app.add_typer(laboratory.app, name="lab")


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
    report: Annotated[Path, typer.Option(help="the file that ncu-ui reads")] = Path(
        "flash_cute.ncu-rep"
    ),
    as_json: Json = False,
) -> None:
    """One call under Nsight Compute: its limits, what warps wait for."""
    problem = options.problem(
        op=op.value, dtype=options.dtype(dtype), batch=batch, heads=heads, heads_k=heads_k,
        seqlen_q=seqlen, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal,
    )  # fmt: skip
    arguments = {
        "op": op.value, "dtype": options.DTYPES[dtype], "batch": batch, "heads": heads,
        "heads_k": heads_k or heads,
        "seqlen_q": seqlen, "seqlen_k": seqlen if seqlen_k is None else seqlen_k,
        "head_dim": head_dim, "head_dim_v": head_dim_v or head_dim, "causal": causal,
    }  # fmt: skip
    with options.errors_in_one_line():
        profile.find_ncu()
        if not can_use_cuda():
            raise profile.ProfileError("there is no GPU here, or the library has no kernels for it")
        found = profile.run([json.dumps(arguments)], report)
    if as_json:
        typer.echo(json.dumps([asdict(kernel) for kernel in found], indent=1))
        return
    import torch

    from . import tables

    tables.say(f"{problem} on {torch.cuda.get_device_name()}; report: {report}")
    tables.of_profiles(found).show()
