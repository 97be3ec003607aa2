"""Loss scaling, which keeps small fp16 gradients from underflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from flash_cute.precision.formats import LARGEST_LOSS_SCALE, FP8Config

FP16_LOSS_SCALE = 65536.0


@dataclass
class LossScale:
    """A loss scale that grows and backs off as `torch.amp.GradScaler`'s, within bounds.

    A batch counts once, however many optimizers step with its gradients.

    - ``value``: for the next loss. ``of_gradients``: the scale of the present gradients.
    - ``largest``: the limit of its growth; ``highest`` is the highest value that was set, to which
      it always returns.
    - ``interval``: batches in a row without overflow after which the value doubles;
      ``good_batches`` are those so far.
    """

    value: float
    largest: float
    interval: int
    good_batches: int = 0

    def __post_init__(self) -> None:
        self.of_gradients = self.highest = self.value
        self.least = min(1.0, self.value)
        self.is_counted = False  # the present batch

    @classmethod
    def of(cls, model: nn.Module, config: FP8Config) -> LossScale:
        """The config's first value, else 65536 with fp16 parameters and 1 without. Without fp16
        parameters it does not grow beyond its first value."""
        is_fp16 = any(p.dtype is torch.float16 for p in model.parameters())
        first = config.loss_scale or (FP16_LOSS_SCALE if is_fp16 else 1.0)
        largest = LARGEST_LOSS_SCALE if is_fp16 else first
        return cls(float(first), float(largest), config.growth_interval)

    def give(self, value: float) -> None:
        """Sets a value of the caller's."""
        self.value, self.highest = float(value), max(self.highest, float(value))

    def begin_batch(self) -> float:
        """The factor that brings present gradients to the scale of the next loss."""
        factor = self.value / self.of_gradients
        self.of_gradients, self.is_counted = self.value, False
        return factor

    def count(self, is_finite: bool) -> None:
        """Counts a step, whose gradients were finite or overflowed."""
        if not is_finite:
            self.value = min(self.value, max(self.of_gradients / 2, self.least))
            self.good_batches = 0
        elif not self.is_counted:
            self.good_batches += 1
            if self.good_batches >= self.interval:
                self.value = min(2 * self.value, max(self.largest, self.highest))
                self.good_batches = 0
        self.is_counted = True
