"""Attention of (B, H, N, D) whose tile the caller chooses: ``Br`` query rows, ``Bc`` key columns.

Softmax over ``q k^T / sqrt(D)``, without a mask (FlashAttention, arXiv 2205.14135). Any ``Bc, Br``
>= 1 gives the right result, whether they divide N or not; N x N numbers are never stored.

- On the CPU they are the tile. A step takes several small tiles (:mod:`flash_cute.cpu.streaming`).
- On CUDA tiles are built in: the kernel with the nearest tile runs, of those that are made for the
  head dim (:func:`flash_cute.kernels.nearest`; :func:`kernel_of` says which). A pair whose tiles of
  Q, K and V would not fit into a CTA's shared memory raises ValueError.

For masks, grouped heads and the fastest kernel call :func:`flash_cute.flash_attn_func`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flash_cute import _torch_internals as internals
from flash_cute import kernels, limits, ops, plan_log, validate
from flash_cute.cpu import streaming
from flash_cute.ops import autocast
from flash_cute.tiled_sizes import DEFAULT_BLOCK, check_shared_memory, check_sizes


def flash_attention_forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    Bc: int = DEFAULT_BLOCK,
    Br: int = DEFAULT_BLOCK,
    use_half: bool = False,
    return_stats: bool = False,
) -> Any:
    """Attention of (B, H, N, D), differentiable by autograd.

    Args:
        Q, K, V: (B, H, N, D) each, of one shape, dtype and device: float32 or float16, also
            bfloat16, and float64 on the CPU.
        Bc: key columns of a tile.
        Br: query rows of a tile.
        use_half: compute in float16, whatever the dtype of the tensors.
        return_stats: also return what :func:`flash_attention_backward` takes.

    Returns:
        O (B, H, N, D) in Q's dtype. With ``return_stats`` (O, l, m), l and m (B, H, N), fp32 (fp64
        for float64): of each row the sum of exp(scores - m), and the largest score m. These two are
        constants for autograd.

    Raises:
        TypeError, ValueError: tensors or sizes that do not fit; on CUDA a tile that is larger than
            shared memory.
        NotImplementedError: what CUDA has no kernel for: float64, head dims above 256.

    Example::

        Q, K, V = torch.randn(3, 8, 16, 1024, 64).unbind()
        O, l, m = flash_attention_forward(Q, K, V, Bc=64, Br=32, return_stats=True)
    """
    Q, K, V = autocast.cast(Q, K, V)
    tile = _checked({"Q": Q, "K": K, "V": V}, Bc, Br, use_half)
    validate.flag("return_stats", return_stats)
    out, sums, maxima = _Attention.apply(*_computed((Q, K, V), use_half), tile, return_stats)
    out = out.to(Q.dtype)
    return (out, sums, maxima) if return_stats else out


def flash_attention_backward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    dO: Tensor,
    l: Tensor,
    m: Tensor,
    Bc: int = DEFAULT_BLOCK,
    Br: int = DEFAULT_BLOCK,
    use_half: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dQ, dK, dV) of a forward call, without autograd.

    Args:
        Q, K, V: forward's arguments.
        O: its result, (B, H, N, D).
        dO: the gradient of O.
        l, m: row sums and row maxima, (B, H, N), of ``return_stats=True``. Only m + log(l) counts:
            a log-sum-exp as m goes with ones as l.
        Bc, Br, use_half: as for forward. On CUDA the nearest of the backward kernels runs.

    Returns:
        Three tensors like Q, K and V.

    Raises:
        As :func:`flash_attention_forward`.

    Example::

        O, l, m = flash_attention_forward(Q, K, V, return_stats=True)
        dQ, dK, dV = flash_attention_backward(Q, K, V, O, torch.ones_like(O), l, m)
    """
    tile = _checked({"Q": Q, "K": K, "V": V, "O": O, "dO": dO}, Bc, Br, use_half)
    for name, x in (("l", l), ("m", m)):
        validate.tensor(name, x)
        if x.shape != Q.shape[:3] or not x.is_floating_point():
            raise ValueError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)}; expected floats (B, H, N), "
                f"{tuple(Q.shape[:3])}"
            )
        if x.device != Q.device:
            raise ValueError(f"{name} is on {x.device}, Q on {Q.device}; they must agree")
    exact = torch.float64 if Q.dtype == torch.float64 and not use_half else torch.float32
    lse = m.to(exact) + l.to(exact).log()
    with torch.no_grad():
        q, k, v, out, dout = _computed((Q, K, V, O, dO), use_half)
        gradients = _backward(q, k, v, out, dout, lse, tile)
    dq, dk, dv = (x.to(Q.dtype) for x in gradients)
    return dq, dk, dv


