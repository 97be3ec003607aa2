"""Strong scaling of attention over ranks, beside one GPU and torch's own context_parallel.

    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --json cp.json
    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --seqlens 1048576 --rounds 2
    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --trace ring.json --strategies ring
    python -m benchmarks.context_parallel --plot ring.json ring.png
    python -m benchmarks.context_parallel --table benchmarks/results/context_parallel_h200.json

Milliseconds of forward and backward, causal, batch 1: the median of rounds, the slowest rank's.
``share`` is the time of one GPU over ranks times this. Each call is an NVTX range. Four
ranks and more have a row of two_dimensional, too. ``--trace`` writes what ran on the first rank's
GPU in one more step of each strategy: stream, begin and duration in us of each kernel and copy;
``--plot`` draws it, of the shortest sequence, and ``--table`` prints results as docs have them.
"""

# ruff: noqa: B023, E731  calls are made before the next turn of the loop

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flash_cute
from flash_cute.distributed import ContextParallel, cp_attention

CANDIDATES = ("all_gather", "ring", "ulysses", "two_dimensional", "torch")
STRATEGIES = ("all_gather", "ring", "ulysses")
KINDS = {"attention": "#1f77b4", "communication": "#d62728", "the rest": "#999999"}


def measure(call: Callable[[], None], name: str, rounds: int, device: torch.device) -> list[float]:
    """Milliseconds of each round on the slowest rank, after one that is not counted."""
    times = []
    for i in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.cuda.nvtx.range_push(name)
        call()
        if device.type == "cuda":
            torch.cuda.nvtx.range_pop()
            torch.cuda.synchronize()
        took = torch.tensor([1e3 * (time.perf_counter() - start)], device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times += [took.item()] * (i > 0)
    return times


def step(attend: Callable[..., Tensor], qkv: tuple[Tensor, ...], dout: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in qkv]
    attend(*leaves).backward(dout)


def traced(call: Callable[[], None], device: torch.device) -> list[dict[str, object]]:
    """What runs on the GPU in one call, in the order of its begins."""
    activity = torch.profiler.ProfilerActivity
    kind = activity.CUDA if device.type == "cuda" else activity.CPU
    with torch.profiler.profile(activities=[kind]):
        call()  # what the profiler makes at first is no part of it
    dist.barrier()
    with torch.profiler.profile(activities=[kind]) as profile:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    events = [e for e in profile.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    first = min((e.time_range.start for e in events), default=0)
    return [
        {
            "name": e.name[:80],
            "stream": e.device_resource_id,
            "begin_us": round(e.time_range.start - first, 1),
            "us": round(e.time_range.elapsed_us(), 1),
        }
        for e in sorted(events, key=lambda e: e.time_range.start)
    ]


def kind_of(kernel: str) -> str:
    """What a kernel is for, one of KINDS."""
    if kernel.startswith("nccl"):
        return "communication"
    return "attention" if "flash_cute::" in kernel else "the rest"


def plot(traces: list[dict[str, Any]], path: Path) -> None:
    """The streams of the first rank's GPU over time, of the shortest sequence in ``--trace``."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shortest = min(trace["seqlen"] for trace in traces)
    traces = [trace for trace in traces if trace["seqlen"] == shortest]
    figure = Figure(figsize=(9, 1.1 * len(traces) + 0.8), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for panel, trace in zip(panels, traces, strict=True):
        lanes = sorted({event["stream"] for event in trace["events"]}, reverse=True)
        for kind, color in KINDS.items():
            for lane, stream in enumerate(lanes):
                bars = [
                    (event["begin_us"] / 1e3, event["us"] / 1e3) for event in trace["events"]
                    if event["stream"] == stream and kind_of(event["name"]) == kind
                ]  # fmt: skip
                panel.broken_barh(bars, (lane - 0.4, 0.8), color=color, linewidth=0)
        panel.set_yticks(range(len(lanes)), [f"stream {stream}" for stream in lanes])
        panel.set_title(trace["strategy"], loc="left", fontsize=9)
    panels[-1].set_xlabel(f"ms, {shortest} tokens")
    colors = [Patch(color=color, label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=colors, loc="outside upper right", ncols=len(KINDS), frameon=False)
    figure.savefig(path, dpi=100)


def table(rows: list[dict[str, Any]], ranks: int) -> list[str]:
    """Lines of markdown: ms of each candidate on so many GPUs, and the share of ideal scaling."""
    mine = [row for row in rows if row["ranks"] == ranks]
    names = [name for name in CANDIDATES if any(row["candidate"] == name for row in mine)]
    lines = ["| tokens | one GPU | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 2)]
    one = {row["seqlen"]: row["ms"] for row in rows if row["candidate"] == "one"}
    one |= {row["seqlen"]: row["ms"] for row in mine if row["candidate"] == "one"}
    for seqlen in sorted({row["seqlen"] for row in mine}):
        of_name = {row["candidate"]: row["ms"] for row in mine if row["seqlen"] == seqlen}
        cells = [
            f"{seqlen >> 10}k" if seqlen < 2**20 else f"{seqlen >> 20}M",
            digits(one[seqlen]) if seqlen in one else "-",
        ]
        for name in names:
            ms = of_name.get(name)
            share = f", {one[seqlen] / ranks / ms:.3f}" if ms and seqlen in one else ""
            cells.append("-" if ms is None else digits(ms) + share)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def digits(ms: float) -> str:
    """Three digits, or all before the point."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.{1 if ms >= 10 else 2}f}"


def torch_s_own(mesh: DeviceMesh, qkv: list[Tensor], rounds: int, device: torch.device) -> list:
    """SDPA inside of context_parallel, of (batch, heads, seqlen, dim)."""
    from torch.distributed.tensor.experimental import context_parallel

    buffers = [x.transpose(1, 2).contiguous() for x in qkv]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
        dout = torch.randn_like(buffers[0])
        call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return measure(lambda: step(call, tuple(buffers), dout), "torch", rounds, device)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[8192, 32768, 131072, 524288])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-k", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-single", action="store_true", help="without the time of one GPU")
    parser.add_argument("--strategies", nargs="+", help="some of them, without torch's own")
    parser.add_argument("--trace", type=Path, help="timelines of one more step of each strategy")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, nargs=2, help="a file of --trace, and the picture")
    parser.add_argument("--table", type=Path, help="a file of results, to print them")
    return parser.parse_args()


