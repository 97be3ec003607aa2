"""Time of sparse attention over our own dense call of the same sizes, choosing blocks included.

    python -m benchmarks.sparse --json build/sparse.json                      # CPU: 4096 tokens
    python -m benchmarks.sparse --seqlen 32768 --heads 32 --dim 128

Of each pattern and ratio: the time to choose blocks and make their lists, forward, and backward,
each the median of some calls, as shares of the dense forward or backward; and the sparsity that was
realised. The numbers of a run are of one process, dense and sparse in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import turns
from flash_cute import flash_attn_func
from flash_cute.library import can_use_cuda
from flash_cute.sparse import LearnedGate, Sparse, SparsePattern, choose_blocks

Qkv = tuple[Tensor, Tensor, Tensor]
COLUMNS = ("pattern", "asked", "realised", "choose", "forward", "with_choice", "backward")


def seconds(work: Callable[[], Any], calls: int, device: str) -> float:
    """The median time of a call, after one to warm up; on CUDA the GPU's."""
    if device == "cuda":
        return turns({"": work}, calls)[""] / 1000
    times = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def both(qkv: Qkv, sparse: Sparse | None, options: argparse.Namespace) -> tuple[float, float]:
    """The times of forward and of backward."""
    calls, device = options.calls, options.device
    given = {"causal": options.causal, "deterministic": options.deterministic, "sparse": sparse}
    with torch.no_grad():
        forward = seconds(lambda: flash_attn_func(*qkv, **given), calls, device)
    out = flash_attn_func(*qkv, **given)
    dout = torch.randn_like(out)
    backward = seconds(
        lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True), calls, device
    )
    return forward, backward


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of dense attention, and a row of :data:`COLUMNS` for each pattern and ratio."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    shape = (3, 1, options.seqlen, options.heads, options.dim)
    drawn = torch.randn(shape, device=options.device, dtype=dtype).unbind()
    q, k, v = (x.requires_grad_() for x in drawn)
    qkv = q, k, v
    gate = LearnedGate(options.heads, options.heads, options.dim, device=options.device)
    dense = both(qkv, None, options)
    rows = []
    for pattern in map(SparsePattern, options.patterns):
        for ratio in options.ratios:

            def choose(pattern: SparsePattern = pattern, ratio: float = ratio) -> Any:
                chosen = choose_blocks(
                    q.detach(), k.detach(), pattern, ratio, causal=options.causal, gate=gate
                )
                return chosen, chosen.value()

            choice, sparse = choose()
            chosen = seconds(choose, options.calls, options.device)
            forward, backward = both(qkv, sparse, options)
            shares = (chosen, forward, chosen + forward)
            row = (pattern.value, ratio, choice.sparsity().item(), *(x / dense[0] for x in shares))
            rows.append(dict(zip(COLUMNS, (*row, backward / dense[1]), strict=True)))
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    sizes = {x: getattr(options, x) for x in ("seqlen", "heads", "dim", "causal", "deterministic")}
    return {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads(),
            **sizes, "dense_ms": [1000 * x for x in dense], "rows": rows}  # fmt: skip


def markdown(found: dict[str, Any]) -> str:
    """The rows as a table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in found["rows"]:
        numbers = " | ".join(f"{row[x]:.2f}" for x in COLUMNS[1:])
        lines.append(f"| {row['pattern']} | {numbers} |")
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Forward's time, choosing included, over the share that was left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["pattern"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["pattern"] == name]
        realised, times = ([row[x] for row in rows] for x in ("realised", "with_choice"))
        axes.plot(realised, times, marker="o", label=name)
    axes.plot([0, 1], [1, 0], color="grey", linewidth=0.5)  # what is left out costs nothing
    axes.set(xlabel="share of the visible pairs left out", ylabel="time over dense", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if can_use_cuda() else "cpu")
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="backward, dense too")
    names = [pattern.value for pattern in SparsePattern]
    parser.add_argument("--patterns", nargs="+", default=names, choices=names)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8, 0.9])
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(argv)
    found = measure(options)
    print("dense: forward {:.1f} ms, backward {:.1f} ms".format(*found["dense_ms"]))
    print(markdown(found))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        draw(found, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
