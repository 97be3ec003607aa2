"""Forward, backward and the module of attention with a tile that the caller chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.call import validate
from flash_cute.cpu import streaming
from flash_cute.ops import autocast
from flash_cute.tiled import ops as tiled_ops
from flash_cute.tiled.sizes import DEFAULT_BLOCK, check_sizes


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
        return_stats: also return the l and m that :func:`flash_attention_backward` needs.

    Returns:
        O (B, H, N, D) in Q's dtype. With ``return_stats`` (O, l, m), l and m (B, H, N), fp32 (fp64
        for float64): for each row the sum of exp(scores - m), and the largest score m, both without
        gradients.

    Raises:
        TypeError, ValueError: wrong tensors or sizes; on CUDA a tile that is larger than shared
            memory.
        NotImplementedError: on CUDA float64, and head dims above 256; and double backward.

    Example::

        import torch
        from flash_cute import flash_attention_forward

        Q, K, V = torch.randn(3, 2, 4, 200, 64).unbind()
        O, l, m = flash_attention_forward(Q, K, V, Bc=64, Br=32, return_stats=True)
    """
    Q, K, V = autocast.cast(Q, K, V)
    tile = _checked({"Q": Q, "K": K, "V": V}, Bc, Br, use_half)
    validate.flag("return_stats", return_stats)
    out, _, sums, maxima = tiled_ops.fwd(*_computed((Q, K, V), use_half), *tile, return_stats)
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
        l, m: row sums and row maxima, (B, H, N), of ``return_stats=True``. Only m + log(l) is used:
            m may be a log-sum-exp with ones as l.
        Bc, Br, use_half: as for forward. On CUDA the nearest of the backward kernels runs.

    Returns:
        Three tensors like Q, K and V.

    Raises:
        As :func:`flash_attention_forward`.

    Example::

        import torch
        from flash_cute import flash_attention_backward, flash_attention_forward

        Q, K, V = torch.randn(3, 2, 4, 200, 64).unbind()
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
        gradients = tiled_ops.bwd(dout, q, k, v, out, lse, *tile)
    dq, dk, dv = (x.to(Q.dtype) for x in gradients)
    return dq, dk, dv


class FlashAttention(nn.Module):
    """:func:`flash_attention_forward` and its gradient as a module without parameters.

    Args:
        bc: key columns of a tile.
        br: query rows of a tile.
        use_half: compute in float16.

    Raises:
        TypeError, ValueError: ``bc`` or ``br`` is not an int >= 1.

    Example::

        import torch
        from flash_cute import FlashAttention

        Q, K, V = torch.randn(3, 2, 4, 200, 64).unbind()
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

    ``op`` is "fwd" or "bwd". Without a GPU it is that of an H100, and a tile may exceed its shared
    memory.

    Example::

        import torch
        from flash_cute.tiled import kernel_of

        Q = torch.randn(1, 4, 300, 64, device="cuda")
        kernel_of(Q, Bc=64, Br=128)
    """
    check_sizes(Bc=Bc, Br=Br)
    validate.tensor("Q", Q)
    x = Q.transpose(1, 2)
    return tiled_ops.kernel((x, x, x), op, streaming.Tile(Br, Bc))


def _computed(tensors: tuple[Tensor, ...], use_half: bool) -> tuple[Tensor, ...]:
    return tuple(x.half() for x in tensors) if use_half else tensors


def _checked(tensors: dict[str, Tensor], bc: int, br: int, use_half: bool) -> streaming.Tile:
    """The tile of a call, after checks of its arguments."""
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
            dtypes = validate.listed(validate.DTYPES)
            raise TypeError(f"{name} has dtype {x.dtype}; expected {dtypes}")
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
    return streaming.Tile(br, bc)
