"""The ops ``tiled_fwd`` and ``tiled_bwd``: attention of (B, H, N, D) with the caller's tile.

Each is one node of a graph, for any number of tiles and dynamic lengths. Their functions are in
:mod:`flash_cute.tiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import kernels, ops
from flash_cute.cpu import streaming
from flash_cute.kernels import plan_log
from flash_cute.native import limits
from flash_cute.ops import autograd
from flash_cute.ops.when_imported import when_imported
from flash_cute.tiled.sizes import check_shared_memory

_library = torch.library.Library("flash_cute", "FRAGMENT")
_library.define(
    "tiled_fwd(Tensor q, Tensor k, Tensor v, int rows, int keys, bool return_stats) -> "
    "(Tensor out, Tensor lse, Tensor? sums, Tensor? maxima)"
)
_library.define(
    "tiled_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "int rows, int keys) -> (Tensor dq, Tensor dk, Tensor dv)"
)
fwd = torch.ops.flash_cute.tiled_fwd.default
bwd = torch.ops.flash_cute.tiled_bwd.default

Results = tuple[Tensor | None, ...]


# --- implementations -----------------------------------------------------------------------------


@internals.without_autograd
def _fwd(q: Tensor, k: Tensor, v: Tensor, rows: int, keys: int, return_stats: bool) -> Results:
    """O (B, H, N, D) in q's dtype and its log-sum-exps (B, H, N); with ``return_stats`` also the
    sums of exp(scores - m) and the maxima m."""
    tile = streaming.Tile(rows, keys)
    if not q.is_cuda:
        with torch.autocast("cpu", enabled=False):
            scale = q.shape[-1] ** -0.5
            results = streaming.forward(_folded(q), _folded(k), _folded(v), scale, tile)
            out, sums, maxima = (x.unflatten(0, q.shape[:2]) for x in results)
            sums, maxima = sums.squeeze(-1), maxima.squeeze(-1)
            lse = maxima + sums.log()
        return (out.to(q.dtype), lse, *((sums, maxima) if return_stats else (None, None)))
    _check_tile_fits(q, tile)
    qkv = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    precision = ops.allow_tf32(q)
    with kernels.only(kernel(qkv, "fwd", tile)):
        out, lse, maxima, _ = ops.fwd(*qkv, return_row_max=return_stats, allow_tf32=precision)
    if not return_stats:
        return out.transpose(1, 2), lse, None, None
    sums = (lse - maxima.masked_fill(maxima == -torch.inf, 0)).exp_()
    return out.transpose(1, 2), lse, sums, maxima


@internals.without_autograd
def _bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: int, keys: int
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, from the log-sum-exp alone."""
    tile = streaming.Tile(rows, keys)
    if not q.is_cuda:
        with torch.autocast("cpu", enabled=False):
            gradients = streaming.backward(
                (_folded(q), _folded(k), _folded(v)), _folded(out), _folded(dout),
                lse.flatten(0, 1).unsqueeze(-1), q.shape[-1] ** -0.5, tile,
            )  # fmt: skip
        return tuple(x.unflatten(0, q.shape[:2]).to(q.dtype) for x in gradients)
    _check_tile_fits(q, tile)
    qkv = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    out, dout = out.transpose(1, 2), dout.transpose(1, 2)
    with kernels.only(kernel(qkv, "bwd", tile)):
        dq, dk, dv, *_ = ops.bwd(dout, *qkv, out, lse.contiguous(), allow_tf32=ops.allow_tf32(q))
    return tuple(x.transpose(1, 2) for x in (dq, dk, dv))


def _check_tile_fits(q: Tensor, tile: streaming.Tile) -> None:
    """Refuses a tile that is larger than the shared memory of q's GPU."""
    available = _shared_memory(q.get_device())
    check_shared_memory(tile.keys, tile.rows, q.shape[-1], q.element_size(), available)


@cache
def _shared_memory(gpu: int) -> int:
    return kernels.gpu(gpu).smem_optin


