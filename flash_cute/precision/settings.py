"""The settings of adaptive precision: formats, strategy, mode and the budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class PrecisionFormat(Enum):
    """How numbers are stored. ``INTn`` are n-bit codes, packed into bytes, with scales.

    FP32, FP16 and BF16 are torch's dtypes. FP8_E4M3 has a scale a row.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT12 = "int12"
    INT11 = "int11"
    INT10 = "int10"
    INT9 = "int9"
    FP8_E4M3 = "fp8_e4m3"
    INT8 = "int8"
    INT7 = "int7"
    INT6 = "int6"
    INT5 = "int5"
    INT4 = "int4"
    INT3 = "int3"
    INT2 = "int2"
    INT1 = "int1"

    @property
    def bits(self) -> int:
        """Bits of one number, without scales."""
        return {"fp8_e4m3": 8, "bf16": 16, "fp16": 16, "fp32": 32}.get(self.value) or int(
            self.value.removeprefix("int")
        )

    @property
    def is_integer(self) -> bool:
        """Whether numbers are codes of evenly spaced levels."""
        return self.value.startswith("int")

    @property
    def dtype(self) -> torch.dtype | None:
        """torch's dtype that holds this format, None for codes."""
        dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        return torch.float8_e4m3fn if self is PrecisionFormat.FP8_E4M3 else dtypes.get(self.value)


class AllocationStrategy(Enum):
    """By what layers get more bits. docs/adaptive_precision.md has the formulas.

    - ``UNIFORM``: every layer has the same format, the widest that fits.
    - ``ENTROPY_BASED``: the error relative to a layer's weights, and their entropy. It needs no
      data; with calibration, activations and gradients enter by their weights in the config.
    - ``ACTIVATION_AWARE``: the same error weighted by the mean square of each input channel.
    - ``GRADIENT_WEIGHTED``: the first-order error of the model's output, by its gradients.
    - ``SENSITIVITY``: the measured error of the output, one layer rounded at a time.
    """

    UNIFORM = "uniform"
    ENTROPY_BASED = "entropy_based"
    ACTIVATION_AWARE = "activation_aware"
    GRADIENT_WEIGHTED = "gradient_weighted"
    SENSITIVITY = "sensitivity"


class QuantizationMode(Enum):
    """The granularity of scales.

    - ``STATIC``: fixed and coarse. Weights have a scale per channel. Inputs of layers, if
      ``base_precision`` has 8 bits, have a scale per layer, from the largest value of calibration,
      else of the first call.
    - ``DYNAMIC``: weights may also have a scale for every 64 of a row, if that lowers the error.
      Inputs, if ``base_precision`` has 8 bits, have a scale per token, computed in each call.
    - ``WEIGHT_ONLY``: weights as in DYNAMIC; inputs are never rounded.
    """

    STATIC = "static"
    DYNAMIC = "dynamic"
    WEIGHT_ONLY = "weight_only"


BASES = ("FP32", "FP16", "BF16", "FP8_E4M3", "INT8")


@dataclass
class PrecisionConfig:
    """The budget of bytes of a model, and how it is allocated.

    - ``base_precision`` (FP16): the format that savings are measured against, and the widest of
      stored weights: FP32, FP16, BF16, FP8_E4M3 or INT8. The 8-bit ones also round the inputs of
      Linear, Conv and MultiheadAttention layers, as ``quantization_mode`` says.
    - ``allocation_strategy`` (ENTROPY_BASED), ``quantization_mode`` (DYNAMIC): see these.
    - ``entropy_threshold`` (1.5 bits, 0 to 8): under ENTROPY_BASED a layer whose weights have more
      entropy than this gets at least this many bits, rounded up.
    - ``target_memory_reduction`` (0.4, 0 to below 1): the fraction of the bytes of the model in
      ``base_precision`` that must be saved. All tensors of the module count.
    - ``gradient_weight`` (0.3) and ``activation_weight`` (0.4), each 0 to 1: exponents of gradients
      and activations in the sensitivity of a layer, under ENTROPY_BASED with calibration; the
      relative error of the weights has the remaining exponent. If their sum is above 1, they are
      divided by it.

    A module copies it: later changes affect only modules made afterwards.

    Raises TypeError for members of another type, ValueError for numbers out of range.

    Example::

        from flash_cute.precision import PrecisionConfig

        config = PrecisionConfig(target_memory_reduction=0.6)
        assert config.entropy_threshold == 1.5
    """

    base_precision: PrecisionFormat = PrecisionFormat.FP16
    allocation_strategy: AllocationStrategy = AllocationStrategy.ENTROPY_BASED
    quantization_mode: QuantizationMode = QuantizationMode.DYNAMIC
    entropy_threshold: float = 1.5
    target_memory_reduction: float = 0.4
    gradient_weight: float = 0.3
    activation_weight: float = 0.4

    def __post_init__(self) -> None:
        for name, kind in (
            ("base_precision", PrecisionFormat),
            ("allocation_strategy", AllocationStrategy),
            ("quantization_mode", QuantizationMode),
        ):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        if self.base_precision.name not in BASES:
            raise ValueError(f"base_precision must be one of {BASES}, not {self.base_precision}")
        _check_range("entropy_threshold", self.entropy_threshold, 8)
        _check_range("gradient_weight", self.gradient_weight, 1)
        _check_range("activation_weight", self.activation_weight, 1)
        _check_range("target_memory_reduction", self.target_memory_reduction, 1)
        if self.target_memory_reduction == 1:
            raise ValueError("target_memory_reduction must be below 1: nothing would be left")

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs of layers are rounded too."""
        mode = self.quantization_mode
        return self.base_precision.bits == 8 and mode is not QuantizationMode.WEIGHT_ONLY


def _check_range(name: str, value: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not 0 <= value <= most:
        raise ValueError(f"{name} must be from 0 to {most}, not {value}")
