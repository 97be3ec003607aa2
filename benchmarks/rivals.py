"""Adapters: flash_cute and the libraries it is measured against, behind one small interface.

FLASH_CUTE_RIVALS names the folder that holds the libraries that are not part of PyTorch:
fa3.so and libcudart.so.12 (FlashAttention-3), fa3fp8/ (its fp8 forward), fa4/ (FlashAttention-4).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .suites import CACHE_FEATURES, Case, Inputs

OURS = "flash_cute"
_FOLDERS = re.compile(r"""(?<![^\s'"(\[=:])/(?:[^\s'"/:]+/)*(?=[^\s/])""")  # of an absolute path


class Missing(RuntimeError):
    """A candidate cannot be loaded here; the message says why."""


@dataclass(frozen=True)
class Work:
    """What is timed: `run`, called back to back inside `scope`.

    `results` turns run's value into the tensors to compare, (batch, seqlen, heads, dim):
    (out,) of a forward, (dq, dk, dv) of a backward. It is not timed. Results that depend on random
    numbers of a library's own are not `comparable`. A run is so many `calls`. Errors may be `slack`
    times the limit of one that sums up in fp32.
    """

    run: Callable[[], Any]
    results: Callable[[Any], tuple[torch.Tensor, ...]]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    comparable: bool = True
    calls: int = 1
    slack: float = 1.0


class Candidate(Protocol):
    """One implementation. Both methods raise what the library raises for a case it lacks."""

    version: str

    def forward(self, case: Case, x: Inputs) -> Work: ...

    def backward(self, case: Case, x: Inputs) -> Work: ...


def captured(works: Sequence[Work], calls: int) -> Work:
    """Replays of a CUDA graph of so many calls, one after the other, of the works by turns; the
    last call, whose results it has, is of the first work."""
    first = works[0]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with first.scope():
        with torch.cuda.stream(stream):
            for work in works:
                work.run()  # what happens once, like allocations that stay, is no part of the graph
        with torch.cuda.graph(graph, stream=stream):
            for i in reversed(range(calls)):
                value = works[i % len(works)].run()
    torch.cuda.current_stream().wait_stream(stream)
    for result in first.results(value):  # whose memory is the graph's own
        result.detach().fill_(torch.nan)

    def replay(_inputs: Sequence[Work] = works) -> Any:  # the graph reads their tensors
        graph.replay()
        return value

    return Work(replay, first.results, comparable=first.comparable, calls=calls)


def _need_plain(case: Case, *known: str) -> None:
    """NotImplementedError for a feature that is not among the known ones, or for a "chunk" of a
    prompt: not all libraries take its queries for the last ones."""
    if case.feature and case.feature not in known:
        raise NotImplementedError(f"{case.feature} is not measured here")
    if case.chunk and "chunk" not in known:
        raise NotImplementedError("chunks are not measured here")


def _first(value: Any) -> tuple[torch.Tensor, ...]:
    """Out, from a function that returns out or (out, ...)."""
    return (value if isinstance(value, torch.Tensor) else value[0],)


def _transposed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)


def _leaves(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.detach().requires_grad_() for t in tensors)


def _autograd(out: torch.Tensor, leaves: tuple[torch.Tensor, ...], dout: torch.Tensor) -> Any:
    """The backward alone, over a kept graph."""
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


class Build:
    """The bare ops of a build of flash_cute: CMake's FLASH_CUTE_NAMESPACE is their name."""

    def __init__(self, ops: Any, version: str) -> None:
        self._fwd, self._bwd = ops.fwd.default, ops.bwd.default
        self._kvcache = ops.fwd_kvcache.default
        self.version = version
        self._scope: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, case: Case, x: Inputs) -> Work:
        if _over_cache(case):
            run = partial(self._kvcache, x.q, is_causal=case.causal, **_cache(case, x))
            return Work(run, _first, self._scope)
        return self.op(case, x)

    def op(self, case: Case, x: Inputs) -> Work:
        """The forward without the Python function around it."""
        fwd, options = self._fwd, x.options
        call = partial(fwd, x.q, x.k, x.v, is_causal=case.causal, **options)
        return Work(call, _first, self._scope)

    def backward(self, case: Case, x: Inputs) -> Work:
        with self._scope():
            out, lse, *_ = self.op(case, x).run()
        bwd, options = self._bwd, x.options
        return Work(
            lambda: bwd(x.dout, x.q, x.k, x.v, out, lse, is_causal=case.causal, **options),
            lambda grads: tuple(grads[:3]),
            self._scope,
        )


