"""The checks of dropout's random state, and of its generator. Errors as in
:mod:`flash_cute.call.validate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute.call import validate


def check_rng(rng: Any, q: Tensor) -> None:
    """Checks a given state: int64 (2,), contiguous, on q's device."""
    validate.tensor("rng", rng)
    if rng.dtype != torch.int64:
        raise TypeError(f"rng has dtype {rng.dtype}; expected torch.int64 (flash_cute.rng_state())")
    if rng.device != q.device:
        raise ValueError(f"rng is on {rng.device}, q on {q.device}; they must agree")
    if tuple(rng.shape) != (2,) or not rng.is_contiguous():
        raise ValueError(
            f"rng has shape {tuple(rng.shape)}, strides {rng.stride()}; expected contiguous (2,): "
            "seed and offset, e.g. flash_cute.rng_state()"
        )


def check_generator(name: str, generator: Any, device: torch.device | str | int | None) -> None:
    """Checks that it is a torch.Generator of the same kind of device."""
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"{name} is {validate.kind_of(generator)}; expected a torch.Generator")
    if device is not None and torch.device(device).type != generator.device.type:
        raise ValueError(f"{name} is on {generator.device}, the state on {device}; they must agree")
