"""The base of the attention layers: projections around flash_cute's attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute.core.padding import Packing, offsets, packing
from flash_cute.functional import flash_attn_func, flash_attn_varlen_func
from flash_cute.functional.packed import (
    flash_attn_qkvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)


def check_heads(d_model: Any, num_heads: Any, num_kv_heads: Any, dropout: Any) -> None:
    """Checks d_model, the numbers of heads, and dropout."""
    for name, x in (
        ("d_model", d_model), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads),
    ):  # fmt: skip
        if isinstance(x, bool) or not isinstance(x, int):
            raise TypeError(f"{name} is {type(x).__name__}; expected an int")
        if x < 1:
            raise ValueError(f"{name} is {x}; expected at least 1")
    if d_model % num_heads:
        raise ValueError(f"d_model is {d_model} and num_heads {num_heads}; heads must divide it")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads is {num_heads} and num_kv_heads {num_kv_heads}; it must be a multiple (GQA)"
        )
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
        raise TypeError(f"dropout is {type(dropout).__name__}; expected a number")
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout is {dropout}; expected a probability in [0, 1]")


class MultiHeadAttention(nn.Module):
    """softmax(scale q k^T) v of each head, between two projections.

    The base of the layers. Parameters have the names, shapes and first values that
    ``nn.MultiheadAttention`` gives them (the same ones from the same seed), so the state dict of
    one loads into the other; with fewer heads of keys and values ``in_proj_weight`` is shorter.

    Args:
        d_model: width of tokens, ``num_heads`` times the head dim.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values; None means ``num_heads`` (GQA, arXiv 2305.13245).
        dropout: probability that an attention weight is dropped in training.
        bias: whether both projections have one.
        score: options of :func:`flash_cute.flash_attn_func` that every call takes.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        score: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(d_model, num_heads, num_kv_heads, dropout)
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_kv_heads
        self.head_dim = d_model // num_heads
        self.dropout = dropout
        self.score = score or {}
        width_of_all = (num_heads + 2 * num_kv_heads) * self.head_dim
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(width_of_all, d_model, **kind))
        self.in_proj_bias = nn.Parameter(torch.empty(width_of_all, **kind)) if bias else None
        self.out_proj = nn.Linear(d_model, d_model, bias, **kind)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attention of each token to all, or to ``key``'s.

        Args:
            hidden_states: (batch, seqlen, d_model), in the parameters' dtype, or any under
                ``torch.autocast``.
            attention_mask: (batch, seqlen), bool or integers: 1 takes part, 0 does not. Floats of
                0 and 1 are allowed, but synchronise with the GPU. With ``key`` it is (batch,
                seqlen_k), of the keys. Values of masked tokens (even NaN) reach no other token and
                no gradient; their own output is ``out_proj.bias``. Causal masks and windows count
                only the tokens that take part.
            key: (batch, seqlen_k, d_model), for cross attention; None is ``hidden_states``.
            value: (batch, seqlen_k, d_model); None is ``key``.
            is_causal: query i sees key j only if ``j <= i + seqlen_k - seqlen_q``.

        Returns:
            (batch, seqlen, d_model). A row that sees no key is ``out_proj.bias``.

        Raises:
            TypeError, ValueError: names the wrong argument; and the errors of
                :func:`flash_cute.flash_attn_func` about dtypes, devices and head dims.
        """
        self._check("hidden_states", hidden_states)
        if key is None and value is not None:
            raise ValueError("value is given without key")
        options = self.score | {"dropout_p": self.dropout if self.training else 0}
        options["causal"] = is_causal or options.get("causal", False)
        if key is None:
            return self._attend_to_itself(hidden_states, attention_mask, options)
        value = key if value is None else value
        return self._attend_to(hidden_states, key, value, attention_mask, options)

    def _attend_to_itself(self, x: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        if mask is None:
            return self.out_proj(self._attend(self._heads(x), {}, options).flatten(-2))
        packed = packing(mask, x)
        lengths = {
            "cu_seqlens": packed.offsets, "max_seqlen": x.shape[1], "seqused": packed.lengths,
        }  # fmt: skip
        out = self._attend(self._heads(packed.pack(x)), lengths, options)
        return packed.unpack(self.out_proj(out.flatten(-2)))

    def _attend(self, qkv: Tensor, lengths: dict[str, Any], options: dict[str, Any]) -> Tensor:
        """Attention of all heads in one tensor (..., heads + 2 heads_k, dim), dense or varlen."""
        if self.num_kv_heads == self.num_heads:
            qkv = self._rounded(qkv.unflatten(-2, (3, self.num_heads)), packed=True)
            return self._call((qkv,), lengths, options)
        parts = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=-2)
        both = {f"{name}_{x}": lengths[name] for name in lengths for x in "qk"}
        return self._call(tuple(map(self._rounded, parts)), both, options)

    def _attend_to(
        self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        for name, y in (("key", key), ("value", value)):
            self._check(name, y)
            if len(y) != len(x) or y.shape[1] != key.shape[1]:
                raise ValueError(
                    f"{name} has shape {tuple(y.shape)}; expected ({len(x)}, {key.shape[1]}, "
                    f"{self.d_model}) to go with hidden_states {tuple(x.shape)}"
                )
        packed: Packing | None = None
        if mask is not None:
            packed = packing(mask, key)
            key, value = packed.pack(key), packed.pack(value)
        q_end = self.num_heads
        k_end = q_end + self.num_kv_heads
        q = self._rounded(self._heads(x, 0, q_end))
        k = self._rounded(self._heads(key, q_end, k_end))
        v = self._rounded(self._heads(value, k_end, k_end + self.num_kv_heads))
        if packed is None:
            return self.out_proj(self._call((q, k, v), {}, options).flatten(-2))
        lengths = {
            "cu_seqlens_q": offsets(len(x), x.shape[1], x.device), "cu_seqlens_k": packed.offsets,
            "max_seqlen_q": x.shape[1], "max_seqlen_k": packed.mask.shape[1],
            "seqused_k": packed.lengths,
        }  # fmt: skip
        out = self._call((q.flatten(0, 1), k, v), lengths, options)
        return self.out_proj(out.flatten(-2)).unflatten(0, x.shape[:2])

    def _call(
        self, tensors: tuple[Tensor, ...], lengths: dict[str, Any], options: dict[str, Any]
    ) -> Tensor:
        """A hook for subclasses: attention of q, k and v, or of all three packed, varlen if there
        are ``lengths``."""
        function: Any = flash_attn_varlen_func if lengths else flash_attn_func
        if len(tensors) == 1:
            function = flash_attn_varlen_qkvpacked_func if lengths else flash_attn_qkvpacked_func
        return function(*tensors, **lengths, **options)

    def _heads(self, x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
        """The in-projection of tokens (..., d_model) to heads [start, end), (..., heads, dim)."""
        rows = slice(start * self.head_dim, None if end is None else end * self.head_dim)
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        return F.linear(x.contiguous(), self.in_proj_weight[rows], bias).unflatten(
            -1, (-1, self.head_dim)
        )

    def _rounded(self, x: Tensor, packed: bool = False) -> Tensor:
        """A hook for subclasses, called on q, k or v (..., heads, dim), or on all three packed
        (..., 3, heads, dim), before attention."""
        return x

    def _check(self, name: str, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; expected a torch.Tensor")
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected (batch, seqlen, d_model = "
                f"{self.d_model})"
            )

    def extra_repr(self) -> str:
        heads = f"d_model={self.d_model}, num_heads={self.num_heads}"
        grouped = f", num_kv_heads={self.num_kv_heads}" * (self.num_kv_heads != self.num_heads)
        return f"{heads}{grouped}, dropout={self.dropout}, bias={self.in_proj_bias is not None}"