class FlashCute(Build):
    """Ours: the public function forward, the bare op backward (as for FlashAttention-3).

    `kernels` is a part of kernels' ids: only these are used. "" is for all.
    """

    def __init__(self, kernels: str = "") -> None:
        package = importlib.import_module("flash_cute")
        super().__init__(torch.ops.flash_cute, package.__version__)
        self._func, self._decode = package.flash_attn_func, package.flash_attn_with_kvcache
        self._scope = partial(package.library.only, kernels) if kernels else nullcontext
        with self._scope():  # raises where there is no such kernel
            pass

    def forward(self, case: Case, x: Inputs) -> Work:
        if _over_cache(case):
            run = partial(self._decode, x.q, causal=case.causal, **_cache(case, x))
            return Work(run, _first, self._scope)
        if case.feature:  # the function would draw other random numbers for dropout in each call
            return self.op(case, x)
        func = self._func
        return Work(lambda: func(x.q, x.k, x.v, causal=case.causal), _first, self._scope)


def _over_cache(case: Case) -> bool:
    return case.cached and case.feature in ("", *CACHE_FEATURES)


def _lengths(case: Case, x: Inputs, keys: int) -> torch.Tensor:
    """So many keys in the cache of every sequence."""
    return torch.full((case.batch,), keys, device=x.q.device, dtype=torch.int32)


