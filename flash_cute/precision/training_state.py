"""Checks a trainer's state before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flash_cute.precision.formats import (
    LARGEST_LOSS_SCALE,
    check_number,
    check_positive,
    check_whole,
)

SCALES = {"loss_scale", "scale_of_gradients", "highest_loss_scale"}
OPTIONAL_NAMES = {"highest_loss_scale"}  # older states lack it
COUNTS = ("good_batches", "batches", "steps", "overflows")


def check_state(state: Any, histories: dict[str, Tensor]) -> None:
    """Refuses everything but a trainer's state for a model with these histories."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a trainer's state_dict, not {type(state).__name__}")
    names = {*SCALES, "loss", "histories", *COUNTS}
    if state.keys() | OPTIONAL_NAMES != names:
        raise ValueError(f"state has {sorted(map(str, state))}; expected {sorted(names)}")
    for name in state.keys() & SCALES:
        check_positive(f"state[{name!r}]", state[name], LARGEST_LOSS_SCALE)
    for name in COUNTS:
        check_whole(f"state[{name!r}]", state[name], least=0)
    if state["loss"] is not None:
        check_number("state['loss']", state["loss"])
    check_histories(state["histories"], histories)


def check_histories(given: Any, histories: dict[str, Tensor]) -> None:
    """Refuses everything but the tensors of a model with these histories."""
    if not isinstance(given, Mapping):
        raise TypeError(f"state['histories'] must be a dict of tensors, not {type(given).__name__}")
    for name, x in given.items():
        if not isinstance(x, Tensor):
            kind = type(x).__name__
            raise TypeError(f"state['histories'][{name!r}] must be a tensor, not {kind}")
        if not x.is_floating_point() or x.layout is not torch.strided or x.is_meta:
            raise ValueError(
                f"state['histories'][{name!r}] must be dense, of a floating dtype, and have values;"
                f" it is {x.dtype}, {x.layout}, on {x.device}"
            )
    saved = {name: tuple(x.shape) for name, x in given.items()}
    here = {name: tuple(history.shape) for name, history in histories.items()}
    if saved != here:
        other = sorted({str(name) for name, _ in saved.items() ^ here.items()})
        raise ValueError(
            f"state['histories'] are of another model or config: they differ in {', '.join(other)}"
        )
