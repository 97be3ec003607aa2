"""The README's table of kernels, from csrc/configs.def, and its table of features by device.

``python tools/support_matrix.py`` prints both, ``--write`` puts them into the README, and
``--check`` exits with 1 if the README holds anything else.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "csrc" / "configs.def"
README = ROOT / "README.md"
BEGIN, END = "<!-- support-matrix -->", "<!-- /support-matrix -->"

OPS = {"Fwd": "forward", "Bwd": "backward", "Decode": "decode"}
ARCHS = {"Sm80": "sm_80 and newer", "Sm90": "sm_90a"}
YES, NO = "yes", "-"

# What a caller can ask for: (on the CPU, on CUDA).
FEATURES = {
    "fp16, bf16": (YES, YES),
    "fp32": (YES, "in TF32 if torch's matmuls are, else as accurate as fp32"),
    "fp64": (YES, NO),
    "head dim": ("any", "1 to {largest}"),
    "a head dim of v other than q's": (YES, YES),
    "backward": (YES, YES),
    "bitwise repeatable forward": (YES, YES),
    "bitwise repeatable backward": (YES, "dk and dv; all with `deterministic=True`"),
    "causal mask, sliding window": (YES, YES),
    "grouped-query heads (GQA, MQA)": (YES, YES),
    "packed qkv and kv": (YES, YES),
    "sequences of different lengths, `seqused_q`, `seqused_k`": (YES, YES),
    "paged keys and values (`block_table`), forward": (YES, YES),
    "key/value cache (`flash_attn_with_kvcache`), forward": (
        YES,
        "fp16, bf16, head dim up to {cached}",
    ),
    "`softmax_lse` and its gradient": (YES, YES),
    "softcap": (YES, YES),
    "ALiBi slopes": (YES, YES),
    "attention sink and its gradient": (YES, YES),
    "dropout": (YES, YES),
    "returned probabilities": (YES, YES),
    "fp8 q, k and v, forward": ("widened to 16 bits", "widened to 16 bits"),
}


class Row(NamedTuple):
    """One row of configs.def, in its order."""

    op: str
    arch: str
    dtype: str
    tier: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    stages: int
    warps: int
    ctas: int
    cluster: int

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA, as KernelConfig::smem_bytes() in csrc/core/config.h has it."""
        element = 4 if self.dtype.startswith("TF32") else 2
        kv = element * self.block_n * (self.head_dim + self.head_dim_v)
        if self.op == "Fwd" and self.arch == "Sm90":
            q, out = 2 * self.block_m * self.head_dim, 2 * self.block_m * self.head_dim_v
            draws = self.tier == "Rich" and self.warps == 8 and self.head_dim_v < 256
            least = self.stages * kv + q + (16 * self.block_m if draws else 0) + 1024
            return next((b for b in (least + q + out, least + out) if b <= 227 * 1024), least)
        if self.op == "Fwd":
            return element * self.block_m * max(self.head_dim, self.head_dim_v) + self.stages * kv
        if self.op == "Decode":
            tiles = self.stages * kv + element * self.block_m * self.head_dim
            if self.arch == "Sm80":
                return tiles + element * self.block_m * self.head_dim + 3072
            return tiles + 2 * 4 * self.block_m * self.head_dim_v + 3072  # outputs of other CTAs
        q_dout = element * self.block_m * (self.head_dim + self.head_dim_v)
        if element == 4:
            return kv + self.stages * q_dout
        if self.arch == "Sm90":
            tiles = 4 * self.block_m * self.block_n  # two of dS
            if self.cluster == 1:
                tiles += 4 * self.block_m * self.head_dim  # dQ
                tiles += 2 * self.block_n * self.head_dim  # K of the next tile
            else:
                tiles += 2 * self.block_n * (self.head_dim - 128)  # K of the other CTA
            least = kv + self.stages * (q_dout + 8 * self.block_m) + tiles + 1024
            return least if self.cluster == 1 else -(-least // 1024) * 1024
        whole_keys = self.block_n == 32 * self.warps
        score_tiles = (1 if whole_keys else 2) * 2 * self.block_m * self.block_n
        return kv + self.stages * (q_dout + 8 * self.block_m) + score_tiles


def kernels() -> list[Row]:
    """Every row of configs.def."""
    rows = []
    for line in re.findall(r"^KERNEL\((.*)\)", CONFIGS.read_text(), re.MULTILINE):
        op, arch, dtype, tier, *numbers = line.replace(" ", "").split(",")
        rows.append(Row(op, arch, dtype, tier, *map(int, numbers)))
    return rows


def merged(rows: list[Row]) -> list[Row]:
    """Rows that differ in dtype alone become one, then rows that differ in tier alone.

    Those of different shared memory stay apart. The values are joined by ", "; a row stands where
    the first one stood.
    """
    for field in ("dtype", "tier"):
        blank: dict[str, Any] = {field: ""}
        values: dict[tuple[Row, int], list[str]] = {}
        for row in rows:
            values.setdefault((row._replace(**blank), row.smem_bytes), []).append(
                getattr(row, field)
            )
        rows = []
        for (row, _), found in values.items():
            joined: dict[str, Any] = {field: ", ".join(found)}
            rows.append(row._replace(**joined))
    return rows


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def kernel_table(rows: list[Row]) -> str:
    """One line for each configuration, its dtypes and tiers together."""
    head = (
        "op", "GPUs", "dtypes", "tiers", "head dim up to", "tile (queries x keys)", "stages",
        "warps", "CTAs an SM", "CTAs a cluster", "shared memory a CTA",
    )  # fmt: skip
    lines = []
    for row in merged(rows):
        dims = str(row.head_dim)
        if row.head_dim_v != row.head_dim:
            dims += f", of v {row.head_dim_v}"
        tile = f"{row.block_m} x {row.block_n}"
        smem = f"{row.smem_bytes / 1024:g} KiB"
        kind = (OPS[row.op], ARCHS[row.arch], row.dtype.lower(), row.tier.lower())
        lines.append((*kind, dims, tile, row.stages, row.warps, row.ctas, row.cluster, smem))
    return table(head, lines)


def feature_table(rows: list[Row]) -> str:
    """One line for each feature."""
    largest = max(min(row.head_dim, row.head_dim_v) for row in rows)
    cached = max(min(row.head_dim, row.head_dim_v) for row in rows if row.op == "Decode")
    lines = [
        (name, cpu, cuda.format(largest=largest, cached=cached))
        for name, (cpu, cuda) in FEATURES.items()
    ]
    return table(("", "CPU", "CUDA"), lines)


def main(argv: list[str] | None = None) -> int:
    """Prints, writes or checks the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="put the tables into README.md")
    action.add_argument("--check", action="store_true", help="fail if README.md differs")
    options = parser.parse_args(argv)
    rows = kernels()
    tables = f"{feature_table(rows)}\n\n{kernel_table(rows)}"
    if not (options.write or options.check):
        print(tables)
        return 0

    readme = README.read_text()
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        print(f"{README.name} must hold {BEGIN} and then {END}", file=sys.stderr)
        return 1
    current = f"{before}{begin}\n{tables}\n{end}{after}"
    if options.write:
        README.write_text(current)
    elif current != readme:
        print(f"{README.name} is out of date: python tools/support_matrix.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