def _cache(case: Case, x: Inputs) -> dict[str, Any]:
    """Arguments of decoding: the keys and values of the case as a cache."""
    if case.feature == "lengths":
        return {"k_cache": x.k, "v_cache": x.v, "cache_seqlens": _lengths(case, x, case.seqlen_k)}
    if case.feature == "append":
        # The last token joins again; turned by no angle it is the same.
        used = _lengths(case, x, case.seqlen_k - 1)
        k_cache, v_cache = x.k.clone(), x.v.clone()
        k_cache[:, -1] = v_cache[:, -1] = torch.nan
        cos = torch.ones(case.seqlen_k, case.dim // 2, device=x.q.device, dtype=x.q.dtype)
        new = {name: getattr(x, name)[:, -1:].clone() for name in ("k", "v")}
        turns = {"rotary_cos": cos, "rotary_sin": torch.zeros_like(cos)}
        return {"k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": used, **new, **turns}
    if case.feature != "pages16":
        return {"k_cache": x.k, "v_cache": x.v}
    page_size = 16
    blocks = case.batch * case.seqlen_k // page_size
    order = torch.Generator().manual_seed(case.seed)  # the same for all
    table = torch.randperm(blocks, generator=order).to(x.q.device)

    def paged(whole: torch.Tensor) -> torch.Tensor:
        pages = torch.empty_like(whole).view(blocks, page_size, *whole.shape[2:])
        pages[table] = whole.view_as(pages)
        return pages

    block_table = table.int().view(case.batch, -1)
    return {"k_cache": paged(x.k), "v_cache": paged(x.v), "block_table": block_table}


class Sdpa:
    """torch's scaled_dot_product_attention on transposed views: one backend, or None for the one
    that torch picks."""

    def __init__(self, backend: SDPBackend | None, version: str) -> None:
        self._backend = backend
        self.version = version

    def _scope(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._backend is None else sdpa_kernel(self._backend)

    @property
    def stores_scores(self) -> bool:
        return self._backend == SDPBackend.MATH

    def _attend(
        self, case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        gqa, dropout_p = case.heads != case.heads_k, x.options.get("dropout_p", 0.0)
        return scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=case.causal, enable_gqa=gqa
        )

    def forward(self, case: Case, x: Inputs) -> Work:
        _need_plain(case, "dropout0.1")
        q, k, v = _transposed(x.q, x.k, x.v)
        run = partial(self._attend, case, x, q, k, v)
        return Work(run, lambda out: _transposed(out), self._scope, not case.feature)

    def backward(self, case: Case, x: Inputs) -> Work:
        _need_plain(case, "dropout0.1")
        leaves = _leaves(*_transposed(x.q, x.k, x.v))
        with self._scope():
            out = self._attend(case, x, *leaves)
        (dout,) = _transposed(x.dout)
        run = _autograd(out, leaves, dout)
        slack = _roundings(case) if self._backend is None and not x.q.is_cuda else 1.0
        return Work(
            run, lambda grads: _transposed(*grads), self._scope, not case.feature, slack=slack
        )


def _roundings(case: Case) -> float:
    """How much larger errors are of torch's kernel for the CPU, which adds up gradients of blocks
    of 256 queries in the inputs' dtype: n roundings of sums that grow, in place of one."""
    return math.sqrt((math.ceil(case.seqlen_q / 256) + 1) / 2)


def scores_bytes(candidate: Candidate, case: Case, direction: str) -> int:
    """Bytes that a candidate takes for matrices of scores; 0 if it stores none.

    Measured at the peak of torch's math backend, in matrices of fp32: 2.6 forward, 3.5 backward.
    """
    if not (isinstance(candidate, Sdpa) and candidate.stores_scores):
        return 0
    scores = case.batch * case.heads * case.seqlen_q * case.seqlen_k
    return scores * 4 * (3 if direction == "fwd" else 4)


class FlashAttention2(Sdpa):
    """The FlashAttention-2 in torch; its windows, which scaled_dot_product_attention does not
    offer, through the ops behind it."""

    def forward(self, case: Case, x: Inputs) -> Work:
        if case.window is None:
            return super().forward(case, x)
        run = partial(
            torch.ops.aten._flash_attention_forward.default,
            *(x.q, x.k, x.v, None, None, case.seqlen_q, case.seqlen_k, 0.0, True, False),
            window_size_left=case.window,
            window_size_right=0,
        )
        return Work(run, _first)

    def backward(self, case: Case, x: Inputs) -> Work:
        if case.window is None:
            return super().backward(case, x)
        out, lse, rng_state, unused, _ = self.forward(case, x).run()
        run = partial(
            torch.ops.aten._flash_attention_backward.default,
            *(x.dout, x.q, x.k, x.v, out, lse, None, None, case.seqlen_q, case.seqlen_k),
            *(0.0, True, rng_state, unused),
            window_size_left=case.window,
            window_size_right=0,
        )
        return Work(run, tuple)


class FlashAttention3:
    """FlashAttention-3 from a shared library, its ops called directly in both directions."""

    def __init__(self, device: torch.device) -> None:
        _need_cuda(device)
        folder = _rivals_folder()
        library = _existing(folder / "fa3.so")
        ctypes.CDLL(str(_existing(folder / "libcudart.so.12")), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(str(library))
        self._ops = torch.ops.flash_attn_3
        self.version = f"fa3.so, sha256 {hashlib.sha256(library.read_bytes()).hexdigest()[:12]}"

    def forward(self, case: Case, x: Inputs) -> Work:
        _need_plain(case, "chunk", "pages16", "lengths")
        k, v, cached = x.k, x.v, {}
        if case.feature in ("pages16", "lengths"):
            cache = _cache(case, x)
            k, v = cache["k_cache"], cache["v_cache"]
            names = {"page_table": "block_table", "seqused_k": "cache_seqlens"}
            cached = {name: cache[ours] for name, ours in names.items() if ours in cache}
        options = {"softmax_scale": case.dim**-0.5, "is_causal": case.causal, **cached}
        return Work(partial(self._ops.fwd, x.q, k, v, **options), _first)

    def backward(self, case: Case, x: Inputs) -> Work:
        out, lse, *_ = self.forward(case, x).run()
        bwd, scale = self._ops.bwd, case.dim**-0.5
        grads = tuple(torch.empty_like(t) for t in (x.q, x.k, x.v))
        args = (x.dout, x.q, x.k, x.v, out, lse, *grads)
        return Work(lambda: bwd(*args, softmax_scale=scale, is_causal=case.causal), lambda _: grads)


class FlashAttentionFunction:
    """A library with flash_attn_func(q, k, v, causal=) -> out or (out, ...), autograd backward."""

    def __init__(self, func: Callable[..., Any], version: str) -> None:
        self._func = func
        self.version = version

    def forward(self, case: Case, x: Inputs) -> Work:
        _need_plain(case)
        return Work(lambda: self._func(x.q, x.k, x.v, causal=case.causal), _first)

    def backward(self, case: Case, x: Inputs) -> Work:
        _need_plain(case)
        leaves = _leaves(x.q, x.k, x.v)
        (out,) = _first(self._func(*leaves, causal=case.causal))
        return Work(_autograd(out, leaves, x.dout), tuple)


def _need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Missing(f"needs a CUDA device, the run is on {device.type}")


def _rivals_folder() -> Path:
    folder = os.environ.get("FLASH_CUTE_RIVALS")
    if not folder:
        raise Missing("FLASH_CUTE_RIVALS names no folder")
    return _existing(Path(folder))


def _existing(path: Path) -> Path:
    if not path.exists():
        raise Missing(f"{path} does not exist")
    return path


def _cudnn(device: torch.device) -> Candidate:
    _need_cuda(device)
    return Sdpa(SDPBackend.CUDNN_ATTENTION, f"cuDNN {torch.backends.cudnn.version()}")


def _fa2(device: torch.device) -> Candidate:
    _need_cuda(device)
    return FlashAttention2(SDPBackend.FLASH_ATTENTION, f"in torch {torch.__version__}")


def _sdpa(device: torch.device) -> Candidate:
    return Sdpa(None, f"in torch {torch.__version__}")


def _math(device: torch.device) -> Candidate:
    return Sdpa(SDPBackend.MATH, f"in torch {torch.__version__}")


def _fa3fp8(device: torch.device) -> Candidate:
    _need_cuda(device)
    folder = _existing(_rivals_folder() / "fa3fp8")
    return _function([folder], "fa3_fwd_interface", "fa3-fwd")


def _fa4(device: torch.device) -> Candidate:
    _need_cuda(device)
    folder = _existing(_rivals_folder() / "fa4")
    dsl = _existing(folder / "nvidia_cutlass_dsl" / "dsl_packages")
    return _function([folder, dsl], "flash_attn.cute.interface", "flash-attn-4")


def _function(folders: list[Path], module: str, distribution: str) -> Candidate:
    sys.path[:0] = [str(f) for f in folders if str(f) not in sys.path]
    func = importlib.import_module(module).flash_attn_func
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = "unknown"
    return FlashAttentionFunction(func, version)


def _build(namespace: str, library: str) -> Candidate:
    torch.ops.load_library(str(_existing(Path(library))))
    ops = getattr(torch.ops, namespace)
    if not hasattr(ops, "fwd"):
        raise Missing(f"{library} has no torch.ops.{namespace}")
    return Build(ops, "another build")


LOADERS: dict[str, Callable[[torch.device], Candidate]] = {  # of rivals
    "cudnn": _cudnn,
    "fa2": _fa2,
    "fa3": FlashAttention3,
    "fa3fp8": _fa3fp8,
    "fa4": _fa4,
    "math": _math,
    "sdpa": _sdpa,
}


def load(
    names: Iterable[str], device: torch.device, kernels: str = ""
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """The candidates that can be loaded, and for each other name the reason why not.

    A name is one of LOADERS, "flash_cute:PART" for flash_cute with those kernels alone whose id
    contains PART, or "NAME=LIBRARY" for a build of flash_cute whose ops are torch.ops.NAME;
    `kernels` is the part for flash_cute under its own name.

    A library that fails to load may raise anything; none of it ends the run.
    """
    candidates: dict[str, Candidate] = {}
    missing: dict[str, str] = {}
    for name, _, library in (n.partition("=") for n in names):
        try:
            base, _, part = name.partition(":")
            if library:
                candidates[name] = _build(name, library)
            elif base == OURS:
                candidates[name] = FlashCute(part or kernels)
            else:
                candidates[name] = LOADERS[name](device)
        except Exception as error:
            missing[name] = describe(error)
    return candidates, missing


def without_folders(text: str) -> str:
    """Of absolute paths the last part: reports are read on other machines."""
    return _FOLDERS.sub("", text)


def describe(error: BaseException) -> str:
    """One line for a report: the type (unless it says nothing) and the message's first line."""
    line = next(iter(str(error).strip().splitlines()), "")[:300]
    line = without_folders(line)
    if isinstance(error, (Missing, NotImplementedError)) and line:
        return line
    return f"{type(error).__name__}: {line}"
