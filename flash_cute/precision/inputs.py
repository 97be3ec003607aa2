"""Rounding of layers' inputs to 8 bits at each call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.precision.settings import PrecisionConfig, PrecisionFormat, QuantizationMode

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
NAMES = ("input", "query", "key", "value")


class InputRounding(nn.Module):
    """Rounds a tensor to INT8 or FP8_E4M3, and returns it in its own dtype.

    In DYNAMIC mode each token (the last dim; for convolutions each sample) has a scale of its own.
    In STATIC mode there is one, the buffer ``scale``: the largest finite value of calibration, else
    of the first call with one; later calls clip larger values. There is no host synchronisation.
    Gradients pass the rounding unchanged.
    """

    scale: Tensor | None

    def __init__(self, config: PrecisionConfig, per_sample: bool, device: torch.device) -> None:
        super().__init__()
        self.format, self.per_sample, self.grows = config.base_precision, per_sample, False
        static = config.quantization_mode is QuantizationMode.STATIC
        self.register_buffer("scale", torch.zeros((), device=device) if static else None)

    def forward(self, x: Tensor) -> Tensor:
        values = x.detach().float()
        sizes = torch.where(values.isfinite(), values.abs(), 0.0)
        if self.scale is None:
            dims = tuple(range(1, x.dim())) if self.per_sample else (-1,)
            peak = sizes.amax(dims, keepdim=True)
        else:
            found = sizes.amax() if sizes.numel() else torch.zeros_like(self.scale)
            if self.grows:
                peak = torch.maximum(self.scale, found)
            else:
                peak = torch.where(self.scale == 0, found, self.scale)
            self.scale.copy_(peak)
        is_int = self.format is PrecisionFormat.INT8
        limit = 127.0 if is_int else torch.finfo(torch.float8_e4m3fn).max
        step = torch.where(peak == 0, 1.0, peak / limit)
        scaled = (values / step).clamp(-limit, limit)
        rounded = scaled.round() if is_int else scaled.to(torch.float8_e4m3fn).float()
        return x + ((rounded * step).to(x.dtype) - x).detach()


@contextmanager
def scales_grow(model: nn.Module) -> Iterator[None]:
    """Inside, static scales grow to the largest value of all calls."""
    roundings = [module for module in model.modules() if isinstance(module, InputRounding)]
    for rounding in roundings:
        rounding.grows = True
    try:
        yield
    finally:
        for rounding in roundings:
            rounding.grows = False


def round_inputs_of(model: nn.Module, config: PrecisionConfig) -> None:
    """Makes every Linear, Conv and MultiheadAttention of a model round its inputs, except the
    out_proj of MultiheadAttention, which is never called."""
    inside = {
        part
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for part in module.children()
    }
    layers = [m for m in model.modules() if isinstance(m, LAYERS) and m not in inside]
    for layer in layers:
        per_sample = not isinstance(layer, (nn.Linear, nn.MultiheadAttention))
        device = next(layer.buffers(), next(layer.parameters(), torch.empty(0))).device
        layer.add_module("input_rounding", InputRounding(config, per_sample, device))
        layer.register_forward_pre_hook(_round_arguments, with_kwargs=True)


def _round_arguments(
    layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The layer's arguments, rounded. One tensor passed as query, key and value stays one."""
    rounding = layer.get_submodule("input_rounding")
    count = 3 if isinstance(layer, nn.MultiheadAttention) else 1
    done: dict[int, Tensor] = {}

    def rounded(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in done:
            done[id(value)] = rounding(value)
        return done[id(value)]

    positional = (*map(rounded, arguments[:count]), *arguments[count:])
    return positional, {k: rounded(v) if k in NAMES else v for k, v in named.items()}
