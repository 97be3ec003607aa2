"""Tokens per second of decoding over caches of bf16, e4m3 and int8, on a GPU.

    python -m benchmarks.quantized_cache --megabytes 256 --json build/quantized_cache.json

A step of one layer: all sequences attend to their whole caches, which hold as many megabytes as
``--megabytes`` says in bf16, and half of that in 8 bits. Steps are CUDA graphs over several caches
in turn, so that none is in L2. Descales are of heads, or of tokens where a column says so. Medians
of turns that take each in order; ratios are of tokens per second, to bf16. Each result is compared
with fp64 first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import turns
from flash_cute import ops

E4M3, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
UNIT = {E4M3: 3 / 448, INT8: 3 / 127}
STEPS = 20  # of a graph


def sizes_of(options: argparse.Namespace, seqlen: int) -> tuple[int, int]:
    """The batch that fills the megabytes with caches of this length, and how many caches take
    turns."""
    of_sequence = seqlen * options.heads_k * options.dim * 4
    batch = max(1, round(options.megabytes * 2**20 / of_sequence))
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return batch, max(3, -(-3 * l2 // (batch * of_sequence // 2)))


class Caches:
    """Caches (batch, seqlen, heads_k, dim) of one dtype that take turns, and their descales."""

    def __init__(
        self, shape: tuple[int, ...], count: int, dtype: torch.dtype, tokens: bool
    ) -> None:
        self.unit = UNIT.get(dtype)
        self.pairs = [(self._drawn(shape, dtype), self._drawn(shape, dtype)) for _ in range(count)]
        of_descale = shape[:3] if tokens else (shape[0], shape[2])
        self.descale: Tensor | None = None
        if self.unit is not None:
            self.descale = torch.full(of_descale, self.unit, device="cuda")

    def _drawn(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.randn(shape, device="cuda", dtype=BF16)
        if self.unit is None:
            return x
        x = x.div_(self.unit)
        return (
            x.clamp_(-448, 448).to(E4M3) if dtype == E4M3 else x.round_().clamp_(-127, 127).to(INT8)
        )

    def attend(self, q: Tensor, turn: int) -> Tensor:
        """out of one step."""
        k, v = self.pairs[turn % len(self.pairs)]
        if self.descale is None:
            return ops.attend_kvcache(q, k, v, is_causal=True)[0]
        return ops.attend_quantized_kvcache(q, k, v, self.descale, self.descale, is_causal=True)[0]

    def error(self, q: Tensor) -> float:
        """The largest error of the first sequence's first kv head, relative to its largest out."""
        group = q.shape[2] // self.pairs[0][0].shape[2]
        factor = 1.0 if self.unit is None else float(torch.tensor(self.unit).float())
        k, v = (x[0, :, 0].double() * factor for x in self.pairs[0])
        scores = q[0, :, :group].double() @ k.T * q.shape[-1] ** -0.5
        row = torch.arange(q.shape[1], device="cuda")[:, None, None] + len(k) - q.shape[1]
        seen = torch.arange(len(k), device="cuda") <= row
        expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        got = self.attend(q, 0)[0, :, :group].double()
        return float((got - expected).abs().max() / expected.abs().max())


def captured(step: Callable[[int], Tensor]) -> Callable[[], None]:
    """A graph of STEPS steps."""
    for turn in range(3):
        step(turn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(STEPS):
            step(turn)
    return graph.replay


def measure(options: argparse.Namespace, seqlen: int) -> dict[str, Any]:
    """Times of a step, errors and tokens per second for one length."""
    batch, count = sizes_of(options, seqlen)
    shape = (batch, seqlen, options.heads_k, options.dim)
    q = torch.randn(batch, options.queries, options.heads, options.dim, device="cuda", dtype=BF16)
    kinds = {"bf16": (BF16, False), "e4m3": (E4M3, False), "int8": (INT8, False),
             "e4m3 tokens": (E4M3, True), "int8 tokens": (INT8, True)}  # fmt: skip
    caches = {name: Caches(shape, count, *kind) for name, kind in kinds.items()}
    errors = {name: x.error(q) for name, x in caches.items()}
    graphs = {name: captured(partial(x.attend, q)) for name, x in caches.items()}
    us = {name: 1e3 * ms / STEPS for name, ms in turns(graphs, options.rounds).items()}
    tokens = {name: batch * options.queries / x * 1e6 for name, x in us.items()}
    ratios = {name: x / tokens["bf16"] for name, x in tokens.items()}
    return {"seqlen": seqlen, "batch": batch, "caches": count, "us": us, "error": errors,
            "tokens_per_s": tokens, "ratio": ratios}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a table in Markdown."""
    names = list(rows[0]["us"])
    head = ["keys", "batch", "bf16 us", *(f"{name} us (ratio)" for name in names[1:])]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [f"{row['us'][name]:.1f} ({row['ratio'][name]:.2f}x)" for name in names[1:]]
        lines.append([str(row["seqlen"]), str(row["batch"]), f"{row['us']['bf16']:.1f}", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=256, help="K and V of a step, in bf16")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    sizes = {x: getattr(options, x) for x in ("megabytes", "queries", "heads", "heads_k", "dim")}
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **sizes}
    with torch.no_grad():
        found["rows"] = [measure(options, seqlen) for seqlen in options.seqlens]
    print(table(found["rows"]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
