"""A linear layer whose three matrix products, forward and backward, have fp8 operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.ops.autograd import once_differentiable
from flash_cute.precision.formats import FP8Config, check_whole, checked_config
from flash_cute.precision.fp8_products import (
    Rounded,
    has_autocast,
    multiply_rows,
    on_tensor_cores,
    round_to_fp8,
    scale_and_round,
)
from flash_cute.precision.fp8_replaceable import DTYPES, reason_to_leave
from flash_cute.precision.fp8_scales import FP8Scales, largest_of_history


class _Products(torch.autograd.Function):
    """y = x w^T of rounded x and w; dx = dy w and dw = dy^T x of rounded dy as well.

    Saves x in fp8 and the parameter w itself, which is rounded again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (m, k), only for its gradient and dtype
        w: Tensor,  # (n, k)
        x8: Tensor,
        x_scale: Tensor,
        x_inverse: Tensor,
        w8: Tensor,
        w_scale: Tensor,
        w_inverse: Tensor,
        history: Tensor | None,  # of dy
        formats: tuple[torch.dtype, torch.dtype],  # of x and w, of dy
        margin: int,
        out_dtype: torch.dtype,
    ) -> Tensor:
        ctx.formats, ctx.margin, ctx.dtypes = formats, margin, (x.dtype, w.dtype)
        kept_x = (x8, x_scale, x_inverse) if ctx.needs_input_grad[1] else (None,) * 3
        kept_w = (w, w_scale, w_inverse) if ctx.needs_input_grad[0] else (None,) * 3
        ctx.save_for_backward(*kept_x, *kept_w)
        ctx.history = history  # not by save_for_backward: other calls may write it before backward
        tensor_cores = on_tensor_cores(x.device, formats[0], formats[0])
        rounded_x, rounded_w = Rounded(x8, x_scale, x_inverse), Rounded(w8, w_scale, w_inverse)
        return multiply_rows(rounded_x, rounded_w, out_dtype, tensor_cores, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_scale, x_inverse, w, w_scale, w_inverse = ctx.saved_tensors
        forward_format, backward_format = ctx.formats
        rounded_dy = round_to_fp8(dy, backward_format, ctx.margin, ctx.history)
        tensor_cores = on_tensor_cores(dy.device, forward_format, backward_format)
        dx = dw = None
        if w is not None:
            w8 = Rounded(scale_and_round(w, w_scale, forward_format), w_scale, w_inverse)
            dx = multiply_rows(rounded_dy, w8.t(), ctx.dtypes[0], tensor_cores)
        if x8 is not None:
            rounded_x = Rounded(x8, x_scale, x_inverse)
            dw = multiply_rows(rounded_dy.t(), rounded_x.t(), ctx.dtypes[1], tensor_cores)
        return dx, dw, *(None,) * 10


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: FP8Scales) -> Tensor:
    """``F.linear(x, weight, bias)`` with fp8 products; the bias is added to the result.

    Args:
        x: (..., k), any floating dtype; outside of autocast the weight's.
        weight: (n, k).
        bias: (n,) or None.
        scales: options and histories; they are read and written if ``scales.training``.

    Returns:
        (..., n) in x's dtype, under autocast in autocast's.
    """
    device = x.device.type
    autocast = has_autocast(device) and torch.is_autocast_enabled(device)
    autocast = autocast and x.dtype != torch.float64
    if not autocast and x.dtype != weight.dtype:
        raise TypeError(f"input is {x.dtype}, the weight {weight.dtype}: cast one, or use autocast")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"input of {tuple(x.shape)}: the last size must be {weight.shape[1]}")
    if not torch.compiler.is_compiling() and internals.transformed():
        raise NotImplementedError(
            "fp8 linear layers have no rule for torch.func's transforms and forward-mode "
            "derivatives: call the layer outside of them, or keep this layer an nn.Linear"
        )
    config = scales.config
    margin, formats = config.margin, (config.forward_format.dtype, config.backward_format.dtype)
    rows = x.reshape(-1, x.shape[-1])
    of_input, of_weight, of_gradient = scales.in_use()
    with torch.no_grad():
        past_input, past_weight = largest_of_history(of_input), largest_of_history(of_weight)
        x8 = round_to_fp8(rows, formats[0], margin, of_input, past_input)
        w8 = round_to_fp8(weight, formats[0], margin, of_weight, past_weight, clamp=False)
    y: Tensor = _Products.apply(
        rows,
        weight,
        *x8,
        *w8,
        of_gradient,
        formats,
        margin,
        torch.get_autocast_dtype(device) if autocast else x.dtype,
    )
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


