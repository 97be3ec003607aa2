"""Plans as values, which ``csrc/core/`` makes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch

from flash_cute.call import validate
from flash_cute.call.fp8 import DTYPES as FP8_DTYPES
from flash_cute.kernels.configs import KernelConfig, kernels
from flash_cute.kernels.gpus import GPUS, Gpu, as_gpu
from flash_cute.kernels.problem import Problem
from flash_cute.native import limits
from flash_cute.native.library import can_use_cuda, has_cuda_kernels
from flash_cute.native.library import kernels as built_kernels
from flash_cute.ops import has_fp8_attention

MOST_SPLITS = 128  # of the keys, in a call of Hopper's forward


@dataclass(frozen=True)
class KeyOrder:
    """The order of key tiles in Hopper's backward, and of the query tiles of each."""

    tiles_of_set: int  # tiles that start together, as a set
    heads_together: int  # kv heads whose tiles alternate
    late_first: bool  # late keys first
    heads_inside: bool  # a key tile visits all query heads of a query tile before the next one
    down_and_up: bool  # sets alternately begin with the last and with the first queries
    last_set: int  # first kv head of the last set of heads, which has all that are left


# Fields of a Plan that its line leaves out, or has at its beginning.
_HIDDEN_FIELDS = (
    "kernel", "launches", "key_order", "heads_together", "last_set", "by_level", "l2_fraction",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a call runs: the plan of the kernel that computes out, and ``launches``, all kernels and
    passes in order."""

    kernel: KernelConfig
    num_splits: int = 1  # of the keys (backward: of the queries of a tile of keys)
    pack_gqa: int = 1  # query heads of a group that share a tile of queries
    heads_together: int | None = None  # Hopper's forward: heads whose tiles of queries alternate
    last_set: int | None = None  # Hopper's forward: first head of the last set of such heads
    by_level: bool = False  # Hopper, packed: the tiles with the most tiles behind them come first
    splits_of_heads: int = 1  # backward: `num_splits` is this times splits_of_queries
    splits_of_queries: int = 1
    whole_tiles: int = 0  # backward: tiles of keys that are not split, before those that are
    dq_accumulate: str | None = None  # backward: "atomic", "first_stores" or "serialized"
    shares_l2: bool = False  # Hopper's backward: CTAs stay near each other on long walks
    key_order: KeyOrder | None = None  # of Hopper's backward
    ctas: int | None = None  # decode
    cluster: int = 1  # decode: CTAs that share the keys of a tile of queries, or of a split of them
    l2_fraction: float | None = None  # decode: share of the keys that L2 keeps like other data
    workspace_bytes: int = 0  # in addition to the results
    launches: tuple[str, ...] = ()  # backward's own passes are part of its kernel

    def __str__(self) -> str:
        rest = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in _HIDDEN_FIELDS and getattr(self, f.name) not in (f.default, 0)
        ]
        return " ".join([" > ".join(self.launches), *rest])


@dataclass(frozen=True)
class Verdict:
    """The verdict on one kernel: "chosen", "fits" (another is preferred) or "refused"."""

    id: str
    verdict: str
    reason: str  # as in the error that a call raises; empty for the chosen one


def plan(problem: Problem, gpu: Gpu | str | int | None = None) -> Plan:
    """The plan of a call with these sizes.

    Args:
        problem: the call.
        gpu: a :class:`Gpu`, a name in :data:`GPUS`, or the index of a GPU of this machine; None is
            the current one, or without one an H100. For a GPU of this machine only the library's
            kernels are considered, else all rows of ``csrc/kernels/*/rows.def``.

    Raises:
        ValueError: the GPU is unknown.
        RuntimeError: no kernel supports the problem; with the reasons of each.

    Example::

        from flash_cute import kernels

        problem = kernels.Problem(batch=4, heads=16, seqlen_q=4096, causal=True)
        print(kernels.plan(problem, gpu="h100").kernel.id)
    """
    found = json.loads(torch.ops.flash_cute.plan(_request(problem, gpu)))
    if "key_order" in found:
        found["key_order"] = KeyOrder(**found["key_order"])
    kernel = KernelConfig(**found.pop("kernel"))
    launches = tuple(found.pop("launches").split())
    return Plan(replace(kernel, built=kernel.id in built_kernels()), launches=launches, **found)


def explain(problem: Problem, gpu: Gpu | str | int | None = None) -> tuple[Verdict, ...]:
    """The verdicts on all kernels of the problem's op, in order of preference.

    Arguments and ValueError are :func:`plan`'s; it is not an error if no kernel is chosen.

    Example::

        from flash_cute import kernels

        problem = kernels.Problem(batch=4, heads=16, seqlen_q=4096, causal=True)
        for row in kernels.explain(problem, gpu="a100"):
            print(row.verdict, row.id, row.reason)
    """
    rows = json.loads(torch.ops.flash_cute.explain(_request(problem, gpu)))
    found = tuple(Verdict(**row) for row in rows)
    reasons = why_widened(problem, gpu)
    if not reasons:
        return found
    of_e4m3 = {kernel.id for kernel in kernels() if kernel.dtype == "e4m3"}
    why = f"the call is widened: {', '.join(reasons)}"
    return tuple(
        replace(row, reason=f"{why}; {row.reason}") if row.id in of_e4m3 else row for row in found
    )


def why_widened(problem: Problem, gpu: Gpu | str | int | None = None) -> tuple[str, ...]:
    """The reasons for which a call with fp8 q and k is widened to 16 bits, and has the plan of the
    16-bit call; none if kernels of e4m3 inputs compute it, and for other dtypes. Arguments and
    ValueError are :func:`plan`'s; :func:`flash_cute.fp8.why_widened` is the same of a call.

    Example::

        import torch
        from flash_cute import kernels

        problem = kernels.Problem(dtype=torch.float8_e4m3fn, seqlen_q=4096)
        assert kernels.why_widened(problem, "h200") == ()
        print(kernels.why_widened(problem, "a100"))
    """
    _check(problem)
    where = _where(gpu)
    if problem.dtype not in FP8_DTYPES:
        return ()
    reasons = list(problem.reasons_to_widen)
    if isinstance(where, Gpu):
        if where.capability != 90:
            reasons.insert(0, f"there are no kernels of e4m3 inputs for sm_{where.capability}")
    elif not has_fp8_attention(device := torch.device("cuda", where)):
        reasons.insert(0, f"there are no kernels of e4m3 inputs for {device}")
    most = validate.CUDA_MAX_HEAD_DIM
    dims = {"q": problem.head_dim, "v": problem.head_dim_v or problem.head_dim}
    reasons += [f"{name}'s head dim is {x}, above {most}" for name, x in dims.items() if x > most]
    return tuple(reasons)


def bucket(problem: Problem, gpu: Gpu | str | int | None = None) -> str:
    """The bucket of a call, which a calibration maps to a kernel: docs/tuning.md.

    Example::

        from flash_cute import kernels
        print(kernels.bucket(kernels.Problem(heads=16, seqlen_q=4096), gpu="h100"))
    """
    return torch.ops.flash_cute.calibration_bucket(_request(problem, gpu))


def _check(problem: Problem) -> None:
    if not isinstance(problem, Problem):
        raise ValueError(f"problem is {problem!r}; expected a kernels.Problem")


def _where(gpu: Gpu | str | int | None) -> Gpu | int:
    """The GPU, or the index of one of this machine."""
    if gpu is None:
        gpu = torch.cuda.current_device() if can_use_cuda() else "h100"
    if not isinstance(gpu, int) or isinstance(gpu, bool):
        return as_gpu(gpu)
    validate.count("gpu", gpu)
    if not has_cuda_kernels():
        raise ValueError(f"gpu is {gpu}, and this build has no CUDA; give one of {list(GPUS)}")
    return gpu


def _request(problem: Problem, gpu: Gpu | str | int | None) -> str:
    _check(problem)
    if why_widened(problem, gpu):  # what is widened has new memory, but for caches
        unaligned = problem.unaligned and problem.op == "decode"
        problem = replace(problem, dtype=torch.bfloat16, unaligned=unaligned)
    request, where = problem.request(), _where(gpu)
    if isinstance(where, int):
        return json.dumps(request | {"device": where, "built_only": True})
    facts = {f"gpu_{f.name}": getattr(where, f.name) for f in fields(where) if f.name != "name"}
    return json.dumps(request | facts)


def nearest(
    problem: Problem, block_m: int, block_n: int, gpu: Gpu | str | int | None = None
) -> str:
    """Id of the kernel whose tile is nearest to these numbers of query and key rows.

    Candidates support the problem, and have the smallest head dims of their arch that do. The
    nearest has the least ``|log2(m / block_m)| + |log2(n / block_n)|``; among equals the planned
    one wins, then the first in order of preference.

    Raises:
        TypeError, ValueError: a number of rows is not an int >= 1.
        ValueError, RuntimeError: :func:`plan`'s.

    Example::

        from flash_cute import kernels
        print(kernels.nearest(kernels.Problem(heads=16, seqlen_q=4096), 128, 64, gpu="h100"))
    """
    for name, rows in (("block_m", block_m), ("block_n", block_n)):
        validate.count(name, rows, 1)
    planned = plan(problem, gpu).kernel.id
    by_id = {kernel.id: kernel for kernel in kernels()}
    fitting = [by_id[row.id] for row in explain(problem, gpu) if row.verdict != "refused"]
    narrowest: dict[int, int] = {}
    for kernel in fitting:
        dims = kernel.head_dim + kernel.head_dim_v
        narrowest[kernel.arch] = min(dims, narrowest.get(kernel.arch, dims))
    made_for = [x for x in fitting if x.head_dim + x.head_dim_v == narrowest[x.arch]]

    def distance(kernel: KernelConfig) -> tuple[float, bool]:
        of_rows, of_keys = kernel.block_m / block_m, kernel.block_n / block_n
        return abs(math.log2(of_rows)) + abs(math.log2(of_keys)), kernel.id != planned

    return min(made_for, key=distance).id


@contextmanager
def only(*ids: str, num_splits: int | None = None, pack_gqa: int | None = None) -> Iterator[None]:
    """Inside, CUDA calls of this thread run only kernels with these ids, or raise RuntimeError with
    the reasons; so does their backward, even afterwards. Plans and explanations obey it, too, but
    not the backward of code that torch.compile has compiled. Nested in another ``only``, it keeps
    the other's values for what is not given. Each thread leaves what it entered, the last one
    first: not across an ``await`` or a generator's ``yield``.

    Args:
        ids: of kernels; all if none is given.
        num_splits: the number of splits of the keys in kernels of forward, instead of their
            estimate. Results differ in their last bits, but each number is deterministic. Only
            Hopper's can have more than 1: at most the number of key tiles, and two waves.
        pack_gqa: how many query heads of a group share a tile of queries in kernels of forward,
            instead of their estimate, the largest possible: a power of two up to that.

    Kernels of backward and of decoding keep their own splits. A call over a cache may run either
    kind, those of forward with these numbers. If one of the numbers is given, a calibration's
    numbers are not used.

    Raises:
        ValueError: there is no kernel with an id, nothing is given, or a number is not an int >= 1.

    Example::

        from flash_cute import kernels

        problem = kernels.Problem(heads=4, seqlen_q=64, seqlen_k=8192)
        with kernels.only(num_splits=1):
            whole = kernels.plan(problem, gpu="h100")
    """
    for name, number in (("num_splits", num_splits), ("pack_gqa", pack_gqa)):
        if number is not None and not is_count(number):
            raise ValueError(f"{name} is {number!r}; expected a whole number from 1 to 2^31 - 1")
    if not ids and num_splits is None and pack_gqa is None:
        raise ValueError(
            "only() was given nothing; expected ids of kernels, num_splits or pack_gqa"
        )
    known = [kernel.id for kernel in kernels()]
    if unknown := [i for i in ids if i not in known]:
        raise ValueError(
            f"{', '.join(map(str, unknown))} is no kernel's id; kernels() lists them. Pass each id "
            "as an argument of its own"
        )
    with limits.limit_kernels(limits.merge_with_current(ids, num_splits, pack_gqa)):
        yield


def is_count(number: object) -> bool:
    """Whether it is an int from 1 to 2^31 - 1."""
    return type(number) is int and 1 <= number < 2**31
