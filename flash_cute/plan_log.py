"""``FLASH_CUTE_LOG=plan``: every attention call says what it is and which kernel it runs.

Lines go to the logger ``flash_cute`` of Python's ``logging``, at level INFO; without any handler
they go to standard error. The variable is read when flash_cute is imported; :func:`switched` does
the same inside of a block. A line costs about a millisecond, as the plan is computed again for it.
Calls that torch.compile traces are not logged.

Example::

    with flash_cute.plan_log.switched():
        flash_cute.flash_attn_func(q, k, v, causal=True)
    # fwd bfloat16 b4 h16/16 q4096 k4096 d128/128 causal: fwd_sm90_bf16_plain_d128x128_m192_...
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import kernels, ops, validate
from flash_cute.cpu.tiles import KEY_BLOCK, QUERY_BLOCK
from flash_cute.ops.typed import FwdCall, FwdKvcacheCall, VarlenFwdCall

_asked = os.environ.get("FLASH_CUTE_LOG", "")
if _asked not in ("", "plan"):
    raise ImportError(f"FLASH_CUTE_LOG is {_asked!r}; expected plan, or nothing")
_on = _asked == "plan"
_log = logging.getLogger("flash_cute")


def is_on() -> bool:
    """Whether calls are logged."""
    return _on


@contextmanager
def switched(on: bool = True) -> Iterator[None]:
    """Inside, calls are logged, or not: in place of ``FLASH_CUTE_LOG``, for all threads."""
    global _on
    validate.flag("on", on)
    before, _on = _on, bool(on)
    try:
        yield
    finally:
        _on = before


def attention(call: FwdCall | VarlenFwdCall, backward: bool) -> None:
    """Logs a call, and its gradient if one may be asked for."""
    q, k, v = call.q, call.k, call.v
    options = _scores(call) | {"dropout": call.dropout_p > 0, "allow_tf32": ops.allow_tf32(q)}
    deterministic = ops.deterministic(call.deterministic)

    def problem(op: str) -> kernels.Problem:
        given = {**options, "deterministic": deterministic and op == "bwd"}
        if isinstance(call, FwdCall):
            return kernels.Problem.of(q, k, v, op, **given)
        sequences = (
            call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k,
            call.seqused_q, call.seqused_k, call.zero_tensors, call.block_table,
        )  # fmt: skip
        return kernels.Problem.of_packed(q, k, v, sequences, op, **given)

    for op in ("fwd", "bwd")[: 1 + backward]:
        say((q, k, v), op, problem)


def cache(call: FwdKvcacheCall, batch: int) -> None:
    """Logs a call over a key/value cache."""
    q, k_cache, v_cache, table = call.q, call.k_cache, call.v_cache, call.block_table
    pages, page_size = (1, 0) if table is None else (table.shape[1], k_cache.shape[1])

    def problem(op: str) -> kernels.Problem:
        return kernels.Problem(
            op, q.dtype, batch, q.shape[-2], k_cache.shape[2], call.max_seqlen_q or q.shape[1],
            pages * k_cache.shape[1], q.shape[-1], v_cache.shape[3],
            varlen=call.cu_seqlens_q is not None, page_size=page_size,
            lengths=call.cache_seqlens is not None, leftpad=call.cache_leftpad is not None,
            num_splits=call.num_splits, split_size=call.split_size, **_scores(call),
        )  # fmt: skip

    say((q, k_cache, v_cache), "decode", problem)


def _scores(call: Any) -> dict[str, Any]:
    """What calls of all ops have, as fields of a Problem."""
    return {
        "causal": call.is_causal, "softcap": call.softcap > 0,
        "window_size": (call.window_size_left, call.window_size_right),
        "softmax_scale": call.softmax_scale or 1.0, "alibi": call.alibi_slopes is not None,
    }  # fmt: skip


def say(
    qkv: tuple[Tensor, Tensor, Tensor],
    op: str,
    problem: Callable[[str], kernels.Problem],
    kernel: str | None = None,
) -> None:
    """One line: the problem, and ``kernel`` or the plan of it."""
    q = qkv[0]
    if torch.compiler.is_compiling() or internals.is_fake(q):
        return
    if not q.is_cuda:
        sizes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in zip("qkv", qkv, strict=True))
        dtype = str(q.dtype).removeprefix("torch.")
        tile = f"{QUERY_BLOCK} queries x {KEY_BLOCK} keys a tile"
        _write(f"{op} {dtype} {sizes}: ATen, its flash kernel if the call is plain, else {tile}")
        return
    what = problem(op)
    try:
        _write(f"{what}: {kernel or kernels.plan(what, q.get_device())}")
    except RuntimeError as error:
        _write(f"{what}: {str(error).splitlines()[0]}")


def _write(line: str) -> None:
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
    if not _log.isEnabledFor(logging.INFO):
        _log.setLevel(logging.INFO)
    _log.info(line)
