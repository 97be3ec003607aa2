"""Whether the GPU's kernels support a call, for integrations and layers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flash_cute import _torch_internals as internals
from flash_cute import kernels
from flash_cute.native import limits
from flash_cute.native.library import has_cuda_kernels


class Support(NamedTuple):
    """Whether the GPU's kernels support a call: its plan, or the reasons of each kernel."""

    plan: kernels.Plan | None
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.plan is not None


def supports(call: Any, gpu: kernels.Gpu | str | int | None = None) -> Support:
    """:func:`flash_cute.kernels.plan` without errors for unsupported calls, of a
    :class:`flash_cute.kernels.Problem`, of its fields by name, or of a call of an attention op
    (:mod:`flash_cute.ops.typed`). An unknown ``gpu`` is still an error.

    Example::

        import flash_cute

        found = flash_cute.kernels.supports({"head_dim": 512}, "h100")
        assert not found and "head dim up to 256" in found.reasons[-1]
    """
    try:
        problem = _problem_of(call)
    except ValueError as error:  # no kernel has this dtype
        return Support(None, (str(error),))
    try:
        return Support(kernels.plan(problem, gpu))
    except RuntimeError as error:
        first, *reasons = str(error).splitlines()
        if not first.startswith("flash_cute: no kernel"):
            raise
        return Support(None, tuple(line.strip() for line in reasons))


def _problem_of(call: Any) -> kernels.Problem:
    if isinstance(call, kernels.Problem):
        return call
    return kernels.Problem(**call) if isinstance(call, dict) else kernels.Problem.of_call(call)


@internals.constant_in_graphs
def has_kernel(dtype: torch.dtype, head_dim: int, gpu: str | int | None = None) -> bool:
    """Whether a plain call of this dtype and head dim has a kernel, ignoring the thread's limit."""
    return _plan((("dtype", dtype), ("head_dim", head_dim)), gpu) is not None


@internals.constant_in_graphs
def reads_caches_in_place(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, gpu: str | int | None = None
) -> bool:
    """Whether calls over a cache of this dtype and these head dims have a kernel that needs no copy
    of the keys, ignoring the thread's limit."""
    sizes = (("head_dim", head_dim), ("head_dim_v", head_dim_v))
    found = _plan((("op", "decode"), ("dtype", dtype), *sizes, ("lengths", True)), gpu)
    return found is not None and "gather_pages" not in found.launches


@internals.constant_in_graphs
def reads_eight_bits(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    dims: tuple[int, int],
    gpu: str | int | None = None,
) -> bool:
    """Whether calls of this dtype over a cache of 8 bits, with these head dims of k and of v, have
    a kernel, ignoring the thread's limit."""
    sizes = (("head_dim", dims[0]), ("head_dim_v", dims[1]))
    of_cache = (("op", "decode"), ("dtype", dtype), ("cache_dtype", cache_dtype), ("lengths", True))
    return _plan((*of_cache, *sizes), gpu) is not None


# Called by functions that are constants in graphs: torch would trace into a cached function.
@lru_cache(maxsize=256)
def _plan(fields: tuple[tuple[str, Any], ...], gpu: str | int | None) -> kernels.Plan | None:
    if isinstance(gpu, int) and not has_cuda_kernels():
        return None
    with limits.limit_kernels(""):
        return supports(dict(fields), gpu).plan