class FlashAttention(nn.Module):
    """:func:`flash_attention_forward` and its gradient as a module without parameters.

    Args:
        bc: key columns of a tile.
        br: query rows of a tile.
        use_half: compute in float16.

    Raises:
        TypeError, ValueError: ``bc`` or ``br`` is no int >= 1.

    Example::

        attention = FlashAttention(bc=64, br=32, use_half=True)
        out = attention(Q, K, V)
    """

    def __init__(
        self, bc: int = DEFAULT_BLOCK, br: int = DEFAULT_BLOCK, use_half: bool = False
    ) -> None:
        super().__init__()
        check_sizes(bc=bc, br=br)
        validate.flag("use_half", use_half)
        self.bc, self.br, self.use_half = bc, br, use_half

    def forward(self, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        """Attention of (B, H, N, D); (B, N, D) is one head."""
        one_head = all(isinstance(x, Tensor) and x.dim() == 3 for x in (Q, K, V))
        if one_head:
            Q, K, V = (x.unsqueeze(1) for x in (Q, K, V))
        out = flash_attention_forward(Q, K, V, self.bc, self.br, self.use_half)
        return out.squeeze(1) if one_head else out

    def backward(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        O: Tensor,
        dO: Tensor,
        l: Tensor,
        m: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:func:`flash_attention_backward` with the module's tile."""
        return flash_attention_backward(Q, K, V, O, dO, l, m, self.bc, self.br, self.use_half)

    def extra_repr(self) -> str:
        return f"bc={self.bc}, br={self.br}, use_half={self.use_half}"


def kernel_of(Q: Tensor, Bc: int = DEFAULT_BLOCK, Br: int = DEFAULT_BLOCK, op: str = "fwd") -> str:
    """Id of the CUDA kernel that a call with (B, H, N, D) tensors like Q and this tile runs.

    ``op`` is "fwd" or "bwd". Without a GPU the answer is that of an H100, and a tile may be larger
    than its shared memory.

    Example::

        kernel_of(torch.randn(1, 4, 300, 64, device="cuda"), Bc=64, Br=128)
    """
    x = Q.transpose(1, 2)
    return _kernel((x, x, x), op, streaming.Tile(Br, Bc))


class _Attention(torch.autograd.Function):
    """(O, l, m) of q, k and v (B, H, N, D) in the dtype to compute in; l and m are None where they
    are not asked for."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tile: streaming.Tile, stats: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out, lse, *row_stats = _forward(q, k, v, tile, stats)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tile = tile
        if not stats:
            return out, None, None
        sums, maxima = row_stats
        ctx.mark_non_differentiable(sums, maxima)
        return out, sums, maxima

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return *_backward(q, k, v, out, dout, lse, ctx.tile), None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, tile: streaming.Tile, stats: bool
) -> tuple[Tensor, ...]:
    """(O, log-sum-exp), and with ``stats`` l and m."""
    if not q.is_cuda:
        results = streaming.forward(_folded(q), _folded(k), _folded(v), q.shape[-1] ** -0.5, tile)
        out, sums, maxima = (x.unflatten(0, q.shape[:2]) for x in results)
        sums, maxima = sums.squeeze(-1), maxima.squeeze(-1)
        return out.to(q.dtype), maxima + sums.log(), sums, maxima
    qkv = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    precision = ops.allow_tf32(q)
    with internals.below_autograd(), kernels.only(_kernel(qkv, "fwd", tile)):
        out, lse, maxima, _ = ops.fwd(*qkv, return_row_max=stats, allow_tf32=precision)
    if not stats:
        return out.transpose(1, 2), lse
    sums = (lse - maxima.masked_fill(maxima == -torch.inf, 0)).exp_()
    return out.transpose(1, 2), lse, sums, maxima


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, tile: streaming.Tile
) -> tuple[Tensor, ...]:
    if not q.is_cuda:
        gradients = streaming.backward(
            (_folded(q), _folded(k), _folded(v)), _folded(out), _folded(dout),
            lse.flatten(0, 1).unsqueeze(-1), q.shape[-1] ** -0.5, tile,
        )  # fmt: skip
        return tuple(x.unflatten(0, q.shape[:2]).to(q.dtype) for x in gradients)
    qkv = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    out, dout = out.transpose(1, 2), dout.transpose(1, 2)
    with internals.below_autograd(), kernels.only(_kernel(qkv, "bwd", tile)):
        dq, dk, dv, *_ = ops.bwd(dout, *qkv, out, lse.contiguous(), allow_tf32=ops.allow_tf32(q))
    return tuple(x.transpose(1, 2) for x in (dq, dk, dv))


def _folded(x: Tensor) -> Tensor:
    """(B, H, N, D) as (B H, N, D), half types in fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, 1)


def _kernel(qkv: tuple[Tensor, Tensor, Tensor], op: str, tile: streaming.Tile) -> str:
    q, k, v = qkv
    options = {"deterministic": ops.deterministic(False)} if op == "bwd" else {}
    problem = kernels.Problem.of(q, k, v, op, allow_tf32=ops.allow_tf32(q), **options)
    kernel = _nearest(problem, tile, q.get_device() if q.is_cuda else None, limits.current())
    if plan_log.is_on() and q.is_cuda:
        plan_log.say(qkv, op, lambda _: problem, f"{kernel}, the nearest to {tile}")
    return kernel


@cache
def _nearest(problem: kernels.Problem, tile: streaming.Tile, gpu: int | None, limit: str) -> str:
    """kernels.nearest(), which takes a millisecond, under a limit of the thread that holds."""
    return kernels.nearest(problem, tile.rows, tile.keys, gpu)


def _computed(tensors: tuple[Tensor, ...], use_half: bool) -> tuple[Tensor, ...]:
    return tuple(x.half() for x in tensors) if use_half else tensors


def _checked(tensors: dict[str, Tensor], bc: int, br: int, use_half: bool) -> streaming.Tile:
    """The tile of a call, once its arguments are right."""
    check_sizes(Bc=bc, Br=br)
    validate.flag("use_half", use_half)
    q = tensors["Q"]
    for name, x in tensors.items():
        validate.tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (B, H, N, D)")
        if x.shape != q.shape:
            raise ValueError(
                f"shapes differ: Q has {tuple(q.shape)}, {name} {tuple(x.shape)}; expected one "
                "(B, H, N, D)"
            )
        if x.dtype not in validate.DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; expected torch.float32 or torch.float16")
        if x.dtype != q.dtype:
            raise TypeError(f"dtypes differ: Q has {q.dtype}, {name} {x.dtype}; cast them to one")
        if x.device != q.device:
            raise ValueError(f"devices differ: Q is on {q.device}, {name} on {x.device}")
    if q.shape[-1] == 0:
        raise ValueError(f"Q has shape {tuple(q.shape)}; its head dim D is 0")
    if q.is_cuda:
        for name, x in tensors.items():
            if x.stride(-1) != 1:
                raise ValueError(f"{name}'s last dimension is not contiguous; call .contiguous()")
        validate.cuda(q, q)
        smem = kernels.gpu(q.get_device()).smem_optin
        check_shared_memory(bc, br, q.shape[-1], 2 if use_half else q.element_size(), smem)
    return streaming.Tile(br, bc)
