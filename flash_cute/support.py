"""What the GPU's kernels can do: the one answer for integrations and layers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flash_cute import _torch_internals as internals
from flash_cute import kernels, limits


class Support(NamedTuple):
    """Whether the GPU's kernels can do a call: what it runs, or why each of them cannot."""

    plan: kernels.Plan | None
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.plan is not None


def supports(call: Any, gpu: kernels.Gpu | str | int | None = None) -> Support:
    """What :func:`flash_cute.kernels.plan` says, in place of its errors, of a
    :class:`flash_cute.kernels.Problem`, of its fields by name, or of a call of an attention op
    (:mod:`flash_cute.ops.typed`).

    Example::

        import flash_cute

        found = flash_cute.kernels.supports({"head_dim": 512}, "h100")
        assert not found and "head dim up to 256" in found.reasons[-1]
    """
    try:
        return Support(kernels.plan(_problem_of(call), gpu))
    except RuntimeError as error:
        _, *reasons = str(error).splitlines()
        return Support(None, tuple(line.strip() for line in reasons) or (str(error),))
    except ValueError as error:  # of a dtype that no kernel has, or a build that has none
        return Support(None, (str(error),))


def _problem_of(call: Any) -> kernels.Problem:
    if isinstance(call, kernels.Problem):
        return call
    return kernels.Problem(**call) if isinstance(call, dict) else kernels.Problem.of_call(call)


@internals.constant_in_graphs
@lru_cache(maxsize=256)
def has_kernel(dtype: torch.dtype, head_dim: int, gpu: int | None = None) -> bool:
    """Whether a plain call of this dtype and head dim has a kernel; asked in each call."""
    with limits.again(""):
        return bool(supports({"dtype": dtype, "head_dim": head_dim}, gpu))


@internals.constant_in_graphs
@lru_cache(maxsize=256)
def reads_caches_in_place(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, gpu: int | None = None
) -> bool:
    """Whether calls over a cache of this dtype and these head dims have a kernel that needs no copy
    of the keys."""
    problem = {
        "op": "decode", "dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v,
        "lengths": True,
    }  # fmt: skip
    with limits.again(""):
        found = supports(problem, gpu).plan
    return found is not None and "gather_pages" not in found.launches
