"""Generates the README's table of features by device, and the list of kernels in
docs/kernels/list.md.

``python tools/support_matrix.py`` prints both, ``--write`` puts them into the pages, and
``--check`` exits with 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flash_cute.kernels import KernelConfig, kernels  # noqa: E402

README, LIST = ROOT / "README.md", ROOT / "docs" / "kernels" / "list.md"
BEGIN, END = "<!-- support-matrix -->", "<!-- /support-matrix -->"

OPS = {"fwd": "forward", "bwd": "backward", "decode": "decode"}
ARCHS = {80: "sm_80 and newer", 90: "sm_90a"}
YES = "yes"
_WIDENED = "widened to 16 bits; to fp32 with fp16 and a tensor as descale of q or k"
_QUANTISED = "quantised on append"

# Features: (support on the CPU, on CUDA).
FEATURES = {
    "fp16, bf16": (YES, YES),
    "fp32, fp64": (YES, "fp32: in TF32 if torch's matmuls are, else as accurate as fp32"),
    "e4m3 q, k and v, forward": (
        "weights in e4m3, out in bf16 or fp16; widened with softcap, ALiBi, dropout, sparse",
        f"the same on Hopper; else {_WIDENED}",
    ),
    "other fp8 q, k and v, forward": (_WIDENED, _WIDENED),
    "head dims, of v its own": ("any", "1 to {largest}"),
    "backward": (YES, YES),
    "bitwise repeatable": (
        YES,
        "out, dk and dv (but of long sparse calls); all with `deterministic=True`",
    ),
    "causal mask, sliding window, grouped-query heads": (YES, YES),
    "packed and varlen, `seqused_q`, `seqused_k`": (YES, YES),
    "paged keys and values (`block_table`), forward": (YES, YES),
    "key/value cache (`flash_attn_with_kvcache`), forward": (YES, "fp16, bf16"),
    "caches of e4m3 or int8, with descales": (
        _QUANTISED,
        f"{_QUANTISED}; read in 8 bits by up to 64 queries a kv head, and by e4m3 queries on "
        "Hopper, else copied to q's dtype",
    ),
    "softcap, ALiBi slopes, attention sinks": (YES, YES),
    "dropout, probabilities, `softmax_lse` and its gradient": (YES, YES),
}


def merged(rows: Iterable[KernelConfig]) -> list[KernelConfig]:
    """Merges rows that differ only in dtype, then rows that differ only in tier.

    Their values are joined by ", ", in the place of the first row.
    """
    rows = [
        replace(row, id="", built=True, cache=None if row.cache == row.dtype else row.cache)
        for row in rows
    ]
    dtypes: dict[KernelConfig, list[str]] = {}
    for row in rows:
        dtypes.setdefault(replace(row, dtype=""), []).append(row.dtype)
    tiers: dict[KernelConfig, list[str]] = {}
    for row, found in dtypes.items():
        tiers.setdefault(replace(row, dtype=", ".join(found), tier=""), []).append(row.tier)
    return [replace(row, tier=", ".join(found)) for row, found in tiers.items()]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def kernel_table(rows: Iterable[KernelConfig]) -> str:
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
        op = OPS[row.op] + {"interval": "", "list": ", sparse", "tokens": ", groups"}[row.tiles]
        if row.cache is not None:
            op += f", cache of {row.cache}"
        kind = (op, ARCHS[row.arch], row.dtype, row.tier, dims)
        tile = (f"{row.block_m} x {row.block_n}", row.stages, row.warps, row.ctas, row.cluster)
        lines.append((*kind, *tile, f"{row.smem_bytes / 1024:g} KiB"))
    return table(head, lines)


def feature_table(rows: Iterable[KernelConfig]) -> str:
    """One line for each feature."""
    largest = max(min(row.head_dim, row.head_dim_v) for row in rows)
    lines = [(name, cpu, cuda.format(largest=largest)) for name, (cpu, cuda) in FEATURES.items()]
    return table(("", "CPU", "CUDA"), lines)


def main(argv: list[str] | None = None) -> int:
    """Prints, writes or checks the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="put the tables into their pages")
    action.add_argument("--check", action="store_true", help="fail if a page differs")
    options = parser.parse_args(argv)
    rows = kernels()
    for page, content in ((README, feature_table(rows)), (LIST, kernel_table(rows))):
        if not (options.write or options.check):
            print(content, end="\n\n")
            continue
        text = page.read_text()
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            print(f"{page.name} must hold {BEGIN} and then {END}", file=sys.stderr)
            return 1
        current = f"{before}{begin}\n{content}\n{end}{after}"
        if options.write:
            page.write_text(current)
        elif current != text:
            print(f"{page.name} is out of date: python tools/support_matrix.py --write")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
