"""Strong scaling of attention over ranks, beside one GPU and torch's own context_parallel.

    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --json cp.json
    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --seqlens 1048576 --rounds 2
    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --trace ring.json --strategies ring

Milliseconds of forward and backward, causal, batch 1: the median of rounds, the slowest rank's.
``share`` is the time of one GPU over ranks times this. Each call is an NVTX range. Four
ranks and more have a row of two_dimensional, too. ``--trace`` writes what ran on the first rank's
GPU in one more step of each strategy: stream, begin and duration in us of each kernel and copy.
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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flash_cute
from flash_cute.distributed import ContextParallel, cp_attention

STRATEGIES = ("all_gather", "ring", "ulysses")


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


def torch_s_own(mesh: DeviceMesh, qkv: list[Tensor], rounds: int, device: torch.device) -> list:
    """SDPA inside of context_parallel, of (batch, heads, seqlen, dim)."""
    from torch.distributed.tensor.experimental import context_parallel

    buffers = [x.transpose(1, 2).contiguous() for x in qkv]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
        dout = torch.randn_like(buffers[0])
        call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return measure(lambda: step(call, tuple(buffers), dout), "torch", rounds, device)


def main() -> None:
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
    given = parser.parse_args()
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
            if given.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            row = {"seqlen": seqlen, "ranks": ranks, "candidate": name}
            try:
                row["ms"] = statistics.median(call())
            except (RuntimeError, NotImplementedError) as error:
                row["error"] = str(error)[:200]
            if name == "one":
                single = row.get("ms")
            elif single and "ms" in row:
                row["share"] = single / ranks / row["ms"]
            if given.device == "cuda":
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            rows.append(row)
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    if given.json and dist.get_rank() == 0:
        given.json.write_text(json.dumps({"torch": torch.__version__, "results": rows}))
    if given.trace and dist.get_rank() == 0:
        given.trace.write_text(json.dumps(traces))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
