"""Calls as values, and ``torch.ops.flash_cute`` with types: made of the ops' schemas by
tools/op_stubs.py.

A call has the op's arguments as its fields, in their order and with their defaults; what an out
overload writes into is not among them.

Example::

    import torch
    from flash_cute.ops.typed import OPS, FwdCall

    q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
    call = FwdCall(q, k, v, is_causal=True)
    out, softmax_lse, _, _ = OPS.fwd(*call._replace(softcap=30.0))
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor


class FwdCall(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float | None = None
    is_causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    dropout_p: float = 0.0
    rng: Tensor | None = None
    deterministic: bool = False
    return_softmax: bool = False
    return_row_max: bool = False
    allow_tf32: bool = False
    tile_lists: Tensor | None = None
    tile_bits: Tensor | None = None


class BwdCall(NamedTuple):
    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    softmax_lse: Tensor
    dlse: Tensor | None = None
    softmax_scale: float | None = None
    is_causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    dropout_p: float = 0.0
    rng: Tensor | None = None
    deterministic: bool = False
    allow_tf32: bool = False
    tile_lists: Tensor | None = None
    tile_bits: Tensor | None = None
    tile_ranks: Tensor | None = None


class VarlenFwdCall(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    zero_tensors: bool = False
    block_table: Tensor | None = None
    softmax_scale: float | None = None
    is_causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    dropout_p: float = 0.0
    rng: Tensor | None = None
    deterministic: bool = False
    return_softmax: bool = False
    return_row_max: bool = False
    allow_tf32: bool = False
    tile_lists: Tensor | None = None
    tile_bits: Tensor | None = None


class VarlenBwdCall(NamedTuple):
    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    softmax_lse: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    zero_tensors: bool = False
    dlse: Tensor | None = None
    softmax_scale: float | None = None
    is_causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    dropout_p: float = 0.0
    rng: Tensor | None = None
    deterministic: bool = False
    allow_tf32: bool = False
    tile_lists: Tensor | None = None
    tile_bits: Tensor | None = None
    tile_ranks: Tensor | None = None


class FwdKvcacheCall(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_seqlens: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int = 0
    cu_seqlens_k_new: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    softmax_scale: float | None = None
    is_causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    rotary_interleaved: bool = True
    num_splits: int = 0
    split_size: int = 0


class AttendKvcacheCall(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int = 0
    softmax_scale: float | None = None
    is_causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    num_splits: int = 0
    split_size: int = 0


class AttendQuantizedKvcacheCall(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    cache_seqlens: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int = 0
    softmax_scale: float | None = None
    is_causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    num_splits: int = 0
    split_size: int = 0


class Fp8FwdCall(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    softmax_scale: float | None = None
    is_causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    sink: Tensor | None = None
    two_level: bool = True
    dtype: torch.dtype | None = None


class Fp8VarlenFwdCall(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    softmax_scale: float | None = None
    is_causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    sink: Tensor | None = None
    two_level: bool = True
    dtype: torch.dtype | None = None


class QuantizeE4M3Call(NamedTuple):
    x: Tensor
    cu_seqlens: Tensor | None = None
    scaling: str = "head"
    heads_k: int | None = None
    power_of_two: bool = False
    hadamard: bool = False
    subtract_mean: bool = False


class DequantizeE4M3Call(NamedTuple):
    values: Tensor
    descale: Tensor
    dtype: torch.dtype


class CombineCall(NamedTuple):
    out_partial: Tensor
    lse_partial: Tensor
    dtype: torch.dtype | None = None


class Fwd(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        rng: Tensor | None = None,
        deterministic: bool = False,
        return_softmax: bool = False,
        return_row_max: bool = False,
        allow_tf32: bool = False,
        tile_lists: Tensor | None = None,
        tile_bits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...
    def out(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        rng: Tensor | None = None,
        deterministic: bool = False,
        return_softmax: bool = False,
        return_row_max: bool = False,
        allow_tf32: bool = False,
        tile_lists: Tensor | None = None,
        tile_bits: Tensor | None = None,
        *,
        out: Tensor,
        softmax_lse: Tensor | None = None,
        row_max: Tensor | None = None,
        softmax: Tensor | None = None,
    ) -> None: ...


class Bwd(Protocol):
    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dlse: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        rng: Tensor | None = None,
        deterministic: bool = False,
        allow_tf32: bool = False,
        tile_lists: Tensor | None = None,
        tile_bits: Tensor | None = None,
        tile_ranks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]: ...
    def out(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dlse: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        rng: Tensor | None = None,
        deterministic: bool = False,
        allow_tf32: bool = False,
        tile_lists: Tensor | None = None,
        tile_bits: Tensor | None = None,
        tile_ranks: Tensor | None = None,
        *,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        dsink: Tensor | None = None,
        softmax_d: Tensor | None = None,
    ) -> None: ...


class VarlenFwd(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        rng: Tensor | None = None,
        deterministic: bool = False,
        return_softmax: bool = False,
        return_row_max: bool = False,
        allow_tf32: bool = False,
        tile_lists: Tensor | None = None,
        tile_bits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...
    def out(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        rng: Tensor | None = None,
        deterministic: bool = False,
        return_softmax: bool = False,
        return_row_max: bool = False,
        allow_tf32: bool = False,
        tile_lists: Tensor | None = None,
        tile_bits: Tensor | None = None,
        *,
        out: Tensor,
        softmax_lse: Tensor | None = None,
        row_max: Tensor | None = None,
        softmax: Tensor | None = None,
    ) -> None: ...


class VarlenBwd(Protocol):
    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
        dlse: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        rng: Tensor | None = None,
        deterministic: bool = False,
        allow_tf32: bool = False,
        tile_lists: Tensor | None = None,
        tile_bits: Tensor | None = None,
        tile_ranks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]: ...
    def out(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
        dlse: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        rng: Tensor | None = None,
        deterministic: bool = False,
        allow_tf32: bool = False,
        tile_lists: Tensor | None = None,
        tile_bits: Tensor | None = None,
        tile_ranks: Tensor | None = None,
        *,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        dsink: Tensor | None = None,
        softmax_d: Tensor | None = None,
    ) -> None: ...


class FwdKvcache(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int = 0,
        cu_seqlens_k_new: Tensor | None = None,
        rotary_seqlens: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        rotary_interleaved: bool = True,
        num_splits: int = 0,
        split_size: int = 0,
    ) -> tuple[Tensor, Tensor]: ...


class AttendKvcache(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int = 0,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        num_splits: int = 0,
        split_size: int = 0,
    ) -> tuple[Tensor, Tensor]: ...


class AttendQuantizedKvcache(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int = 0,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        num_splits: int = 0,
        split_size: int = 0,
    ) -> tuple[Tensor, Tensor]: ...


class Fp8Fwd(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        sink: Tensor | None = None,
        two_level: bool = True,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class Fp8VarlenFwd(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        sink: Tensor | None = None,
        two_level: bool = True,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class QuantizeE4M3(Protocol):
    def __call__(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        scaling: str = "head",
        heads_k: int | None = None,
        power_of_two: bool = False,
        hadamard: bool = False,
        subtract_mean: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


class DequantizeE4M3(Protocol):
    def __call__(self, values: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor: ...


class Combine(Protocol):
    def __call__(
        self, out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]: ...


class Ops(Protocol):
    fwd: Fwd
    bwd: Bwd
    varlen_fwd: VarlenFwd
    varlen_bwd: VarlenBwd
    fwd_kvcache: FwdKvcache
    attend_kvcache: AttendKvcache
    attend_quantized_kvcache: AttendQuantizedKvcache
    fp8_fwd: Fp8Fwd
    fp8_varlen_fwd: Fp8VarlenFwd
    quantize_e4m3: QuantizeE4M3
    dequantize_e4m3: DequantizeE4M3
    combine: Combine


OPS = cast(Ops, cast(Any, torch.ops.flash_cute))
