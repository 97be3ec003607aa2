"""Host cost of one attention call: `python -m benchmarks.host_cost --json F`.

Wall time a call takes on the host, in batches of calls so small and so short that the GPU's queue
never fills; each batch ends with a synchronisation outside the timed part.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_cute import flash_attn_varlen_func
from flash_cute.integrations import sdpa

from . import report, timing
from .rivals import LOADERS, OURS, Candidate, FlashCute, Work, describe, load
from .suites import Case, Inputs, make_inputs

CASE = Case.parse("bf16 b1 h16/16 q128 k128 d128/128 full")
TOKEN = Case.parse("bf16 b1 h16/16 q1 k128 d128/128 full")  # decoding
_CACHED = ("", "lengths", "pages16", "append")
_LEAST_BATCHES = 20


def ways(candidates: Mapping[str, Candidate], x: Inputs) -> dict[str, Work]:
    """What is called: each candidate's forward, and what else is asked of ours and of FA3's op."""
    works = {name: candidate.forward(CASE, x) for name, candidate in candidates.items()}
    token = make_inputs(TOKEN, x.q.device, seed=0)
    if "fa3" in candidates:
        lengths = replace(TOKEN, feature="lengths")
        works["fa3 lengths"] = candidates["fa3"].forward(lengths, token)
        works["fa3 backward"] = candidates["fa3"].backward(CASE, x)
    ours = candidates.get(OURS)
    if isinstance(ours, FlashCute):
        leaves = {name: getattr(x, name).detach().requires_grad_() for name in "qkv"}
        with_grad = ours.forward(CASE, replace(x, **leaves))
        works[f"{OURS} with grad"] = with_grad
        works[f"{OURS} backward"] = through_autograd(with_grad, [*leaves.values()], x.dout)
        nothing = Work(partial(Nothing.apply, *leaves.values()), lambda out: (out,))
        works["empty backward"] = through_autograd(nothing, [*leaves.values()], x.dout)
        works[f"{OURS} varlen"] = varlen(x)
        for feature in _CACHED:
            name = f"{OURS} kvcache {feature}".rstrip()
            works[name] = ours.forward(replace(TOKEN, feature=feature), token)
        works[f"{OURS} op"] = ours.op(CASE, x)
        works[f"{OURS} through SDPA"] = through_sdpa(x)
    return works


def beside(name: str) -> str:
    """The way that the cost of a way of ours is compared with: a raw op of FlashAttention-3, for
    SDPA our own function."""
    if name.endswith("backward"):
        return "fa3 backward"
    if name.endswith("SDPA"):
        return OURS
    return "fa3 lengths" if "varlen" in name or "kvcache" in name else "fa3"


class Nothing(torch.autograd.Function):
    """A function of q, k and v that computes nothing: what autograd itself costs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return ctx.saved_tensors


def through_autograd(forward: Work, leaves: list[torch.Tensor], dout: torch.Tensor) -> Work:
    """The backward of a forward alone, over a kept graph."""
    (out,) = forward.results(forward.run())
    return Work(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), tuple)


def varlen(x: Inputs) -> Work:
    """One packed sequence."""
    q, k, v = (y.flatten(0, 1) for y in (x.q, x.k, x.v))
    ends = torch.tensor([0, len(q)], device=q.device, dtype=torch.int32)
    run = partial(flash_attn_varlen_func, q, k, v, ends, ends, len(q), len(q))
    return Work(run, lambda out: (out[None],))


def through_sdpa(x: Inputs) -> Work:
    """torch's own function, with flash_cute activated as its flash attention."""
    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))

    @contextmanager
    def scope() -> Iterator[None]:
        with sdpa.activated(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield

    return Work(
        lambda: F.scaled_dot_product_attention(q, k, v), lambda out: (out.transpose(1, 2),), scope
    )


def batch_us(work: Work, calls: int, device: torch.device) -> float:
    """Host microseconds per call over one batch; the device is idle at its begin and end."""
    run = work.run
    with work.scope():
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        spent = time.perf_counter() - begin
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return spent / calls * 1e6


def measure(
    works: Mapping[str, Work], batches: int, calls: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Interleaved batches of every way to call, after one that warms up and is not kept."""
    batch_times: dict[str, list[float]] = {name: [] for name in works}
    failures: dict[str, str] = {}
    for number in range(-1, batches):
        for name in timing.balanced([n for n in works if n not in failures], number):
            try:
                spent = batch_us(works[name], calls, device)
            except Exception as error:
                failures[name] = describe(error)
                continue
            if number >= 0:
                batch_times[name].append(spent)
    return {
        name: {"status": "failed", "message": failures[name]}
        if name in failures
        else {
            "status": "ok",
            "least_us": round(min(times), 2),
            "median_us": round(median(times), 2),
            "batches_us": [round(us, 2) for us in times],
        }
        for name, times in batch_times.items()
    }


def line(name: str, costs: Mapping[str, dict[str, Any]]) -> str:
    """What is printed of one way to call."""
    cost, other = costs[name], costs.get(beside(name), {})
    if "least_us" not in cost:
        return f"{name}: {cost['message']}"
    text = f"{name}: least {cost['least_us']:.1f} us, median {cost['median_us']:.1f}"
    if not name.startswith(OURS) or "least_us" not in other or beside(name) == name:
        return text
    return f"{text}, {cost['least_us'] / other['least_us']:.2f} of {beside(name)}"


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="benchmarks.host_cost", description=__doc__)
    parser.add_argument("--rivals", default="fa2,cudnn,fa3", help="comma-separated")
    parser.add_argument("--batches", type=int, default=30, help=f"at least {_LEAST_BATCHES}")
    parser.add_argument("--calls", type=int, default=200, help="calls in a batch")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N or cpu")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args(argv)
    if options.batches < _LEAST_BATCHES:
        parser.error(f"--batches {options.batches}: at least {_LEAST_BATCHES} are needed")
    if options.calls < 1:
        parser.error(f"--calls {options.calls}: at least 1 is needed")
    rivals = options.rivals.split(",")
    if unknown := [name for name in rivals if name not in LOADERS]:
        parser.error(f"--rivals: unknown {unknown}, known: {sorted(LOADERS)}")
    try:
        device = timing.use_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    candidates, missing = load([OURS, *rivals], device)
    works = ways(candidates, make_inputs(CASE, device, seed=0))
    costs = measure(works, options.batches, options.calls, device)
    for name in costs:
        print(line(name, costs))
    for name, reason in missing.items():
        print(f"{name} is missing: {reason}")
    if options.json:
        result = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "case": str(CASE),
            "token": str(TOKEN),
            "machine": report.machine(device, timing.Monitor(device)),
            "versions": report.versions({n: c.version for n, c in candidates.items()}),
            "calls_per_batch": options.calls,
            "missing": missing,
            "candidates": costs,
        }
        report.save(result, options.json)
    return 0 if "median_us" in costs.get(OURS, {}) else 1


if __name__ == "__main__":
    sys.exit(main())
