"""The two fp8 formats, and the options of training with them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

SCALINGS = ("dynamic", "delayed")


class FP8Format(Enum):
    """An fp8 format of "FP8 Formats for Deep Learning" (arXiv 2209.05433).

    ``E4M3`` has 4 bits of exponent and 3 of mantissa: 8 mantissas, up to 448. ``E5M2`` has 5 and 2:
    4 mantissas, up to 57344. The first is more accurate, the second has the wider range.

    >>> FP8Format("e5m2").dtype
    torch.float8_e5m2
    """

    E4M3 = "e4m3"
    E5M2 = "e5m2"

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype of this format."""
        return torch.float8_e4m3fn if self is FP8Format.E4M3 else torch.float8_e5m2


@dataclass(frozen=True)
class FP8Config:
    """How layers round to fp8, and how the trainer scales its loss.

    Args:
        forward_format: format of inputs and weights in all three products. Default E4M3.
        backward_format: format of the gradient of the output. Default E5M2. Tensor cores multiply
            no E5M2 by E5M2: a layer of two such formats runs on rounded operands (slowly).
        scaling: "dynamic" (default) takes a tensor's scale from its own largest absolute value,
            "delayed" from the largest of its last ``history_length`` uses in training. What exceeds
            a delayed scale's range is clamped to the format's largest value.
        history_length: uses that a delayed scale remembers, at least 1. Default 16.
        margin: spare powers of two above the largest value, at least 0. Default 0.
        skip: names of layers that stay as they are, such as ``("head",)``; a name stands for all
            that lies in it. Default none.
        loss_scale: what the trainer multiplies losses by before backward, and divides gradients by
            before a step. Default None: 65536 for models with fp16 parameters, otherwise 1.
        growth_interval: steps without overflow after which a loss scale that overflows have halved
            is doubled again, up to ``loss_scale``. At least 1. Default 100.

    Raises:
        TypeError: a format is not an FP8Format.
        ValueError: another option is out of its range.

    >>> FP8Config(scaling="delayed", history_length=32).forward_format
    <FP8Format.E4M3: 'e4m3'>
    """

    forward_format: FP8Format = FP8Format.E4M3
    backward_format: FP8Format = FP8Format.E5M2
    scaling: str = "dynamic"
    history_length: int = 16
    margin: int = 0
    skip: tuple[str, ...] = ()
    loss_scale: float | None = None
    growth_interval: int = 100

    def __post_init__(self) -> None:
        for name in ("forward_format", "backward_format"):
            if not isinstance(given := getattr(self, name), FP8Format):
                raise TypeError(f"{name} must be an FP8Format, such as FP8Format.E4M3, not {given}")
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling must be one of {SCALINGS}, not {self.scaling!r}")
        for name, least in (("history_length", 1), ("margin", 0), ("growth_interval", 1)):
            if (given := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, not {given}")
        if isinstance(self.skip, str):
            raise TypeError(f"skip must be a tuple of names: ({self.skip!r},)")
        if self.loss_scale is not None and self.loss_scale <= 0:
            raise ValueError(f"loss_scale must be positive, not {self.loss_scale}")
