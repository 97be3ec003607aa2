"""Compares attention over ranks with one process in fp64: every strategy, layout and mask.

    python -m flash_cute.testing.distributed                     # pairs of values, on 1 to 4 ranks
    python -m flash_cute.testing.distributed --full --ranks 2    # all of them, minutes

Ranks are processes on the CPU (gloo), started once for all cases of a number of ranks: fp64, the
largest error at most 1e-10. With ``--device cuda`` as many GPUs (NCCL): bf16, documents and windows
50 times as long and head dim 64, and the root mean square of each result's error, beside fp64 on
the GPU, at most 1.2 of one GPU's: of out, lse, dq, dk, dv and dsink. 1.5 are allowed of out in ring
and two_dimensional, and of dk and dv of ulysses with dropout where ranks do not divide kv heads.
A case that fails prints what repeats it with ``--case``. The exit status is 1 if one does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flash_cute import flash_attn_func, flash_attn_varlen_func, reference
from flash_cute.distributed import ContextParallel, Plan, cp_attention
from flash_cute.distributed.layouts import LAYOUTS, offsets
from flash_cute.distributed.strategies import STRATEGIES
from flash_cute.testing.pairwise import pairwise
from flash_cute.testing.ranks import Ranks

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Case:
    """One call; the fields are those of :func:`flash_cute.distributed.cp_attention`."""

    strategy: str
    layout: str
    documents: tuple[int, ...]  # one is a dense batch of two entries, several are packed
    window: tuple[int, int]
    heads_k: int  # of 12
    alibi: str  # "", "heads" or "batch"
    softcap: float
    sink: bool
    dropout_p: float
    head_groups: int
    deterministic: bool
    of_lse: bool  # whether the LSE has a gradient, too


HEADS, DIM, DIM_V = 12, 8, 6
FACTORS: dict[str, Sequence[Any]] = {
    "strategy": tuple(STRATEGIES),
    "layout": LAYOUTS,
    "documents": [(24,), (29,), (9, 0, 14, 1, 6), (3, 40)],
    "window": [(-1, -1), (-1, 0), (5, 0), (7, 3), (-1, 2), (0, -1)],
    "heads_k": [12, 4, 2, 1],
    "alibi": ["", "heads", "batch"],
    "softcap": [0.0, 1.5],
    "sink": [False, True],
    "dropout_p": [0.0, 0.3],
    "head_groups": [1, 2],
    "deterministic": [False, True],
    "of_lse": [False, True],
}
# The factors of the full grid; the others only cover their pairs.
CROSSED = ("strategy", "layout", "documents", "window", "alibi")


def impossible(pair: Any) -> bool:
    """Whether a pair cannot occur: only ulysses has dropout."""
    return pair.get("dropout_p", 0) > 0 and pair.get("strategy", "ulysses") != "ulysses"


def cases(full: bool = False) -> list[Case]:
    """A few cases that cover all pairs of values; or the whole grid of CROSSED, others in turn."""
    rows = pairwise(FACTORS, impossible)
    if full:
        rest = {name: x for name, x in FACTORS.items() if name not in CROSSED}
        turns = itertools.cycle(pairwise(rest))
        rows = [
            dict(zip(CROSSED, values, strict=True)) | next(turns)
            for values in itertools.product(*(FACTORS[name] for name in CROSSED))
        ]
        for row in rows:
            if impossible(row):
                row["dropout_p"] = 0.0
    return [Case(**row) for row in rows]


# --- one case, on each rank ----------------------------------------------------------------------


def longer(case: Case, factor: int = 50) -> Case:
    """The case with documents and windows of realistic sizes."""
    left, right = (factor * n if n > 0 else n for n in case.window)
    documents = tuple(factor * n for n in case.documents)
    return replace(case, documents=documents, window=(left, right))


def inputs(case: Case, seed: int, dims: tuple[int, int] = (DIM, DIM_V)) -> dict[str, Tensor]:
    """The whole batch in fp64 on the CPU, the same on each rank; ``dims`` are q's and v's."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    packed, total = len(case.documents) > 1, sum(case.documents)
    lead = (total,) if packed else (2, total)
    made = {
        "q": randn(*lead, HEADS, dims[0]),
        "k": randn(*lead, case.heads_k, dims[0]),
        "v": randn(*lead, case.heads_k, dims[1]),
        "dout": randn(*lead, HEADS, dims[1]),
        "dlse": randn(HEADS, total) if packed else randn(2, HEADS, total),
    }
    if case.sink:
        made["sink"] = randn(HEADS)
    if case.alibi:
        batch = len(case.documents) if packed else 2
        shape = (HEADS,) if case.alibi == "heads" else (batch, HEADS)
        made["alibi_slopes"] = torch.rand(shape, generator=generator)
    if case.dropout_p:
        made["rng"] = torch.randint(-(2**60), 2**60, (2,), generator=generator)
    return made


Results = dict[str, Tensor]


