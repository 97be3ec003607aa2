"""``flash-cute profile``: one call under Nsight Compute, and the metrics that show its bottleneck.

The call runs in a process of its own (:mod:`flash_cute.cli.profiled`) under ``ncu``, which profiles
only an NVTX range. Percentages are relative to the metrics' peaks; metrics that this GPU or this
ncu does not have are left out.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

RANGE = "flash_cute"

_ACTIVE, _ELAPSED = ".avg.pct_of_peak_sustained_active", ".avg.pct_of_peak_sustained_elapsed"
# Possible bottlenecks of attention, and their metrics: the first that exists is used.
ROOFS = {
    "tensor pipe": [
        f"sm__pipe_tensor_op_gmma_cycles_active{_ACTIVE}",  # wgmma
        f"sm__pipe_tensor_op_hmma_cycles_active{_ACTIVE}",  # mma.sync
        f"sm__pipe_tensor_cycles_active{_ACTIVE}",
        f"sm__inst_executed_pipe_tensor{_ACTIVE}",
    ],
    "exponentials": [f"sm__inst_executed_pipe_xu{_ACTIVE}"],
    "shared memory": [f"l1tex__data_pipe_lsu_wavefronts_mem_shared{_ELAPSED}"],
    "L2": [f"lts__t_sectors{_ELAPSED}", f"lts__throughput{_ELAPSED}"],
    "DRAM": [f"dram__throughput{_ELAPSED}", f"gpu__dram_throughput{_ELAPSED}"],
}
_DURATION = "gpu__time_duration.sum"
_REGISTERS = "launch__registers_per_thread"
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
_NO_COUNTERS = "ERR_NVGPUCTRPERM"


class ProfileError(RuntimeError):
    """Nsight Compute is missing, or gave no report; the message says what to do."""


@dataclass(frozen=True)
class Profile:
    """One kernel of a call."""

    kernel: str
    microseconds: float
    registers: int | None
    roofs: dict[str, float | None]  # percent of the peak; None where there is no such metric
    stalls: dict[str, float] = field(default_factory=dict)  # share of a warp's waiting, descending


def find_ncu() -> str:
    """Path of ncu. Raises ProfileError."""
    found = shutil.which("ncu")
    if found is None:
        raise ProfileError(
            "ncu, of Nsight Compute, is not on the PATH; it comes with the CUDA toolkit "
            "(cuda-nsight-compute), or separately from developer.nvidia.com/nsight-compute"
        )
    return found


def run(arguments: Sequence[str], report: Path) -> list[Profile]:
    """Profiles a call, writes the report to a file for ncu-ui, and returns its kernels.

    ``arguments`` are those of :mod:`flash_cute.cli.profiled`. Raises ProfileError.
    """
    ncu = find_ncu()
    report.parent.mkdir(parents=True, exist_ok=True)
    wanted = [name for names in ROOFS.values() for name in names]
    _call(
        [
            ncu, "--nvtx", "--nvtx-include", f"{RANGE}/", "--target-processes", "all",
            "--set", "full", "--metrics", ",".join(_known(ncu, wanted)), "--force-overwrite",
            "--export", str(report), sys.executable, "-m", "flash_cute.cli.profiled", *arguments,
        ]
    )  # fmt: skip
    if not report.is_file():
        raise ProfileError(f"ncu left no report at {report}: it saw no kernel in the NVTX range")
    raw = ["--page", "raw", "--csv", "--print-units", "base"]
    return parse(_call([ncu, "--import", str(report), *raw]))


def parse(text: str) -> list[Profile]:
    """The kernels in ncu's ``--page raw --csv``: lines of names, of units, and one per kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    names, units, *rows = csv.reader(io.StringIO("\n".join(lines))) if len(lines) > 2 else ([], [])
    if not rows:
        raise ProfileError("ncu's report holds no kernel")
    unit_of = dict(zip(names, units, strict=True))
    return [_profile(dict(zip(names, row, strict=True)), unit_of) for row in rows]


def _profile(row: dict[str, str], unit_of: dict[str, str]) -> Profile:
    def number(name: str) -> float | None:
        try:
            return float(row.get(name, "").replace(",", ""))
        except ValueError:  # "n/a", or not there
            return None

    def first(names: list[str]) -> float | None:
        return next((x for name in names if (x := number(name)) is not None), None)

    to_us = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "s": 1e6}
    waits = {
        match[1]: x for name in row if (match := _STALL.fullmatch(name)) and (x := number(name))
    }
    whole = sum(waits.values())
    registers = number(_REGISTERS)
    return Profile(
        kernel=row.get("Kernel Name", "?"),
        microseconds=(number(_DURATION) or 0) * to_us.get(unit_of.get(_DURATION, "ns"), 1e-3),
        registers=None if registers is None else int(registers),
        roofs={name: first(metrics) for name, metrics in ROOFS.items()},
        stalls={x: waits[x] / whole for x in sorted(waits, key=lambda x: -waits[x])},
    )


def _known(ncu: str, wanted: list[str]) -> list[str]:
    """The metrics that this ncu has for this GPU: it refuses a call with any other."""
    listed = set(re.findall(r"^(\w+__\w+)", _call([ncu, "--query-metrics"]), re.MULTILINE))
    return [name for name in wanted if name.partition(".")[0] in listed] + [_DURATION]


def _call(command: list[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True)
    output = ended.stdout + ended.stderr
    if _NO_COUNTERS in output:
        raise ProfileError(
            "the driver keeps performance counters from this user (ERR_NVGPUCTRPERM): run as root, "
            "or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if ended.returncode != 0:
        last = "\n".join(output.splitlines()[-15:])
        raise ProfileError(f"{' '.join(command[:2])} ... ended with {ended.returncode}:\n{last}")
    return ended.stdout