def row_of(call: Callable[[], list[float]], device: torch.device) -> dict[str, object]:
    """Milliseconds, or why there are none, and on GPUs the memory that was held at most."""
    row: dict[str, object] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        row["ms"] = statistics.median(call())
    except (RuntimeError, NotImplementedError) as error:
        row["error"] = str(error)[:200]
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def main() -> None:
    given = options()
    if given.plot:
        plot(json.loads(given.plot[0].read_text()), given.plot[1])
        return
    if given.table:
        rows = json.loads(given.table.read_text())["rows"]
        for ranks in sorted({row["ranks"] for row in rows}):
            print(f"{ranks} GPUs", *table(rows, ranks), sep="\n")
        return
    device = torch.device(given.device, int(os.environ["LOCAL_RANK"]) * (given.device == "cuda"))
    if given.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    ranks, rows = dist.get_world_size(), []
    mesh = init_device_mesh(given.device, (ranks,))
    contexts = {name: ContextParallel(mesh, strategy=name) for name in STRATEGIES}
    if ranks >= 4 and ranks % 2 == 0:  # pairs that share heads
        of_pairs = init_device_mesh(given.device, (ranks // 2, 2))
        contexts["two_dimensional"] = ContextParallel(of_pairs, strategy="two_dimensional")
    if given.strategies:
        contexts = {name: contexts[name] for name in given.strategies}
    traces: list[dict[str, object]] = []
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    for seqlen in given.seqlens:
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, seqlen, heads, given.head_dim, device=device, dtype=dtype)
            for heads in (given.heads, given.heads_k, given.heads_k)
        )
        calls: dict[str, Callable[[], list[float]]] = {}
        if not given.no_single:
            attend = partial(flash_cute.flash_attn_func, causal=True)
            calls["one"] = lambda: measure(
                lambda: step(attend, (q, k, v), q), "one", given.rounds, device
            )  # fmt: skip
        for name, cp in contexts.items():
            plan = cp.plan(seqlen, causal=True)
            mine = tuple(cp.shard(x, plan) for x in (q, k, v))

            def shared(name=name, plan=plan, mine=mine) -> list[float]:
                call = partial(step, partial(cp_attention, plan=plan), mine, mine[0])
                times = measure(call, name, given.rounds, device)
                if given.trace:
                    events = traced(call, device)
                    traces.append({"seqlen": plan.total, "strategy": name, "events": events})
                return times

            calls[name] = shared
        if given.device == "cuda" and not given.strategies:
            copies = given.heads // given.heads_k  # torch's ring takes no grouped heads
            same = [q, *(x.repeat_interleave(copies, 2) for x in (k, v))]
            calls["torch"] = lambda: torch_s_own(mesh, same, given.rounds, device)
        single = None
        for name, call in calls.items():
            row = {"seqlen": seqlen, "ranks": ranks, "candidate": name} | row_of(call, device)
            if name == "one":
                single = row.get("ms")
            elif single and "ms" in row:
                row["share"] = single / ranks / row["ms"]
            rows.append(row)
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    if given.json and dist.get_rank() == 0:
        given.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}))
    if given.trace and dist.get_rank() == 0:
        given.trace.write_text(json.dumps(traces))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
