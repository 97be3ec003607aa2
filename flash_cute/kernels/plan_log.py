"""The log of calls: a line for each, with its problem and its plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import kernels
from flash_cute.call import validate
from flash_cute.cpu.tiles import KEY_BLOCK, QUERY_BLOCK
from flash_cute.ops.typed import FwdCall, FwdKvcacheCall, VarlenFwdCall
from flash_cute.sparse.lists import TILE

_environment = os.environ.get("FLASH_CUTE_LOG", "")
if _environment not in ("", "plan"):
    raise ImportError(f"FLASH_CUTE_LOG is {_environment!r}; expected plan, or nothing")
_on = _environment == "plan"
_log = logging.getLogger("flash_cute")


def is_on() -> bool:
    """Whether calls are logged."""
    return _on


@contextmanager
def switched(on: bool = True) -> Iterator[None]:
    """Inside, calls are logged, or not: overrides ``FLASH_CUTE_LOG`` for all threads.

    Example::

        import flash_cute
        import torch

        q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
        with flash_cute.plan_log.switched():
            flash_cute.flash_attn_func(q, k, v)
    """
    global _on
    validate.flag("on", on)
    before, _on = _on, bool(on)
    try:
        yield
    finally:
        _on = before


def attention(call: FwdCall | VarlenFwdCall, backward: bool) -> None:
    """Logs a call, and its backward if ``backward``."""
    qkv = (call.q, call.k, call.v)
    for op in ("fwd", "bwd")[: 1 + backward]:
        if call.tile_lists is not None and not call.q.is_cuda:
            say_of_cpu(qkv, op, f"the tiles of {TILE} queries x {TILE} keys that its lists name")
        else:
            say(qkv, op, lambda op: kernels.Problem.of_call(call, op))


def fp8(call: FwdCall | VarlenFwdCall) -> None:
    """Logs a call of an op of e4m3 inputs."""
    if not call.q.is_cuda:
        tile = f"{QUERY_BLOCK} queries x {KEY_BLOCK} keys a tile, weights in e4m3"
        return say_of_cpu((call.q, call.k, call.v), "fp8_fwd", tile)
    say((call.q, call.k, call.v), "fwd", lambda _: kernels.Problem.of_call(call))


def cache(call: FwdKvcacheCall) -> None:
    """Logs a call over a key/value cache."""
    say((call.q, call.k_cache, call.v_cache), "decode", lambda _: kernels.Problem.of_call(call))


def say(
    qkv: tuple[Tensor, Tensor, Tensor],
    op: str,
    problem: Callable[[str], kernels.Problem],
    kernel: str | None = None,
) -> None:
    """Logs one line: the problem, and ``kernel`` or the problem's plan."""
    q = qkv[0]
    if not q.is_cuda:
        tile = f"{QUERY_BLOCK} queries x {KEY_BLOCK} keys a tile"
        return say_of_cpu(qkv, op, f"its flash kernel if the call is plain, else {tile}")
    if torch.compiler.is_compiling() or internals.is_fake(q):
        return
    try:
        what = problem(op)
    except ValueError as error:  # a call without heads, which the op allows
        return _write(f"{op}: {error}")
    try:
        _write(f"{what}: {kernel or kernels.plan(what, q.get_device())}")
    except RuntimeError as error:
        _write(f"{what}: {str(error).splitlines()[0]}")


def say_of_cpu(qkv: tuple[Tensor, Tensor, Tensor], op: str, way: str) -> None:
    """One line: the shapes, and what of ATen runs."""
    q = qkv[0]
    if torch.compiler.is_compiling() or internals.is_fake(q):
        return
    sizes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in zip("qkv", qkv, strict=True))
    _write(f"{op} {str(q.dtype).removeprefix('torch.')} {sizes}: ATen, {way}")


def _write(line: str) -> None:
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
    if not _log.isEnabledFor(logging.INFO):
        _log.setLevel(logging.INFO)
    _log.info(line)