def _folded(x: Tensor) -> Tensor:
    """(B, H, N, D) as (B H, N, D), half types in fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, 1)


def kernel(qkv: tuple[Tensor, Tensor, Tensor], op: str, tile: streaming.Tile) -> str:
    """Id of the CUDA kernel with the nearest tile; q, k and v are (B, N, H, D)."""
    q, k, v = qkv
    options = {"deterministic": ops.deterministic(False)} if op == "bwd" else {}
    problem = kernels.Problem.of(q, k, v, op, allow_tf32=ops.allow_tf32(q), **options)
    found = _nearest(problem, tile, q.get_device() if q.is_cuda else None, limits.current())
    if plan_log.is_on() and q.is_cuda:
        plan_log.say(qkv, op, lambda _: problem, f"{found}, the nearest to {tile}")
    return found


@lru_cache(maxsize=256)
def _nearest(problem: kernels.Problem, tile: streaming.Tile, gpu: int | None, limit: str) -> str:
    """kernels.nearest(), which takes a millisecond, cached by the thread's limit."""
    return kernels.nearest(problem, tile.rows, tile.keys, gpu)


# --- fakes ---------------------------------------------------------------------------------------


def _like(x: Tensor) -> Tensor:
    """A new tensor of x's shape; on CUDA its memory layout is (B, N, H, D)."""
    if x.device.type != "cuda":
        return x.new_empty(x.shape)
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _fake_fwd(q: Tensor, k: Tensor, v: Tensor, rows: int, keys: int, return_stats: bool) -> Results:
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse, sums, maxima = (q.new_empty(q.shape[:3], dtype=dtype) for _ in range(3))
    return (_like(q), lse, *((sums, maxima) if return_stats else (None, None)))


def _fake_bwd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _like(q), _like(k), _like(v)


# --- gradients -----------------------------------------------------------------------------------


class _Attention(internals.Formula):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: int, keys: int, return_stats: bool
    ) -> Results:
        results = autograd.forward_of(fwd, (q, k, v, rows, keys, return_stats))
        out, *statistics = results
        ctx.mark_non_differentiable(*(x for x in statistics if x is not None))
        ctx.save_for_backward(q, k, v, out, statistics[0])
        ctx.tile = rows, keys
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        return *autograd.call(bwd, (dout, *ctx.saved_tensors, *ctx.tile)), None, None, None


# --- torch.vmap ----------------------------------------------------------------------------------


def _vmap_rule(op: Any, info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    """The samples of vmap become part of the batch."""
    samples = info.batch_size

    def folded(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        each = x.expand(samples, *x.shape) if dim is None else x.movedim(dim, 0)
        return each.flatten(0, 1)

    results = op(*(folded(x, dim) for x, dim in zip(args, in_dims, strict=True)))
    unfolded = tuple(None if x is None else x.unflatten(0, (samples, -1)) for x in results)
    return unfolded, tuple(None if x is None else 0 for x in results)


# --- torch.utils.flop_counter --------------------------------------------------------------------


def _count_flops() -> None:
    """Two products of matrices in forward, five in backward."""
    from torch.utils.flop_counter import register_flop_formula

    def formula(products: int, *args: Any) -> int:
        batch, heads, seqlen, dim = args[0].shape
        return 2 * products * batch * heads * seqlen * seqlen * dim

    for op, products in ((torch.ops.flash_cute.tiled_fwd, 2), (torch.ops.flash_cute.tiled_bwd, 5)):
        register_flop_formula(op, get_raw=True)(
            lambda *args, products=products, out_val=None: formula(products, *args)
        )


for _op, _function, _fake, _formula in (
    (fwd, _fwd, _fake_fwd, _Attention),
    (bwd, _bwd, _fake_bwd, autograd.refusal(bwd)),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_op, _function, _key)
    torch.library.register_fake(_op, _fake, lib=_library)
    torch.library.register_vmap(_op, lambda *args, op=_op: _vmap_rule(op, *args), lib=_library)
    _library.impl(_op, autograd.differentiable_kernel(_op, _formula), "Autograd")
when_imported("torch.utils.flop_counter", _count_flops)
