"""Registers and spills of every kernel, read from the build's log: ``regs.py LOG``.

The build passes ``-Xptxas=-v``, so the log holds the assembler's report. Exits with 1 if a kernel
spills more than SPILLS or SPILLS_OF_LISTS allow.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# The most bytes of spill stores per thread in the sm80 family, by (kernel, tier, head dim). See
# docs/performance.md.
SPILLS = {
    ("forward", "Plain", 64): 8,
    ("forward", "Plain", 96): 8,
    ("forward", "Rich", 32): 64,
    ("forward", "Rich", 64): 64,
    ("forward", "Rich", 96): 64,
    ("forward", "Rich", 128): 64,
    ("forward", "Rich", 192): 64,
    ("forward", "Rich", 256): 64,
    ("backward", "Plain", 64): 12,
    ("backward", "Plain", 128): 8,
    ("backward", "Plain", 256): 12,
    ("backward", "Rich", 64): 32,
    ("backward", "Rich", 128): 56,
    ("backward", "Rich", 256): 44,
}
# The same in the sm90 family's kernels for lists of tiles, whose token masks need registers. In
# backward the threads that load spill, which have 40.
SPILLS_OF_LISTS = {
    ("forward", "Rich", 128): 16,
    ("backward", "Plain", 64): 40,
    ("backward", "Plain", 128): 76,
    ("backward", "Rich", 64): 8,
    ("backward", "Rich", 128): 48,
    ("backward_2cta", "Plain", 192): 8,
    ("backward_2cta", "Plain", 256): 32,
    ("backward_2cta", "Rich", 192): 12,
    ("backward_2cta", "Rich", 256): 36,
}
# The same in the kernels of e4m3 inputs, by head dim: in threads that load, and at 128 in sums of
# one level.
SPILLS_OF_E4M3 = {64: 8, 128: 104, 256: 120}
_E4M3 = "4"  # its place among DType
_TIERS = ("Plain", "Rich")

_FIELDS = {
    "KernelConfig": (
        "op", "arch", "dtype", "tier", "head_dim", "head_dim_v",
        "block_m", "block_n", "stages", "warps", "ctas", "cluster", "tiles", "cache",
    ),
    "FlashForwardKernelConfig": (
        "dtype", "d_head", "B_r", "B_c", "n_warps", "async_copy", "eager_load_blocks", "swizzled",
        "Q_mma_load_K_tiles", "K_mma_load_K_tiles", "V_mma_load_K_tiles",
        "mma_double_buffer_loads", "optimized_softmax",
    ),
}  # fmt: skip


class Usage(NamedTuple):
    """What the assembler reports of one kernel for one GPU."""

    kernel: str
    config: str
    gpu: str
    registers: int
    spill_bytes: int


def parse(log: str) -> list[Usage]:
    """The kernels in a build log."""
    pattern = re.compile(
        r"Compiling entry function '(?P<symbol>\S+)' for '(?P<gpu>\w+)'"
        r".*?(?P<spill>\d+) bytes spill stores.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    matches = list(pattern.finditer(log))
    names = _demangle([match["symbol"] for match in matches])
    return [
        Usage(*_kernel_and_config(name), match["gpu"], int(match["registers"]), int(match["spill"]))
        for name, match in zip(names, matches, strict=True)
    ]


def excess(usages: list[Usage]) -> list[Usage]:
    """Kernels that spill more than SPILLS allows."""
    return [usage for usage in usages if usage.spill_bytes > _allowed(usage)]


def _allowed(usage: Usage) -> int:
    fields = dict(part.split() for part in usage.config.split(", ")) if usage.config else {}
    if fields.get("dtype") == _E4M3:
        return SPILLS_OF_E4M3[int(fields["head_dim"])]
    of_hopper = SPILLS_OF_LISTS if fields.get("tiles") == "1" else {}
    table = SPILLS if fields.get("arch") == "80" else of_hopper
    tier = _TIERS[int(fields.get("tier", 0))]
    return table.get((usage.kernel, tier, int(fields.get("head_dim", 0))), 0)


def _demangle(symbols: list[str]) -> list[str]:
    output = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    ).stdout
    return output.splitlines()


def _kernel_and_config(name: str) -> tuple[str, str]:
    parameters = r"\((?:[^()]|\([^()]*\))*\)"  # those of templates have casts
    kernel = re.search(rf"(\w+)(<.*>)?{parameters}$", name)
    values = re.search(r"\b(\w*KernelConfig)\{(.*?)\}", name)
    config = ""
    if values:
        numbers = (part.rpartition(")")[2].strip() for part in values[2].split(","))
        config = ", ".join(f"{f} {n}" for f, n in zip(_FIELDS[values[1]], numbers, strict=False))
    return kernel[1] if kernel else name, config


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", type=Path)
    usages = parse(parser.parse_args(arguments).log.read_text(errors="replace"))
    if not usages:
        print("no kernel in the log: was anything compiled?", file=sys.stderr)
        return 1
    for usage in usages:
        print(
            f"{usage.kernel:18} {usage.gpu:8} {usage.registers:4} registers "
            f"{usage.spill_bytes:4} spilled  {usage.config}"
        )
    spilling = excess(usages)
    for usage in spilling:
        print(f"spills too much: {usage}", file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
