"""``flash-cute tune``: shapes as text, and what a calibration file holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flash_cute import kernels
from flash_cute.kernels import Problem, calibration
from flash_cute.native.library import can_use_cuda
from flash_cute.tuning import autotune
from flash_cute.tuning.report import Report

from .options import dtype, problem

_SHAPE = re.compile(
    r"(?:(?P<op>fwd|bwd|decode) )?(?P<dtype>\w+) b(?P<batch>\d+)"
    r" h(?P<heads>\d+)(?:/(?P<heads_k>\d+))?"
    r" q(?P<seqlen_q>\d+)(?: k(?P<seqlen_k>\d+))? d(?P<head_dim>\d+)(?:/(?P<head_dim_v>\d+))?"
    r"(?: (?P<mask>full|causal))?"
)
_LONG_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def parse(text: str) -> Problem:
    """``[OP] DTYPE bB hH[/HK] qM [kN] dD[/DV] [full|causal]``, as plans and benchmarks print it."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(
            f"{text!r}: expected, for example, 'fwd bf16 b4 h32/8 q4096 k4096 d128/128 causal': "
            "[fwd|bwd|decode] DTYPE bBATCH hHEADS[/HEADS_K] qLENGTH [kLENGTH] dDIM[/DIM_V] "
            "[full|causal]"
        )
    given = {name: x for name, x in match.groupdict().items() if x is not None}
    op, name, mask = given.pop("op", "fwd"), given.pop("dtype"), given.pop("mask", "full")
    sizes = {size: int(x) for size, x in given.items()}
    kind = dtype(_LONG_NAMES.get(name, name))
    return problem(op=op, dtype=kind, causal=mask == "causal", **sizes)


def run(problems: list[Problem], path: Path | None, rounds: int) -> Report:
    """Measures calls on the current GPU, with a progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("tuning", total=None)

        def progress(done: int, total: int, next_one: Problem) -> None:
            bar.update(task, completed=done, total=total, description=str(next_one))

        return autotune(problems, path=path, rounds=rounds, progress=progress)


def show(path: Path | None) -> dict[str, Any]:
    """The entries of a file that this library uses on this GPU, and the others with reasons.

    Raises:
        FileNotFoundError: there is no file.
    """
    file = path or calibration.default_path()
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}; `flash-cute tune SHAPES` writes one")
    loaded = calibration.load(path, kernels.gpu() if can_use_cuda() else None)
    return {
        "file": str(file),
        "kernels": {bucket: str(choice) for bucket, choice in loaded.kernels.items()},
        "misses": [{"what": miss.what, "reason": miss.reason} for miss in loaded.misses],
    }


def lines(shown: dict[str, Any]) -> list[str]:
    """The result of :func:`show` as text."""
    rules = [f"  {bucket} = {choice}" for bucket, choice in shown["kernels"].items()]
    misses = [f"  {miss['what']}: {miss['reason']}" for miss in shown["misses"]]
    found = [f"file: {shown['file']}", "used:", *(rules or ["  nothing"])]
    return [*found, *(["not used:", *misses] if misses else [])]
