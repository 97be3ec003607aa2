"""Tokens per second of decoding over caches of bf16, e4m3 and int8, on a GPU.

    python -m benchmarks.quantized_cache --megabytes 256 --json build/quantized_cache.json

A step of one layer: all sequences attend to their whole caches, which hold as many megabytes as
``--megabytes`` says in bf16, and half of that in 8 bits. Steps are CUDA graphs over several caches
in turn, so that none is in L2. Descales are of heads, or of tokens where a column says so. Medians
of turns that take each in order; ratios are of tokens per second, to bf16. Each result is compared
with fp64 first.

    python -m benchmarks.quantized_cache --prefill --queries 512 2048 --json build/prefill.json

Chunks of prompts, the last ``--queries`` tokens of each sequence, causal, at head dims 64, 128 and
256, dense and in pages of 16: q and caches of bf16, q of bf16 over caches of e4m3, which each call
copies, and q of e4m3 over those. What rounds q to e4m3 is not measured.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import turns
from flash_cute import flash_attn_with_kvcache, ops

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
    queries = options.queries[0]
    q = torch.randn(batch, queries, options.heads, options.dim, device="cuda", dtype=BF16)
    kinds = {"bf16": (BF16, False), "e4m3": (E4M3, False), "int8": (INT8, False),
             "e4m3 tokens": (E4M3, True), "int8 tokens": (INT8, True)}  # fmt: skip
    caches = {name: Caches(shape, count, *kind) for name, kind in kinds.items()}
    errors = {name: x.error(q) for name, x in caches.items()}
    graphs = {name: captured(partial(x.attend, q)) for name, x in caches.items()}
    us = {name: 1e3 * ms / STEPS for name, ms in turns(graphs, options.rounds).items()}
    tokens = {name: batch * queries / x * 1e6 for name, x in us.items()}
    ratios = {name: x / tokens["bf16"] for name, x in tokens.items()}
    return {"seqlen": seqlen, "batch": batch, "caches": count, "us": us, "error": errors,
            "tokens_per_s": tokens, "ratio": ratios}  # fmt: skip


class Chunk:
    """The last queries of sequences over their caches (batch, seqlen, heads_k, dim), or pages of
    them in any order; of bf16 and rounded to e4m3."""

    def __init__(self, options: argparse.Namespace, sizes: tuple[int, int, int], page: int) -> None:
        queries, seqlen, dim = sizes
        of_sequence = seqlen * options.heads_k * dim * 4
        batch = max(1, round(options.megabytes * 2**20 / of_sequence))
        self.sizes = (batch, queries, seqlen, dim)
        rows, columns = page or seqlen, seqlen // page if page else 1
        order = torch.randperm if page else torch.arange
        self.table = order(batch * columns, device="cuda").view(batch, columns).int()
        shape = (batch * columns, rows, options.heads_k, dim)
        q = torch.randn(batch, queries, options.heads, dim, device="cuda", dtype=BF16)
        wide = [q, *(torch.randn(shape, device="cuda", dtype=BF16) for _ in range(2))]
        self.descale = torch.full((1,), UNIT[E4M3], device="cuda")
        narrow = [x.float().div_(self.descale).clamp_(-448, 448).to(E4M3) for x in wide]
        self.kinds = {"bf16": wide, "bf16 q, e4m3 cache": [q, *narrow[1:]], "e4m3": narrow}

    def attend(self, name: str, _: int = 0) -> Tensor:
        """out of one call."""
        q, k, v = self.kinds[name]
        named = (("q_descale", q), ("k_descale", k), ("v_descale", v))
        options: dict[str, Any] = {n: self.descale for n, x in named if x.dtype == E4M3}
        if self.table.shape[1] > 1:
            options["block_table"] = self.table
        out: Tensor = flash_attn_with_kvcache(q, k, v, causal=True, **options)
        return out

    def error(self, name: str) -> float:
        """The root mean square error of the first sequence's first kv head, relative to out."""
        q, k, v = (x.double() for x in self.kinds[name])
        factors = [float(self.descale) if x.dtype == E4M3 else 1.0 for x in self.kinds[name]]
        group = q.shape[2] // k.shape[2]
        k, v = (x[self.table[0].long()].flatten(0, 1)[:, 0] for x in (k, v))
        scores = (
            q[0, :, :group].transpose(0, 1) @ k.T * (factors[0] * factors[1] * k.shape[1] ** -0.5)
        )
        row = torch.arange(q.shape[1], device="cuda")[:, None] + len(k) - q.shape[1]
        seen = torch.arange(len(k), device="cuda") <= row
        expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v * factors[2]
        got = self.attend(name)[0, :, :group].transpose(0, 1).double()
        return float((got - expected).norm() / expected.norm())


def measure_prefill(
    options: argparse.Namespace, sizes: tuple[int, int, int], page: int
) -> dict[str, Any]:
    """Times of a call, errors and TFLOP/s of one size."""
    chunk = Chunk(options, sizes, page)
    batch, queries, seqlen, dim = chunk.sizes
    errors = {name: chunk.error(name) for name in chunk.kinds}
    graphs = {name: captured(partial(chunk.attend, name)) for name in chunk.kinds}
    us = {name: 1e3 * ms / STEPS for name, ms in turns(graphs, options.rounds).items()}
    flops = 4 * batch * options.heads * queries * (seqlen - (queries - 1) / 2) * dim
    ratios = {name: us["bf16"] / x for name, x in us.items()}
    return {"dim": dim, "page": page, "queries": queries, "seqlen": seqlen, "batch": batch,
            "us": us, "error": errors, "tflops": {name: flops / x / 1e6 for name, x in us.items()},
            "ratio": ratios}  # fmt: skip


def prefill_table(rows: list[dict[str, Any]]) -> str:
    """Rows as a table in Markdown."""
    names = list(rows[0]["us"])
    head = [
        "dim",
        "page",
        "queries",
        "keys",
        "batch",
        *(f"{x} TFLOP/s (ratio, error)" for x in names),
    ]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        of_names = [
            f"{row['tflops'][x]:.0f} ({row['ratio'][x]:.2f}x, {row['error'][x]:.1e})" for x in names
        ]
        sizes = [row["dim"], row["page"] or "dense", row["queries"], row["seqlen"], row["batch"]]
        lines.append([*map(str, sizes), *of_names])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
    parser.add_argument("--queries", type=int, nargs="+", default=[1])
    parser.add_argument("--prefill", action="store_true", help="chunks of prompts, q of e4m3, too")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256], help="of --prefill")
    parser.add_argument("--page", type=int, default=16, help="rows of a page, of --prefill")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if len(options.queries) > 1 and not options.prefill:
        parser.error("--queries takes one number without --prefill")
    if options.prefill and (wrong := [x for x in options.seqlens if x % options.page]):
        parser.error(f"--seqlens {wrong[0]} is no multiple of --page {options.page}")
    sizes = {x: getattr(options, x) for x in ("megabytes", "queries", "heads", "heads_k", "dim")}
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **sizes}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flash_cute: no kernel reads a cache")  # of copies
        if options.prefill:
            found["rows"] = [
                measure_prefill(options, (queries, seqlen, dim), page)
                for dim in options.dims
                for page in (0, options.page)
                for queries in options.queries
                for seqlen in options.seqlens
                if queries <= seqlen
            ]
        else:
            found["rows"] = [measure(options, seqlen) for seqlen in options.seqlens]
    print(prefill_table(found["rows"]) if options.prefill else table(found["rows"]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
