"""Ranks of which one does something else: all raise the same message, and no process is ended.

    python -m flash_cute.testing.disagreement                    # two processes over gloo
    python -m flash_cute.testing.disagreement --device cuda      # two GPUs over NCCL

Each case is a call that the second rank makes with other arguments, with every strategy. Values on
a GPU are compared without waiting for it, so the next call reports their difference. In the last
case only one rank runs backward, which is an error within the groups' timeout. The exit status is 1
if a case is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_cute.distributed import ContextParallel, Plan, cp_attention, cp_decode
from flash_cute.testing.distributed import context
from flash_cute.testing.ranks import Raised, Ranks

STRATEGIES = ("all_gather", "ring", "ulysses")
HEADS, DIM, SEQLEN = 4, 64, 256

# The second rank's difference, and a part of all ranks' message.
CASES = {
    "return_lse": "return_lse True",
    "values of slopes": "alibi_slopes",
    "values of sink": "sink",
    "gradients": "with gradients of q",
    "softcap": "softcap 2.0",
    "strategy": "ranks differ",
    "backward during forward": "backward of cp_attention",
    "lengths of caches": "cache_seqlens",
}
SECONDS = 10.0  # the timeout of waits for another rank


def _made(cp: ContextParallel, plan: Plan, device: str) -> Tensor:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(1, plan.rows(cp.rank), HEADS, DIM, dtype=dtype, device=device)


def one_differs(case: str, strategy: str, device: str) -> None:
    """Makes the call of a case, with a difference on the second rank; after a difference of values
    on a GPU also a right call."""
    is_other = dist.get_rank() == 1
    cp = context(strategy, "contiguous", 1, device)
    plan = cp.plan(SEQLEN)
    q = _made(cp, plan, device)
    options: dict[str, Any] = {
        "alibi_slopes": torch.full((HEADS,), 0.1, device=device),
        "sink": torch.zeros(HEADS, device=device),
    }
    if case == "lengths of caches":
        _decode(cp, q[:, :1].contiguous(), 1 + is_other, device)
    elif case == "strategy" and is_other:
        other = context("ring" if strategy != "ring" else "ulysses", "contiguous", 1, device)
        cp_attention(q, q, q, other.plan_alone(SEQLEN), **options)
    elif case == "backward during forward":
        q.requires_grad_()
        out = cp_attention(q, q, q, plan)
        if is_other:
            out.float().sum().backward()
        cp_attention(q, q, q, plan)
    else:
        q.requires_grad_(case == "gradients" and is_other)
        if is_other and case.startswith("values of"):
            name = {"values of slopes": "alibi_slopes", "values of sink": "sink"}[case]
            options[name] = options[name].clone()
            options[name][-1] = 0.5
        cp_attention(
            q, q, q, plan, **options, softcap=2.0 if case == "softcap" and is_other else 0.0,
            return_lse=case == "return_lse" and is_other,
        )  # fmt: skip
    if device == "cuda":  # gives the host time to get the difference
        torch.cuda.synchronize()
        cp_attention(q.detach(), q.detach(), q.detach(), plan)


def _decode(cp: ContextParallel, q: Tensor, length: int, device: str) -> None:
    k_cache, v_cache = torch.zeros(2, 1, 16, HEADS, DIM, dtype=q.dtype, device=device).unbind()
    q = q.clone()
    dist.broadcast(q, 0)
    lengths = torch.full((1,), length, dtype=torch.int32, device=device)
    cp_decode(q, k_cache, v_cache, cp, q, q, lengths)


def backward_alone(strategy: str, device: str) -> float:
    """Only the second rank runs backward; returns the seconds that each rank was busy."""
    cp = ContextParallel(strategy=strategy)  # with the timeout of all ranks' group
    plan = cp.plan(SEQLEN)
    q = _made(cp, plan, device).requires_grad_()
    out = cp_attention(q, q, q, plan)
    start = time.perf_counter()
    if cp.rank == 1:
        try:
            out.float().sum().backward()
        except RuntimeError as error:
            if "not all ranks made this call" not in str(error):
                raise
        else:
            raise AssertionError("backward of one rank alone went through")
    return time.perf_counter() - start


def wrong_of(case: str, outcomes: list[Any]) -> str:
    """The error in the ranks' outcomes, or ""."""
    if not all(isinstance(x, Raised) and x.kind == "ValueError" for x in outcomes):
        return f"not every rank raised a ValueError: {outcomes}"
    if len({x.message for x in outcomes}) > 1:
        return f"messages differ: {outcomes}"
    return "" if CASES[case] in outcomes[0].message else f"{CASES[case]!r} is not in {outcomes[0]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args(argv).device
    failed = 0
    with Ranks(2, device, SECONDS) as ranks:
        for strategy in STRATEGIES:
            for case in CASES:
                wrong = wrong_of(case, ranks.outcomes(one_differs, case, strategy, device))
                failed += bool(wrong)
                print(f"{strategy}, {case}: {wrong or 'the same message on both'}", flush=True)
    for strategy in STRATEGIES:
        with Ranks(2, device, SECONDS) as ranks:
            outcomes = ranks.outcomes(backward_alone, strategy, device)
            in_time = all(isinstance(x, float) and x < 3 * SECONDS for x in outcomes)
            failed += not in_time
            print(f"{strategy}, backward alone: {outcomes}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
