"""Plain attention on the CPU beside torch's SDPA: `python -m benchmarks.cpu --json F`.

Both get the same tensors, (batch, seqlen, heads, dim), SDPA transposed views of them; a training
call is forward and backward. Turns alternate, and a speed is the median of the ratios of turns that
followed each other: the machine may be busy with other things.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_cute

from . import report, timing
from .rivals import OURS, Work
from .suites import Case

RIVAL = "sdpa"
MODES = ("forward", "training")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# (batch, heads, heads_k, seqlen)
SHAPES = (
    *((1, 8, 8, seqlen) for seqlen in (16, 128, 512, 1024, 2048, 4096)),
    (1, 8, 2, 1024),
    (8, 8, 8, 512),
)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def cases(dtypes: Iterable[str], longest: int) -> list[Case]:
    """Head dim 64, with and without a causal mask."""
    return [
        Case(dtype, batch, heads, heads_k, seqlen, seqlen, 64, 64, causal)
        for dtype in dtypes
        for batch, heads, heads_k, seqlen in SHAPES
        for causal in (False, True)
        if seqlen <= longest
    ]


def attentions(case: Case) -> dict[str, Attention]:
    """Each candidate by name."""

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        gqa = case.heads != case.heads_k
        out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=gqa)
        return out.transpose(1, 2)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_cute.flash_attn_func(q, k, v, causal=case.causal)

    return {OURS: ours, RIVAL: sdpa}


def works(case: Case, mode: str) -> dict[str, Work]:
    """What is timed of each candidate."""
    torch.manual_seed(case.seed)
    kind: dict[str, Any] = {"dtype": DTYPES[case.dtype]}
    q = torch.randn(case.batch, case.seqlen_q, case.heads, case.dim, **kind)
    k, v = torch.randn(2, case.batch, case.seqlen_k, case.heads_k, case.dim, **kind).unbind()
    dout = torch.randn_like(q)
    leaves = [x.requires_grad_(mode == "training") for x in (q, k, v)]

    def work(attention: Attention) -> Work:
        def run() -> tuple[Tensor, ...]:
            out = attention(*leaves)
            return torch.autograd.grad(out, leaves, dout) if mode == "training" else (out,)

        return Work(run, lambda results: results, nullcontext)

    return {name: work(attention) for name, attention in attentions(case).items()}


def measure(case: Case, mode: str, rounds: int, target_ms: float) -> dict[str, Any]:
    """Milliseconds of both, and ours as a share of the rival's speed."""
    device = torch.device("cpu")
    turns = timing.interleave(works(case, mode), rounds, target_ms, device, timing.Monitor(device))
    for name, turn in turns.items():
        if turn.failure:
            raise RuntimeError(f"{name}, {case}: {turn.failure}")
    ours, rival = turns[OURS], turns[RIVAL]
    ratios = [b.ms / a.ms for a, b in zip(ours.rounds, rival.rounds, strict=True)]
    return {
        "case": str(case),
        "mode": mode,
        "ms": {name: turn.median_ms for name, turn in turns.items()},
        "speed": median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Markdown, a line a case."""
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["mode"]] = row
    lines = [f"| case | {' | '.join(MODES)} |", f"| --- |{' --- |' * len(MODES)}"]
    for case, modes in by_case.items():
        cells = (
            f"{modes[m]['ms'][OURS]:.3g} ms, {modes[m]['speed']:.2f}" if m in modes else ""
            for m in MODES
        )
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu", description=__doc__)
    parser.add_argument("--dtypes", default="fp32,bf16", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest case")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each candidate")
    parser.add_argument("--target-ms", type=float, default=20.0, help="what a turn takes at least")
    parser.add_argument("--threads", type=int, help="torch's threads; default: as many as it takes")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if unknown := set(options.dtypes.split(",")) - DTYPES.keys():
        parser.error(f"--dtypes {options.dtypes}: {', '.join(unknown)} is none of {list(DTYPES)}")
    problems = cases(options.dtypes.split(","), options.longest)
    rows = []
    for case in problems:
        for mode in options.modes.split(","):
            rows.append(measure(case, mode, options.rounds, options.target_ms))
            print(f"{case} {mode}: {rows[-1]['ms']}, speed {rows[-1]['speed']:.2f}", flush=True)
            if options.json:
                result = {
                    "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    "machine": report.machine(device, timing.Monitor(device)),
                    "threads": torch.get_num_threads(),
                    "versions": report.versions({}),
                    "rows": rows,
                }
                report.save(result, options.json)
    print(*table(rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
