"""``OptimizedLinear``: ``nn.Linear`` with a precision setting for its product."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute.call import validate

LEVELS = ("conservative", "balanced", "aggressive")


class OptimizedLinear(nn.Linear):
    """x W^T + b, with the parameters, first values and state dict of ``nn.Linear``.

    Args:
        in_features: size of the last dimension of inputs.
        out_features: of outputs.
        bias: whether there is one.
        optimization_level: what may be done for speed and memory.

            - "conservative": ``F.linear`` as it is, bit for bit.
            - "balanced": all rows are one matrix, whatever the dimensions and strides of the input,
              so that product and bias are one GEMM. ``F.linear`` does so for contiguous inputs
              alone; for those that are transposed (as ``batch_first=False`` makes them), expanded
              or sliced it adds the bias in a pass of its own over the output, and multiplies batch
              by batch where the weight needs no gradient. The same sums, maybe in another order.
            - "aggressive": "balanced", and fp32 inputs are multiplied in bf16 with fp32 sums, on
              tensor cores where there are any; backward keeps half the bytes of the input. The
              result is fp32 again and has bf16's accuracy, 2^-8. Inputs of other dtypes, and any
              under ``torch.autocast``, whose dtype holds, are multiplied as they are.
        device, dtype: of the parameters.

    Raises:
        TypeError: a size is not an int, or ``bias`` not a bool.
        ValueError: an unknown level, or a negative size.

    Example::

        import torch
        from flash_cute.core import OptimizedLinear

        layer = OptimizedLinear(512, 2048)
        layer.load_state_dict(torch.nn.Linear(512, 2048).state_dict())
        y = layer(torch.randn(100, 2, 512).transpose(0, 1))  # (2, 100, 2048), one GEMM
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        optimization_level: str = "balanced",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if optimization_level not in LEVELS:
            raise ValueError(
                f"optimization_level is {optimization_level!r}; expected one of {', '.join(LEVELS)}"
            )
        validate.count("in_features", in_features)
        validate.count("out_features", out_features)
        validate.flag("bias", bias)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.optimization_level = optimization_level

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), in the input's dtype, or autocast's."""
        if self.optimization_level == "conservative":
            return F.linear(input, self.weight, self.bias)
        x = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
        out = self._in_bf16(x) if self._may_use_bf16(x) else F.linear(x, self.weight, self.bias)
        return out.reshape(*input.shape[:-1], self.out_features)

    def _may_use_bf16(self, x: Tensor) -> bool:
        in_fp32 = x.dtype == self.weight.dtype == torch.float32
        aggressive = self.optimization_level == "aggressive"
        return aggressive and in_fp32 and not torch.is_autocast_enabled(x.device.type)

    def _in_bf16(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return F.linear(x.bfloat16(), self.weight.bfloat16(), bias).float()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, optimization_level={self.optimization_level!r}"
