"""The source of the tuner's times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from flash_cute import kernels
from flash_cute.call.fp8 import DTYPES as FP8_DTYPES
from flash_cute.kernels import Problem
from flash_cute.kernels.choice import Choice
from flash_cute.native import library
from flash_cute.tuning.calls import call_of
from flash_cute.utils.timing import time_calls

_REPLAYS = 3  # per turn; its time is their median


class Clock(Protocol):
    """Times choices: :class:`CudaClock`, or a fake one in tests."""

    def measure(
        self, problem: Problem, choices: Sequence[Choice], rounds: int
    ) -> dict[Choice, list[float]]:
        """Milliseconds of each choice, ``rounds`` of each, in the order of the rounds."""
        ...


class CudaClock:
    """CUDA events around replays of a CUDA graph of ``calls`` calls, on the current GPU: host time
    is not included. In each round every choice has a turn, in an order that rotates by one, so that
    clocks and temperature are the same for all.

    Raises:
        RuntimeError: there is no GPU, or the library has no kernels for it.
    """

    def __init__(self, calls: int = 5) -> None:
        if not library.can_use_cuda():
            raise RuntimeError(
                "tuning measures kernels on a GPU, and there is none here, or this build of "
                "flash_cute has no CUDA: run it where the kernels will run"
            )
        self.calls = calls  # of a graph

    def measure(
        self, problem: Problem, choices: Sequence[Choice], rounds: int
    ) -> dict[Choice, list[float]]:
        check_plain(problem)
        device = torch.device("cuda", torch.cuda.current_device())
        call = call_of(
            problem.op, str(problem.dtype).removeprefix("torch."), problem.batch, problem.heads,
            problem.heads_k or problem.heads, problem.seqlen_q,
            problem.seqlen_q if problem.seqlen_k is None else problem.seqlen_k, problem.head_dim,
            problem.head_dim_v or problem.head_dim, problem.causal,
        )  # fmt: skip
        # A kernel of forward over a cache replaces one of decoding: decoding's stay allowed.
        rest = [kernel.id for kernel in kernels.kernels() if kernel.op == problem.op == "decode"]
        graphs, pool = {}, torch.cuda.graph_pool_handle()
        for choice in choices:
            others = [] if choice.kernel.startswith(problem.op) else rest
            with kernels.only(choice.kernel, *others, **choice.numbers):
                graphs[choice] = _captured(call, self.calls, pool)
        times: dict[Choice, list[float]] = {choice: [] for choice in choices}
        for turn in range(rounds):
            start = turn % len(choices)
            for choice in [*choices[start:], *choices[:start]]:
                timing = time_calls(graphs[choice].replay, _REPLAYS, device, warmup=1)
                times[choice].append(timing.median / self.calls)
        return times


def _captured(call: Callable[[], Any], calls: int, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of calls. Graphs share a memory pool: they run one by one, and results are unused."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # warms up before the capture
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        for _ in range(calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def check_plain(problem: Problem) -> None:
    """Raises NotImplementedError unless the tuner can make inputs for the problem."""
    sizes = ("op", "dtype", "batch", "heads", "heads_k", "seqlen_q", "seqlen_k", "head_dim",
             "head_dim_v", "causal")  # fmt: skip
    plain = Problem(**{name: getattr(problem, name) for name in sizes})
    if problem != plain or problem.dtype in FP8_DTYPES:
        raise NotImplementedError(
            f"{problem}: the tuner measures dense calls in fp16, bf16 or fp32, full or causal, "
            "without further options; leave those out"
        )
