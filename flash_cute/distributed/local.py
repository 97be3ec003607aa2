"""Attention of a rank's queries to keys that it holds: launches of the ops, merged.

Tensors are (batch, rows, heads, dim), a packed batch being one of batch 1; statistics are (batch,
heads, rows). Nothing here communicates or knows of autograd.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import kernels, ops
from flash_cute.call.validate.ops import statistic_dtype
from flash_cute.distributed.layouts import kept
from flash_cute.distributed.merge import merge_, merge_sink
from flash_cute.distributed.tiles import Launch, Launches
from flash_cute.distributed.trace import named
from flash_cute.native import limits
from flash_cute.ops.typed import OPS, FwdCall, VarlenFwdCall


def call_of_heads(call: FwdCall, heads: slice, k: Tensor, v: Tensor) -> FwdCall:
    """The call for some of its query heads, with ``k`` and ``v`` of their kv heads."""
    slopes = None if call.alibi_slopes is None else call.alibi_slopes[..., heads]
    sink = None if call.sink is None else call.sink[heads]
    return call._replace(q=call.q[:, :, heads], k=k, v=v, alibi_slopes=slopes, sink=sink)


@torch.compiler.assume_constant_result
def takes_fp32_gradients(
    device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int
) -> bool:
    """Whether ``bwd.out`` and ``varlen_bwd.out`` there write gradients of 16-bit inputs in fp32."""
    return _takes_fp32_gradients(device, dtype, head_dim, head_dim_v)


@lru_cache(maxsize=256)
def _takes_fp32_gradients(
    device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int
) -> bool:
    if device.type != "cuda":
        return device.type == "cpu"
    problem = kernels.Problem(
        "bwd", dtype, head_dim=head_dim, head_dim_v=head_dim_v, fp32_gradients=True
    )
    with limits.limit_kernels(""):
        return any(row.verdict != "refused" for row in kernels.explain(problem, device.index))


def unrounded(q: Tensor, v: Tensor) -> bool:
    """Whether a call gives gradients of 16-bit q, k and v in fp32, to be added up."""
    sixteen = q.dtype in (torch.float16, torch.bfloat16)
    return sixteen and takes_fp32_gradients(q.device, q.dtype, q.shape[-1], v.shape[-1])


class Output:
    """Results over the keys so far; at first over none.

    With ``merges``, if several calls reach a row, they are sums in fp32, or fp64 for fp64 inputs.
    Otherwise they are the calls' results, in q's dtype.
    """

    def __init__(self, q: Tensor, v: Tensor, merges: bool) -> None:
        batch, seqlen, heads, _ = q.shape
        dtype = statistic_dtype(q)
        shape = (batch, seqlen, heads, v.shape[-1])
        self.out = q.new_zeros(shape, dtype=dtype if merges else q.dtype)
        self.lse = q.new_full((batch, heads, seqlen), -torch.inf, dtype=dtype)
        self.merges = merges

    def of_heads(self, heads: slice) -> Output:
        """The part of some heads, in the same memory."""
        part = copy.copy(self)
        part.out, part.lse = self.out[:, :, heads], self.lse[:, heads]
        return part

    def attend(self, call: FwdCall, launches: Sequence[Launch]) -> None:
        """Adds attention over the call's k and v, and if :func:`takes_sink` over its sink."""
        for launch in launches:
            part = TileCall(launch, call)
            out, lse = part.forward()
            if part.distance is not None:
                lse = lse - part.distance
            here = self.out[:, part.q_rows], self.lse[:, :, part.q_rows]
            if self.merges:
                merge_(*here, out, lse)
            elif len(launch) == 1:
                for target, x in zip(here, (out, lse), strict=True):
                    target.copy_(x)
            else:  # rows between the tiles may be another call's
                here[0].add_(out)
                torch.maximum(here[1], lse, out=here[1])

    def result(self, q: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """out in q's dtype, and lse; the sink joins them here, once."""
        out, lse = self.out, self.lse
        if sink is not None:
            out, lse = merge_sink(out, lse, sink)
        return out.to(q.dtype), lse


@kept
def merges(launches: Launches) -> bool:
    """Whether several calls reach one row."""
    spans = sorted((t.q_start, t.q_stop) for launch in launches for t in launch)
    return any(a[1] > b[0] for a, b in itertools.pairwise(spans))


@kept
def takes_sink(launches: Launches, rows: int) -> bool:
    """Whether calls can add the sink, to each row once; then results are not rounded before it."""
    tiles = [tile for launch in launches for tile in launch]
    covered = sum(tile.q_len for tile in tiles) == rows
    return covered and not merges(launches) and all(tile.distance == 0 for tile in tiles)


@dataclass(frozen=True)
class Saved:
    """Forward's results over all keys, and their gradients, for backward."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor

    def softmax_d(self) -> Tensor:
        """rowsum(dout * out) - dlse, (batch, heads, rows)."""
        d = (self.dout.to(self.lse.dtype) * self.out.to(self.lse.dtype)).sum(-1).transpose(1, 2)
        return d if self.dlse is None else d - self.dlse

    def of_heads(self, heads: slice) -> Saved:
        """The same of some heads."""
        dlse = None if self.dlse is None else self.dlse[:, heads]
        return Saved(self.dout[:, :, heads], dlse, self.out[:, :, heads], self.lse[:, heads])


def differentiate(
    saved: Saved,
    call: FwdCall,
    launches: Sequence[Launch],
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds the gradients of a call to dq, dk and dv, in place."""
    for launch in launches:
        part = TileCall(launch, call)
        rows = (part.q_rows, part.k_rows, part.k_rows)
        for total, x, where in zip(gradients, part.backward(saved), rows, strict=True):
            total[:, where] += x


class TileCall:
    """A launch of a call: one tile of a batch, or tiles of documents by the varlen ops."""

    def __init__(self, launch: Launch, call: FwdCall) -> None:
        first, last = launch[0], launch[-1]
        self.q_rows = slice(first.q_start, last.q_stop)
        self.k_rows = slice(first.k_start, last.k_stop)
        self.is_varlen = len(launch) > 1
        q, slopes = call.q, call.alibi_slopes
        if slopes is not None:
            slopes = (slopes * first.slopes_sign).contiguous()
            if slopes.dim() == 2 and (self.is_varlen or first.document or len(slopes) > len(q)):
                slopes = slopes[[tile.document for tile in launch]]
        self.distance = self._distance(
            launch, slopes, first.distance * first.slopes_sign, statistic_dtype(q)
        )
        self.sequences = _sequences(launch, q.device) if self.is_varlen else {}
        left, right = first.window
        self.call = call._replace(
            q=q[:, self.q_rows], k=call.k[:, self.k_rows], v=call.v[:, self.k_rows],
            window_size_left=left, window_size_right=right, alibi_slopes=slopes,
            allow_tf32=ops.allow_tf32(q),
        )  # fmt: skip

    @named("forward")
    def forward(self) -> tuple[Tensor, Tensor]:
        """out and lse of the rows; those of no tile have out 0 and lse -inf."""
        if not self.is_varlen:
            out, lse, _, _ = ops.fwd(*self.call)
            return out, lse
        q, k, v, options = self._parts()
        call = VarlenFwdCall(q[0], k[0], v[0], **self.sequences, **options)
        out, lse, _, _ = ops.varlen_fwd(*call)
        return out[None], lse[None]

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q, k and v, and the other arguments that every op has."""
        options = self.call._asdict()
        for name in ("return_softmax", "return_row_max"):
            del options[name]
        return options.pop("q"), options.pop("k"), options.pop("v"), options

    @named("backward")
    def backward(self, saved: Saved) -> tuple[Tensor, ...]:
        """dq, dk and dv of the rows, in fp32 if the kernels support it; those of no tile are 0."""
        q, k, v, options = self._parts()
        options["sink"] = None  # its gradient is computed once, over all keys
        dout, out = saved.dout[:, self.q_rows], saved.out[:, self.q_rows]
        lse = saved.lse[:, :, self.q_rows]
        lse = lse.contiguous() if self.distance is None else lse + self.distance
        dlse = None if saved.dlse is None else saved.dlse[:, :, self.q_rows].contiguous()
        given: tuple[Tensor, ...] = (dout, q, k, v, out, lse)
        op: Any = OPS.bwd
        if self.is_varlen:
            given, op = tuple(x[0] for x in given), OPS.varlen_bwd
            dlse = None if dlse is None else dlse[0]
        # On CUDA only Hopper's kernels do, and they need vectors on 16-byte boundaries.
        if unrounded(q, v) and all(x.data_ptr() % 16 == 0 for x in given[:5]):
            results = tuple(x.new_empty(x.shape, dtype=torch.float32) for x in given[1:4])
            dq, dk, dv = results
            with internals.below_versions():  # the results are new tensors
                op.out(*given, **self.sequences, dlse=dlse, **options, dq=dq, dk=dk, dv=dv)
        else:
            results = op.default(*given, **self.sequences, dlse=dlse, **options)[:3]
        return tuple(x[None] for x in results) if self.is_varlen else results

    def _distance(
        self, launch: Launch, slopes: Tensor | None, distance: int, dtype: torch.dtype
    ) -> Tensor | None:
        """The ALiBi term to subtract from the LSE, (1 or batch, heads, 1 or rows); None if it is 0.

        ``slopes`` and ``distance`` both have the launch's sign, which cancels.
        """
        if slopes is None or distance == 0:
            return None
        slopes = slopes.to(dtype)
        if not self.is_varlen or slopes.dim() == 1:
            return slopes.reshape(-1, slopes.shape[-1], 1) * distance
        of_rows = slopes.new_zeros(slopes.shape[-1], self.q_rows.stop - self.q_rows.start)
        for tile, of_document in zip(launch, slopes, strict=True):
            start = tile.q_start - self.q_rows.start
            of_rows[:, start : start + tile.q_len] = of_document[:, None] * distance
        return of_rows[None]


@kept
def _sequences(launch: Launch, device: torch.device) -> dict[str, Any]:
    """The varlen ops' arguments of sequences, with rows counted from the first tile.

    There may be rows between tiles: a sequence extends to the next tile, and its tile is the used
    part.
    """
    first = launch[0]
    q_starts = [tile.q_start - first.q_start for tile in launch]
    k_starts = [tile.k_start - first.k_start for tile in launch]
    q_lens, k_lens = [tile.q_len for tile in launch], [tile.k_len for tile in launch]
    q_starts.append(q_starts[-1] + q_lens[-1])
    k_starts.append(k_starts[-1] + k_lens[-1])
    indices = {
        "cu_seqlens_q": q_starts, "cu_seqlens_k": k_starts, "seqused_q": q_lens,
        "seqused_k": k_lens,
    }  # fmt: skip
    found: dict[str, Any] = {
        name: torch.tensor(x, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
        for name, x in indices.items()
    }
    return found | {"max_seqlen_q": max(q_lens), "max_seqlen_k": max(k_lens)}
