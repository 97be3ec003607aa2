"""flash-attn 2.8's rotary embedding (RoFormer, arXiv 2104.09864) in ATen's operations.

Angles are applied in fp32. ``interleaved`` pairs dims (2i, 2i + 1), else (i, i + rotary_dim / 2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flash_cute.call import spellings, validate
from flash_cute.compat import calls


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair (a, b) of the last dimension becomes (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """x (batch, seqlen, heads, dim) rotated by cos and sin ([batch,] seqlen, rotary_dim / 2)."""
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise ValueError(
            f"cos has {cos.shape[-1]} columns; twice that exceeds head dim {x.shape[-1]}"
        )
    if interleaved:
        cos, sin = (y.repeat_interleave(2, -1).unsqueeze(-2) for y in (cos, sin))
    else:
        cos, sin = (torch.cat((y, y), -1).unsqueeze(-2) for y in (cos, sin))
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    turned = turned * cos + rotate_half(turned, interleaved) * sin
    return torch.cat((turned.to(x.dtype), rest), -1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates x by the angles of its positions.

    Args:
        x: (batch, seqlen, heads, dim), or (total, heads, dim) with ``cu_seqlens``.
        cos, sin: (positions, rotary_dim / 2); tokens beyond the positions are not rotated.
        inplace: x is written and returned.
        seqlen_offsets: position of each sequence's first token, an int or (batch,).
        cu_seqlens: int32 (batch + 1,), where sequences begin.
        max_seqlen: ignored.

    Returns:
        x's shape and dtype.
    """
    validate.flag("interleaved", interleaved)
    validate.flag("inplace", inplace)
    if not isinstance(seqlen_offsets, Tensor):
        validate.count("seqlen_offsets", seqlen_offsets)
    elif seqlen_offsets.is_floating_point() or seqlen_offsets.dtype == torch.bool:
        raise TypeError(f"seqlen_offsets has dtype {seqlen_offsets.dtype}; expected integers")
    if max_seqlen is not None:
        validate.length("max_seqlen", spellings.integer(max_seqlen))
    if cu_seqlens is None:
        positions = torch.arange(x.shape[1], device=x.device)
        if isinstance(seqlen_offsets, Tensor):
            positions = positions + seqlen_offsets[:, None]
        else:
            positions = positions + seqlen_offsets
    else:
        rows = torch.arange(len(x), device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
        sequence = sequence.clamp(max=max(len(cu_seqlens) - 2, 0))
        shift = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        positions = rows - cu_seqlens[sequence] + shift
    is_known = ((positions >= 0) & (positions < len(cos)))[..., None]
    places = positions.clamp(0, len(cos) - 1)
    cos = torch.where(is_known, cos[places].float(), 1.0)
    sin = torch.where(is_known, sin[places].float(), 0.0)
    out = apply_rotary_emb_torch(x, cos, sin, interleaved)
    return x.copy_(out) if inplace else out


apply_rotary_emb_func = apply_rotary_emb  # its older name


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k of qkv (batch, seqlen, 3, heads, dim), or, with ``num_heads_q``, (batch,
    seqlen, num_heads_q + 2 heads_k, dim), in place; k by ``cos_k`` and ``sin_k`` if given."""
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        heads_k = calls.kv_heads(qkv, num_heads_q)
        q, k, _ = qkv.split([qkv.shape[2] - 2 * heads_k, heads_k, heads_k], 2)
    options: dict[str, Any] = {"inplace": True, "seqlen_offsets": seqlen_offsets}
    apply_rotary_emb(q, cos, sin, interleaved, **options)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(k, cos_k, sin_k, interleaved, **options)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotates k of kv (batch, seqlen, 2, heads, dim) in place."""
    k = kv[:, :, 0]
    apply_rotary_emb(k, cos, sin, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    return kv


def _check_base(name: str, x: Any) -> None:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} is {validate.kind_of(x)}; expected a number")
    if not 0 < x < math.inf:
        raise ValueError(f"{name} is {x}; expected a positive number")


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k in place, with tables that grow as needed; with ``scale_base`` (usually 512)
    it is XPos (arXiv 2212.10554)."""

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        validate.count("dim", dim, 2)
        if dim % 2:
            raise ValueError(f"dim is {dim}; expected a multiple of 2: dims are rotated in pairs")
        _check_base("base", base)
        if scale_base is not None:
            _check_base("scale_base", scale_base)
        validate.flag("interleaved", interleaved)
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.scale_base = scale_base
        steps = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", self.base ** (-steps / dim), persistent=False)
        scale = None if scale_base is None else (steps + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._tables: tuple[Tensor, ...] = ()

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """qkv as in :func:`apply_rotary_emb_qkv_`; or q (batch, seqlen, heads, dim) and kv (batch,
        seqlen, 2, heads_k, dim). ``max_seqlen`` is the number of positions if ``seqlen_offset`` is
        a tensor."""
        length = max_seqlen
        if length is None:
            if isinstance(seqlen_offset, Tensor):
                raise ValueError("max_seqlen is None; it is needed if seqlen_offset is a tensor")
            validate.count("seqlen_offset", seqlen_offset)
            length = qkv.shape[1] + seqlen_offset
        validate.count("max_seqlen", length)
        cos, sin, cos_k, sin_k = self._angles(length, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(
            qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset
        )
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _angles(self, length: int, like: Tensor) -> tuple[Tensor, ...]:
        """cos and sin of q and of k, in the dtype of ``like``."""
        tables = self._tables
        kind = (like.dtype, like.device)
        if tables and len(tables[0]) >= length and (tables[0].dtype, tables[0].device) == kind:
            return tables
        positions = torch.arange(length, device=like.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq.float())
        cos, sin, factor = angles.cos(), angles.sin(), torch.ones_like(angles)
        if self.scale is not None and self.scale_base is not None:
            power = (positions - length // 2) / self.scale_base
            factor = self.scale.float() ** power[:, None]
        tables = (cos * factor, sin * factor, cos / factor, sin / factor)
        self._tables = tuple(x.to(like.dtype) for x in tables)
        return self._tables
