"""nn.MultiheadAttention whose projections have fp8 products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute.precision.formats import FP8Config, checked_config
from flash_cute.precision.fp8_linear import FP8LinearLayer, fp8_linear
from flash_cute.precision.fp8_replaceable import reason_to_leave_attention
from flash_cute.precision.fp8_scales import FP8Scales


class FP8MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with fp8 products in its four projections.

    torch's own module never calls its ``out_proj``: it passes that layer's weight to a function, or
    in eval to a fused kernel. So the module is replaced as a whole. Arguments, results, parameters
    and their names are torch's. Scores, softmax and the weighted sum of values have the dtype of
    the projections' results.

    `from_attention` makes it. Raises NotImplementedError for nested tensors.
    """

    in_scales: nn.ModuleList  # of q, k and v; only the first is used if they are one tensor

    @classmethod
    def from_attention(
        cls, attention: nn.MultiheadAttention, config: FP8Config | None = None
    ) -> FP8MultiheadAttention:
        """The module that holds ``attention``'s own Parameters, in its mode.

        Raises:
            TypeError: it is not an nn.MultiheadAttention, or the config not an FP8Config.
            NotImplementedError: it has ``add_bias_kv`` or ``add_zero_attn``, or adds something to
                nn.MultiheadAttention, such as hooks or parameters.
        """
        if not isinstance(attention, nn.MultiheadAttention):
            kind = type(attention).__name__
            raise TypeError(f"attention must be an nn.MultiheadAttention, not {kind}")
        if reason := reason_to_leave_attention(attention):
            raise NotImplementedError(f"attention {reason}, which fp8 attention would lose")
        new = cls(
            attention.embed_dim,
            attention.num_heads,
            attention.dropout,
            bias=attention.in_proj_bias is not None,
            kdim=attention.kdim,
            vdim=attention.vdim,
            batch_first=attention.batch_first,
            device="meta",
        )
        for name, parameter in attention.named_parameters(recurse=False, remove_duplicate=False):
            setattr(new, name, parameter)
        config = checked_config("config", config)
        new.out_proj = FP8LinearLayer.from_linear(attention.out_proj, config)  # type: ignore
        device = attention.out_proj.weight.device
        new.in_scales = nn.ModuleList(FP8Scales(config, device) for _ in range(3))
        for name, value in vars(attention).items():
            if not hasattr(new, name):
                setattr(new, name, value)
        return new.train(attention.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `torch.nn.MultiheadAttention.forward`; the hint ``is_causal`` needs an attn_mask,
        which is what is applied.

        Raises:
            NotImplementedError: nested tensors.
            TypeError: a mask is neither bool nor floating point.
            ValueError: sizes do not match; ``is_causal`` without an attn_mask.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint: give the attn_mask that it describes")
        self._check(query, key, value)
        projected = self._project(query, key, value)
        if query.dim() == 2:
            q, k, v = (self._heads(x[None], batch_first=True) for x in projected)
        else:
            q, k, v = (self._heads(x, self.batch_first) for x in projected)
        mask = self._mask(attn_mask, key_padding_mask, q, k, query.dim() == 2)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)  # unscaled, fp16 may overflow
            weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        if query.dim() == 2:
            out, weights = out[0].transpose(0, 1), None if weights is None else weights[0]
        else:
            out = out.permute(0, 2, 1, 3) if self.batch_first else out.permute(2, 0, 1, 3)
        return self.out_proj(out.flatten(-2)), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuses inputs whose sizes do not match, before histories are written."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise NotImplementedError("fp8 attention takes no nested tensors: pad them")
        shapes = [tuple(x.shape) for x in (query, key, value)]
        place = 0 if self.batch_first else 1
        batch = slice(place, place + (query.dim() == 3))  # empty for inputs without a batch
        if (
            {query.dim(), key.dim(), value.dim()} not in ({2}, {3})
            or shapes[1][:-1] != shapes[2][:-1]
            or shapes[0][batch] != shapes[1][batch]
        ):
            raise ValueError(
                f"query, key and value have shapes {shapes[0]}, {shapes[1]}, {shapes[2]}; expected "
                "two or three dims each, one batch, and as many keys as values"
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        scales: list[Any] = list(self.in_scales)
        bias = self.in_proj_bias
        if query is key and key is value and self.in_proj_weight is not None:
            return fp8_linear(query, self.in_proj_weight, bias, scales[0]).chunk(3, dim=-1)
        weights: Sequence[Any] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases: Sequence[Any] = (None,) * 3 if bias is None else bias.chunk(3)
        parts: Any = zip((query, key, value), weights, biases, scales, strict=True)
        return [fp8_linear(*part) for part in parts]

    def _heads(self, x: Tensor, batch_first: bool) -> Tensor:
        """(b, s, h d) or (s, b, h d) to (b, h, s, d)."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)

    def _mask(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        q: Tensor,
        k: Tensor,
        is_one_sequence: bool,
    ) -> Tensor | None:
        """Both masks as one, to be added to scores (b, h, s_q, s_k), in q's dtype; or None."""
        (batch, heads, rows), keys = q.shape[:3], k.shape[2]
        mask = None
        if attn_mask is not None:
            whole = (batch * heads, rows, keys)
            mask = additive("attn_mask", attn_mask, q.dtype, whole[1:], whole)
            mask = mask if mask.dim() == 2 else mask.view(batch, heads, rows, keys)
        if key_padding_mask is not None:
            shape = (keys,) if is_one_sequence else (batch, keys)
            padding = additive("key_padding_mask", key_padding_mask, q.dtype, shape)
            padding = padding.view(batch, 1, 1, keys)
            mask = padding if mask is None else mask + padding
        return mask


def additive(name: str, mask: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensor:
    """torch's masks, in which True hides or a float is added, as floats to add."""
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} has dtype {mask.dtype}: give a bool or a floating point tensor")
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; expected {expected}")
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
