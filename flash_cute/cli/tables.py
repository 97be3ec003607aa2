"""Tables of ``flash-cute list`` and ``flash-cute explain``."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from flash_cute import kernels
from flash_cute.cli.profile import ROOFS, Profile
from flash_cute.kernels import Gpu, KernelConfig, Problem, Verdict

_THREADS_OF_SM = {86: 1536, 89: 1536}  # else 2048
_STYLES = {"chosen": "bold green", "fits": "", "refused": "dim"}
_WIDE = 240  # columns of what is no terminal


def console() -> Console:
    """Standard output; outside of a terminal lines are not folded to its width."""
    return Console(width=None if sys.stdout.isatty() else _WIDE)


def of_kernels(rows: Iterable[KernelConfig], gpu: Gpu) -> Table:
    """One line a kernel, with how many of its CTAs an SM of a GPU holds, and of its threads."""
    table = Table(
        "kernel", "tile", "stages", "threads", "registers, at most", "shared memory",
        "CTAs an SM", "occupancy", "built", box=box.SIMPLE,
        title=f"{gpu.name}, sm_{gpu.capability}",
    )  # fmt: skip
    for kernel in rows:
        ctas = kernels.ctas_an_sm(kernel, gpu)
        share = ctas * kernel.threads / _THREADS_OF_SM.get(gpu.capability, 2048)
        table.add_row(
            kernel.id, f"{kernel.block_m} x {kernel.block_n}", str(kernel.stages),
            str(kernel.threads), str(kernel.most_registers), f"{kernel.smem_bytes / 1024:.0f} KiB",
            str(ctas or "-"), f"{share:.0%}" if ctas else "-", "yes" if kernel.built else "-",
        )  # fmt: skip
    return table


def of_verdicts(rows: Iterable[Verdict]) -> Table:
    """One line a kernel: chosen, or why not."""
    table = Table("", "kernel", "why not", box=box.SIMPLE)
    for row in rows:
        table.add_row(row.verdict, row.id, row.reason, style=_STYLES[row.verdict])
    return table


def of_profiles(found: Iterable[Profile]) -> Table:
    """One line a kernel: its time, percent of each roof, and what its warps wait for most."""
    table = Table("kernel", "us", "registers", *ROOFS, "warps wait for", box=box.SIMPLE)
    for kernel in found:
        roofs = ["-" if x is None else f"{x:.0f} %" for x in kernel.roofs.values()]
        waits = ", ".join(f"{name} {x:.0%}" for name, x in list(kernel.stalls.items())[:3])
        table.add_row(
            kernel.kernel, f"{kernel.microseconds:.1f}", str(kernel.registers or "-"), *roofs,
            waits or "-",
        )  # fmt: skip
    return table


def notes(problem: Problem) -> list[str]:
    """What a reader of a plan should know about how the call is done."""
    if not problem.is_widened:
        return []
    return [
        f"{problem.dtype} has no kernels yet: q, k and v are widened to 16 bits, which is exact, "
        "and this is the plan of the 16-bit call"
    ]
