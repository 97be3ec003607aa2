"""The two fp8 formats, and the options of training with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

SCALINGS = ("dynamic", "delayed")
LARGEST_MARGIN = 32  # e5m2 spans as many powers of two: a larger margin would round all to 0
LARGEST_LOSS_SCALE = 2.0**127  # of fp32


class FP8Format(Enum):
    """An fp8 format of "FP8 Formats for Deep Learning" (arXiv 2209.05433).

    ``E4M3`` has 4 bits of exponent and 3 of mantissa: 8 mantissas, up to 448. ``E5M2`` has 5 and 2:
    4 mantissas, up to 57344. The first is more accurate, the second has the wider range.

    Example::

        import torch
        from flash_cute.precision import FP8Format

        assert FP8Format("e5m2").dtype == torch.float8_e5m2
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
        backward_format: format of the gradient of the output. Default E5M2. Tensor cores cannot
            multiply E5M2 by E5M2: with both formats E5M2 a layer multiplies rounded operands in
            bf16 or fp32 (slowly).
        scaling: "dynamic" (default) takes a tensor's scale from its own largest absolute value,
            "delayed", in training, from the largest of its last ``history_length`` uses. Inputs and
            gradients beyond a delayed scale's range are clamped to the format's largest value;
            weights are not. In evaluation all scales are dynamic.
        history_length: uses that a delayed scale remembers, at least 1. Default 16.
        margin: spare powers of two above the largest value, from 0 to 32. Default 0.
        skip: names of layers that are not converted, such as ``("head",)``; a name includes its
            children, and other names of the same layers. Default none.
        loss_scale: the trainer's first factor of losses. Default None: 65536 for models with fp16
            parameters, otherwise 1. Overflows halve it, but not below 1. With fp16 parameters it
            grows without limit, otherwise back to its first value: without fp16 it stays 1 unless
            it is given.
        growth_interval: steps in a row without overflow after which the loss scale is doubled. At
            least 1. Default 2000, as in torch.amp.GradScaler.

    Raises:
        TypeError: an option is of another type; a bool is not a number.
        ValueError: an option is out of its range.

    Example::

        from flash_cute.precision import FP8Config, FP8Format

        config = FP8Config(scaling="delayed", history_length=32)
        assert config.forward_format is FP8Format.E4M3
    """

    forward_format: FP8Format = FP8Format.E4M3
    backward_format: FP8Format = FP8Format.E5M2
    scaling: str = "dynamic"
    history_length: int = 16
    margin: int = 0
    skip: tuple[str, ...] = ()
    loss_scale: float | None = None
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        for name in ("forward_format", "backward_format"):
            if not isinstance(given := getattr(self, name), FP8Format):
                raise TypeError(f"{name} must be an FP8Format, such as FP8Format.E4M3, not {given}")
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling must be one of {SCALINGS}, not {self.scaling!r}")
        check_whole("history_length", self.history_length, least=1)
        check_whole("margin", self.margin, least=0, most=LARGEST_MARGIN)
        check_whole("growth_interval", self.growth_interval, least=1)
        if not isinstance(self.skip, (tuple, list)) or not all(
            isinstance(name, str) for name in self.skip
        ):
            example = self.skip if isinstance(self.skip, str) else "head"
            raise TypeError(f"skip must be a tuple of names: ({example!r},); given {self.skip!r}")
        object.__setattr__(self, "skip", tuple(self.skip))
        if self.loss_scale is not None:
            check_positive("loss_scale", self.loss_scale, largest=LARGEST_LOSS_SCALE)


def checked_config(name: str, given: FP8Config | None) -> FP8Config:
    """The config; the default for None."""
    if given is not None and not isinstance(given, FP8Config):
        raise TypeError(f"{name} must be an FP8Config, not {type(given).__name__}")
    return FP8Config() if given is None else given


def check_whole(name: str, given: Any, least: int, most: float = math.inf) -> None:
    """Refuses everything but ints in [least, most]."""
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"{name} must be an int, not {given!r} ({type(given).__name__})")
    if given < least:
        raise ValueError(f"{name} must be at least {least}, not {given}")
    if given > most:
        raise ValueError(f"{name} must be at most {most}, not {given}")


def check_number(name: str, given: Any) -> None:
    """Refuses everything but int and float."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name} must be a number, not {given!r} ({type(given).__name__})")


def check_positive(name: str, given: Any, largest: float = math.inf) -> None:
    """Refuses everything but numbers in (0, largest]."""
    check_number(name, given)
    if not 0 < given <= largest:
        limit = "" if largest == math.inf else f" and at most {largest:.3g}"
        raise ValueError(f"{name} must be positive{limit}, not {given}")
