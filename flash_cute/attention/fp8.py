"""Attention of q, k and v that are rounded to fp8."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flash_cute.attention.config import FP8AttentionConfig
from flash_cute.attention.layers import FlashAttention3
from flash_cute.call.fp8 import power_of_two_scale
from flash_cute.functional.kept import attention
from flash_cute.functional.kept_autograd import Fp8Form

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class RoundToFP8(torch.autograd.Function):
    """Rounds x to fp8 values times a scale, in x's dtype; the gradient passes unchanged.

    ``apply(x, dtype, dims)``: x (..., dim), the fp8 dtype, and the dims that share a scale. It
    rounds to nearest even, as torch's casts do; inf and NaN stay, and finite values beyond x's
    dtype become the largest fp8 value times the scale that it holds.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype, dims: tuple[int, ...]) -> Tensor:
        largest = torch.finfo(dtype).max
        scale = power_of_two_scale(x, dims, largest)
        rounded = (x.to(scale.dtype) / scale).to(dtype).to(scale.dtype) * scale
        most = (2 - torch.finfo(dtype).eps) * 2.0 ** (math.frexp(torch.finfo(x.dtype).max)[1] - 1)
        rounded = rounded.clamp(-most, most)
        return torch.where(x.isfinite(), rounded.to(x.dtype), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing is saved for backward."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class FP8Attention(FlashAttention3):
    """:class:`FlashAttention3` whose q, k and v are rounded to fp8, with scales.

    The values are exactly those of fp8, scaled by powers of two. In 16 bits and e4m3 they are given
    to the op of e4m3 inputs where that computes the call (:mod:`flash_cute.call.fp8`): on the CPU
    and on Hopper, without softcap and dropout, also in graphs of torch.compile. Other attention of
    them runs in the module's dtype, with its accuracy: it shows what fp8 does to a model's results.

    The gradient is that of the rounded values, passed through the rounding (straight-through, arXiv
    1308.3432), and of weights that are not rounded. Backward keeps q, k and v in fp8, half of the
    bytes of 16 bits, and widens them to the same numbers: it takes the time of 16 bits, and that of
    rounding and widening. ``docs/performance.md`` has both. Inside of transforms of torch.func they
    are kept, and computed, in the module's dtype; so graphs of torch.compile keep what the op does
    not compute.

    Args:
        config: an :class:`FP8AttentionConfig`.

    Raises:
        TypeError: config is not an FP8AttentionConfig.

    Example::

        import torch
        from flash_cute.attention import FP8Attention, FP8AttentionConfig

        attention = FP8Attention(FP8AttentionConfig(d_model=512, num_heads=8, scaling="head"))
        out = attention(torch.randn(2, 100, 512))
    """

    def __init__(self, config: FP8AttentionConfig) -> None:
        if not isinstance(config, FP8AttentionConfig):
            raise TypeError(f"config is {type(config).__name__}; expected an FP8AttentionConfig")
        super().__init__(config)
        self.format, self.scaling = FORMATS[config.format], config.scaling

    def _form(self, packed: bool) -> Fp8Form:
        return Fp8Form(self.format, (-3,) * packed + (-2,) * (self.scaling == "head"))

    def _rounded(self, x: Tensor, packed: bool = False) -> Tensor:
        if x.numel() == 0:
            return x
        return RoundToFP8.apply(x, self.format, self._form(packed).shared(x))

    def _call(
        self, tensors: tuple[Tensor, ...], lengths: dict[str, Any], options: dict[str, Any]
    ) -> Tensor:
        form = self._form(len(tensors) == 1)
        is_kept = form.is_computed(tensors[0])
        if not is_kept and not torch.compiler.is_compiling():
            is_kept = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if is_kept and all(map(Tensor.numel, tensors)):
            return attention(tensors, form, lengths, **options)
        return super()._call(tensors, lengths, options)

    def extra_repr(self) -> str:
        name = str(self.format).removeprefix("torch.")
        return f"{super().extra_repr()}, format={name}, scaling={self.scaling!r}"
