"""The output of commands: tables if the terminal is wide enough, else lines for each row."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from flash_cute import kernels
from flash_cute.kernels import Gpu, KernelConfig, Verdict

from .profile import ROOFS, Profile

_THREADS_OF_SM = {86: 1536, 89: 1536, 120: 1536}  # else 2048
_WIDE = 240  # columns if the output is not a terminal


def is_terminal() -> bool:
    """Whether the output is a terminal."""
    return sys.stdout.isatty()


def width() -> int:
    """Columns of a line: $COLUMNS, else the terminal's, else _WIDE."""
    if os.environ.get("COLUMNS", "").isdigit():
        return int(os.environ["COLUMNS"])
    return os.get_terminal_size().columns if is_terminal() else _WIDE


def say(text: str, indent: int = 0) -> None:
    """Prints a line, folded between words; a word longer than a line is folded too."""
    further = " " * (indent + 2)
    for line in text.splitlines() or [""]:
        typer.echo(
            textwrap.fill(
                line, width(), initial_indent=" " * indent, subsequent_indent=further,
                break_on_hyphens=False,
            )
        )  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """A table, and for narrow terminals a name and facts for each row."""

    table: Table
    lines: Sequence[tuple[str, str]]

    def show(self) -> None:
        console = Console(width=width())
        room = Measurement.get(console, console.options.update(width=_WIDE), self.table).maximum
        if room <= width():
            console.print(self.table)
            return
        if self.table.title:
            say(str(self.table.title))
        for name, facts in self.lines:
            say(name)
            say(facts, indent=2)


def of_kernels(rows: Iterable[KernelConfig], gpu: Gpu) -> Rows:
    """A row for each kernel, with the CTAs and the share of threads that an SM of a GPU holds."""
    table = Table(
        "kernel", "tile", "stages", "threads", "registers, at most", "shared memory",
        "CTAs an SM", "occupancy", "built", box=box.SIMPLE,
        title=f"{gpu.name}, sm_{gpu.capability}",
    )  # fmt: skip
    lines = []
    for kernel in rows:
        ctas = kernels.ctas_an_sm(kernel, gpu)
        share = ctas * kernel.threads / _THREADS_OF_SM.get(gpu.capability, 2048)
        tile, memory = f"{kernel.block_m} x {kernel.block_n}", f"{kernel.smem_bytes / 1024:.0f} KiB"
        table.add_row(
            kernel.id, tile, str(kernel.stages), str(kernel.threads), str(kernel.most_registers),
            memory, str(ctas or "-"), f"{share:.0%}" if ctas else "-",
            "yes" if kernel.built else "-",
        )  # fmt: skip
        fit = f"{ctas} CTA{'s' * (ctas > 1)} an SM ({share:.0%})" if ctas else "not on this GPU"
        facts = f"{tile}, {kernel.stages} stages, {kernel.threads} threads, "
        facts += f"{kernel.most_registers} registers, {memory}, {fit}{', built' * kernel.built}"
        lines.append((kernel.id, facts))
    return Rows(table, lines)


def say_verdicts(rows: Sequence[Verdict], every: bool) -> None:
    """Prints the other kernels by verdict and reason; with all ids if ``every``."""
    for verdict, heading in (("fits", "also able to do it:"), ("refused", "refused:")):
        by_reason: dict[str, list[str]] = {}
        for row in rows:
            if row.verdict == verdict:
                by_reason.setdefault(row.reason, []).append(row.id)
        if by_reason:
            say(heading)
        for reason, ids in by_reason.items():
            alone = len(ids) == 1
            say(ids[0] if alone else f"{len(ids)} kernels: {reason}", indent=2)
            for line in [reason] if alone else ids * every:
                say(line, indent=4)


def of_profiles(found: Iterable[Profile]) -> Rows:
    """A row for each kernel: its time, percent of each roof, and its largest warp stalls."""
    table = Table("kernel", "us", "registers", *ROOFS, "warps wait for", box=box.SIMPLE)
    lines = []
    for kernel in found:
        roofs = {x: "-" if y is None else f"{y:.0f} %" for x, y in kernel.roofs.items()}
        waits = ", ".join(f"{name} {x:.0%}" for name, x in list(kernel.stalls.items())[:3])
        time, registers = f"{kernel.microseconds:.1f}", str(kernel.registers or "-")
        table.add_row(kernel.kernel, time, registers, *roofs.values(), waits or "-")
        shares = ", ".join(f"{x} {y}" for x, y in roofs.items())
        facts = f"{time} us, {registers} registers; {shares}; warps wait for {waits or '-'}"
        lines.append((kernel.kernel, facts))
    return Rows(table, lines)


def notes(reasons: Sequence[str]) -> list[str]:
    """Remarks for the reader of a plan of fp8, with the reasons to widen it."""
    if not reasons:
        return []
    return [
        "q, k and v are widened to 16 bits, which is exact, and run as a 16-bit call: "
        + ", ".join(reasons)
    ]
