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
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_cute.integrations import sdpa

from . import report, timing
from .rivals import OURS, Candidate, FlashCute, Work, describe, load
from .suites import Case, Inputs, make_inputs

CASE = Case.parse("bf16 b1 h16/16 q128 k128 d128/128 full")
_LEAST_BATCHES = 20


def ways(candidates: Mapping[str, Candidate], x: Inputs) -> dict[str, Work]:
    """What is called: each candidate's forward; of ours also with grad, the bare op, and SDPA."""
    works = {name: candidate.forward(CASE, x) for name, candidate in candidates.items()}
    ours = candidates.get(OURS)
    if isinstance(ours, FlashCute):
        leaves = {name: getattr(x, name).detach().requires_grad_() for name in "qkv"}
        works[f"{OURS} with grad"] = ours.forward(CASE, replace(x, **leaves))
        works[f"{OURS} op"] = ours.op(CASE, x)
        works[f"{OURS} through SDPA"] = through_sdpa(x)
    return works


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
        else {"status": "ok", "median_us": median(times), "batches_us": times}
        for name, times in batch_times.items()
    }


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
    try:
        device = timing.use_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    candidates, missing = load([OURS, *options.rivals.split(",")], device)
    works = ways(candidates, make_inputs(CASE, device, seed=0))
    costs = measure(works, options.batches, options.calls, device)
    for name, cost in costs.items():
        print(
            f"{name}: "
            + (f"{cost['median_us']:.1f} us" if "median_us" in cost else cost["message"])
        )
    for name, reason in missing.items():
        print(f"{name} is missing: {reason}")
    if options.json:
        result = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "case": str(CASE),
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