def _gradients(
    case: Case, made: dict[str, Tensor], call: Callable[..., tuple[Tensor, Tensor]]
) -> Results:
    leaves = {name: made[name].detach().requires_grad_() for name in ("q", "k", "v", "sink")
              if name in made}  # fmt: skip
    out, lse = call(**(made | leaves))
    total = (out * made["dout"]).sum()
    if case.of_lse:
        total = total + (lse * made["dlse"]).masked_fill(lse == -torch.inf, 0).sum()
    total.backward()
    gradients = {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}
    return {"out": out.detach(), "lse": lse.detach()} | gradients


def expected(case: Case, made: dict[str, Tensor]) -> Results:
    """The results of the reference, which stores all scores."""

    def call(q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {
            "window_size_left": case.window[0],
            "window_size_right": case.window[1],
            "softcap": case.softcap,
            "alibi_slopes": rest.get("alibi_slopes"),
            "sink": rest.get("sink"),
            "dropout_p": case.dropout_p,
            "rng": rest.get("rng"),
        }
        if len(case.documents) == 1:
            return reference.attention(q, k, v, **options)[:2]
        # The packed reference fills rows in place, which autograd follows.
        cu_seqlens = torch.tensor(offsets(case.documents), dtype=torch.int32, device=q.device)
        longest = max(case.documents)
        return reference.attention_varlen(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options
        )[:2]

    return _gradients(case, made, call)


def _arguments(case: Case, rest: dict[str, Tensor]) -> dict[str, Any]:
    named: dict[str, Any] = {name: rest.get(name) for name in ("alibi_slopes", "sink", "rng")}
    return named | {
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
        "window_size": case.window,
        "deterministic": case.deterministic,
        "return_lse": True,
    }


def alone(case: Case, made: dict[str, Tensor]) -> Results:
    """The results of flash_cute's functions in one process."""

    def call(q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor]:
        options = _arguments(case, rest)
        if len(case.documents) == 1:
            return flash_attn_func(q, k, v, **options)
        cu = torch.tensor(offsets(case.documents), dtype=torch.int32, device=q.device)
        return flash_attn_varlen_func(
            q, k, v, cu, cu, max(case.documents), max(case.documents), **options
        )

    return _gradients(case, made, call)


def shared(case: Case, cp: ContextParallel, plan: Plan, made: dict[str, Tensor]) -> Results:
    """The results of all ranks, gathered."""
    dim = 0 if plan.packed else 1
    mine = {
        name: cp.shard(x, plan, dim) if name in ("q", "k", "v", "dout") else x
        for name, x in made.items()
    }
    mine["dlse"] = cp.shard(made["dlse"], plan, -1)

    def call(q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor]:
        return cp_attention(q, k, v, plan, causal=False, **_arguments(case, rest))

    results = _gradients(case, mine, call)
    whole = {
        name: cp.unshard(x, plan, -1 if name == "lse" else dim)
        for name, x in results.items() if name != "dsink"
    }  # fmt: skip
    if "dsink" in results:
        total = results["dsink"]
        if cp.size > 1:
            dist.all_reduce(total, group=cp.group)
        whole["dsink"] = total
    return whole


def error(found: Tensor, true: Tensor) -> float:
    """The largest difference, as a share of the largest true value; inf where -inf differ."""
    found, true = found.double().cpu(), true.double().cpu()
    if found.shape != true.shape or not torch.equal(found == -torch.inf, true == -torch.inf):
        return math.inf
    found, true = (x.masked_fill(x == -torch.inf, 0) for x in (found, true))
    size = max(true.abs().max().item() if true.numel() else 0.0, 1e-3)
    off = (found - true).abs().max().item() if true.numel() else 0.0
    return off / size if math.isfinite(off) else math.inf


def relative(found: Tensor, true: Tensor) -> float:
    """The root mean square of differences, over that of true values; inf where -inf differ."""
    found, true = found.double(), true.double()
    if found.shape != true.shape or not torch.equal(found == -torch.inf, true == -torch.inf):
        return math.inf
    found, true = (x.masked_fill(x == -torch.inf, 0) for x in (found, true))
    off = ((found - true).norm() / true.norm().clamp(min=1e-30)).item()
    return off if math.isfinite(off) else math.inf


# The least error that one process is assumed to have, relative: fp32's order of sums. dsink has one
# number a head, and which of two sums of rounding errors is larger is chance: one rounding of bf16.
LEAST = {"dsink": 2**-8}
LEAST_OF_OTHERS = 1e-6


def ratios(
    case: Case, cp: ContextParallel, plan: Plan, made: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """Root mean square errors of each result in ``dtype``, relative to those of one process."""
    low = {
        name: x.to(dtype) if name in ("q", "k", "v", "dout") else
        x.float() if x.is_floating_point() else x
        for name, x in made.items()
    }  # fmt: skip
    exact = {
        name: x.double() if x.is_floating_point() and name != "alibi_slopes" else x
        for name, x in low.items()
    }
    found, single, true = shared(case, cp, plan, low), alone(case, low), expected(case, exact)
    return {
        name: relative(found[name], x)
        / (relative(single[name], x) + LEAST.get(name, LEAST_OF_OTHERS))
        for name, x in true.items()
    }


# --- many cases ----------------------------------------------------------------------------------


@cache
def mesh(device: str) -> DeviceMesh:
    """A mesh of two dimensions, over all ranks."""
    ranks = dist.get_world_size()
    inner = 2 if ranks % 2 == 0 else 1
    return init_device_mesh(device, (ranks // inner, inner), mesh_dim_names=("ring", "ulysses"))


@cache
def context(strategy: str, layout: str, head_groups: int, device: str) -> ContextParallel:
    """A ContextParallel, cached: one of each kind is enough for a process."""
    return ContextParallel(
        mesh(device) if strategy == "two_dimensional" else None,
        strategy=strategy, layout=layout, head_groups=head_groups, timeout=TIMEOUT,
    )  # fmt: skip


def plan_of_case(case: Case, cp: ContextParallel, block: int) -> Plan:
    """The plan of a dense batch of one document, or of packed ones."""
    if len(case.documents) == 1:
        return cp.plan(case.documents[0], window_size=case.window, block=block)
    return cp.plan(cu_seqlens=offsets(case.documents), window_size=case.window, block=block)


def check(case: Case, seed: int, device: str) -> dict[str, float]:
    """Errors of each result: on the CPU in fp64; on CUDA in bf16, relative to those of one GPU."""
    cp = context(case.strategy, case.layout, case.head_groups, device)
    if device == "cpu":
        made = inputs(case, seed)
        found, true = shared(case, cp, plan_of_case(case, cp, 4), made), expected(case, made)
        return {name: error(found[name], x) for name, x in true.items()}
    case = longer(case)
    made = {name: x.to(device) for name, x in inputs(case, seed, (64, 64)).items()}
    if "alibi_slopes" in made:
        made["alibi_slopes"] /= 50
    return ratios(case, cp, plan_of_case(case, cp, 128), made, torch.bfloat16)


BOUNDS = {"cpu": 1e-10, "cuda": 1.2}
BOUND_OF_DSINK = 1e-5  # on the CPU: the ops give it in fp32
# On CUDA, where results of several calls are rounded each: out that is merged, which doubles the
# square of the error at most; and dk and dv of copied kv heads with dropout.
BOUND_OF_SEVERAL = 1.5


def bound(case: Case, name: str, device: str) -> float:
    """The bound of a result's error, in the units of :func:`check`."""
    if device == "cpu":
        return BOUND_OF_DSINK if name == "dsink" else BOUNDS["cpu"]
    merged = name == "out" and case.strategy in ("ring", "two_dimensional")
    copied = case.dropout_p > 0 and case.heads_k % dist.get_world_size() > 0
    if merged or (copied and name in ("dk", "dv")):
        return BOUND_OF_SEVERAL
    return BOUNDS["cuda"]


def check_all(
    todo: list[Case], device: str, seed: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The failures on this rank, and the largest error of each result."""
    failures, worst = [], dict[str, float]()
    for i, case in enumerate(todo):
        errors = check(case, seed + i, device)
        worst |= {name: max(x, worst.get(name, 0.0)) for name, x in errors.items()}
        if not all(x <= bound(case, name, device) for name, x in errors.items()):
            failures.append({"case": asdict(case), "seed": seed + i, "errors": errors})
    return failures, worst


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="JSON of one case")
    given = parser.parse_args(argv)
    todo = cases(given.full)
    if given.case:
        fields = json.loads(given.case)
        fields |= {name: tuple(fields[name]) for name in ("documents", "window")}
        todo = [Case(**fields)]
    failed = 0
    for ranks in given.ranks:
        start = time.perf_counter()
        with Ranks(ranks, given.device, TIMEOUT.total_seconds()) as processes:
            processes.patience = 7200.0
            results = processes.run(check_all, todo, given.device, given.seed)
        failures = max((failures for failures, _ in results), key=len)
        failed += len(failures)
        largest = {name: max(worst[name] for _, worst in results) for name in results[0][1]}
        print(
            f"{ranks} ranks: {len(todo)} cases, {len(failures)} failed, "
            f"{time.perf_counter() - start:.0f} s; largest errors (at most "
            f"{BOUNDS[given.device]}): "
            + ", ".join(f"{name} {x:.3g}" for name, x in largest.items()),
            flush=True,
        )
        for line in _lines(failures):
            print(line)
    return int(failed > 0)


def _lines(failures: list[dict[str, Any]]) -> Iterator[str]:
    for failure in failures[:20]:
        errors = ", ".join(f"{name} {x:.3g}" for name, x in failure["errors"].items())
        yield f"  --seed {failure['seed']} --case '{json.dumps(failure['case'])}': {errors}"


if __name__ == "__main__":
    sys.exit(main())