class FP8LinearLayer(nn.Module):
    """``nn.Linear`` whose matrix products have fp8 operands, each with one scale a tensor.

    A training step has three products: y = x w^T, dx = dy w and dw = dy^T x. x and w are rounded to
    ``forward_format``, dy to ``backward_format``. Backward keeps only the fp8 values of the input,
    a byte an element. Parameters, the bias and its gradient keep their precision, and results have
    x's dtype, or autocast's.

    On CUDA with compute capability 8.9 or newer the products run on fp8 tensor cores (odd sizes are
    padded with zeros, in fp8). Elsewhere, and for E5M2 by E5M2, operands are rounded to the same
    fp8 values and multiplied in bf16 or fp32: the same numerics, without the speed. `extra_repr`
    says which. A second derivative (``create_graph=True``) raises NotImplementedError.

    Formats: arXiv 2209.05433. Arguments, parameters and initialisation: those of `torch.nn.Linear`.

    Args:
        in_features, out_features: any sizes from 1 on.
        bias: whether there is one. Default True.
        config: options. Default ``FP8Config()``.
        device, dtype: of the parameters. Default torch's.

    Shape:
        input (..., in_features), output (..., out_features).

    Raises:
        TypeError: a size, the config or the dtype is of another type; outside of autocast, the
            input's dtype is not the weight's.
        ValueError: a size is below 1; the input's last size is not in_features.

    Example::

        import torch
        from flash_cute.precision import FP8LinearLayer

        assert FP8LinearLayer(30, 7)(torch.randn(2, 5, 30)).shape == (2, 5, 7)
    """

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: FP8Config | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_whole("in_features", in_features, least=1)
        check_whole("out_features", out_features, least=1)
        if dtype is not None and dtype not in DTYPES:
            raise TypeError(f"dtype is {dtype}; supported: {', '.join(map(str, DTYPES))}")
        config = checked_config("config", config)
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        self._share_parameters(linear, config)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear | FP8LinearLayer, config: FP8Config | None = None
    ) -> FP8LinearLayer:
        """The layer that holds ``linear``'s own Parameters, in its mode.

        Raises:
            TypeError: it is not an nn.Linear, or the config not an FP8Config.
            ValueError: it adds something to nn.Linear, such as hooks or parameters.
        """
        if not isinstance(linear, (nn.Linear, cls)):
            raise TypeError(f"linear must be an nn.Linear, not {type(linear).__name__}")
        if not isinstance(linear, cls) and (reason := reason_to_leave(linear)):
            raise ValueError(f"linear {reason}, which an fp8 layer would lose")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._share_parameters(linear, checked_config("config", config))
        for name, value in vars(linear).items():
            if not hasattr(layer, name):
                setattr(layer, name, value)
        return layer.train(linear.training)

    def _share_parameters(self, linear: nn.Linear | FP8LinearLayer, config: FP8Config) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scales = FP8Scales(config, linear.weight.device)

    @property
    def config(self) -> FP8Config:
        """The options; `flash_cute.precision.convert_model_to_fp8` changes them."""
        return self.scales.config

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.weight, self.bias, self.scales)

    def reset_parameters(self) -> None:
        """Draws weight and bias as `torch.nn.Linear` does."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        config = self.config
        forward, backward = config.forward_format, config.backward_format
        runs = all(
            on_tensor_cores(self.weight.device, forward.dtype, other.dtype)
            for other in (forward, backward)
        )
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {forward.value} forward, {backward.value} "
            f"backward, {config.scaling} scales, "
            + ("fp8 tensor cores" if runs else "rounded operands")
        )
