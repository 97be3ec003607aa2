"""The histories of delayed scaling: largest absolute values of earlier uses in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.precision.formats import FP8Config

_library = torch.library.Library("flash_cute", "FRAGMENT")
_library.define("fp8_history_max(Tensor history) -> Tensor")


def _largest(history: Tensor) -> Tensor:
    if internals.in_backward():
        raise NotImplementedError(
            "a checkpoint computes forward again, with delayed scales that have changed since; use "
            "FP8Config(scaling='dynamic'), or no checkpoint around fp8 layers"
        )
    return history.max()


_library.impl("fp8_history_max", _largest, "CompositeExplicitAutograd")
torch.library.register_fake(
    "flash_cute::fp8_history_max", lambda history: history.new_empty(()), lib=_library
)


def largest_of_history(history: Tensor | None) -> Tensor | None:
    """The largest value of a history that forward reads; None without a history.

    It is an op, so that compiled code refuses to recompute forward in backward, as eager code does.

    Raises:
        NotImplementedError: called in a backward pass, because a checkpoint recomputes forward.
    """
    return None if history is None else torch.ops.flash_cute.fp8_history_max(history)


class FP8Scales(nn.Module):
    """The histories of one product, in fp32; without delayed scaling there are none.

    Histories are buffers that are not in the state_dict: after loading one, scales start anew.
    """

    input_history: Tensor | None
    weight_history: Tensor | None
    gradient_history: Tensor | None

    def __init__(self, config: FP8Config, device: torch.device) -> None:
        super().__init__()
        self.configure(config, device)

    def configure(self, config: FP8Config, device: torch.device) -> None:
        """Sets other options and clears the histories."""
        self.config = config
        for role in ("input", "weight", "gradient"):
            delayed = config.scaling == "delayed"
            history = torch.zeros(config.history_length, device=device) if delayed else None
            self.register_buffer(f"{role}_history", history, persistent=False)

    def in_use(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Histories of the input, the weight and the gradient in training. In evaluation they are
        None: weights, and values computed from them, may have changed since."""
        if not self.training:
            return None, None, None
        return self.input_history, self.weight_history, self.gradient_history

    def reset_parameters(self) -> None:
        """Forgets the histories."""
        for history in self.buffers():
            history.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> FP8Scales:
        """Moves between devices. Histories stay in fp32: large values would overflow fp16."""
        for name, history in list(self.named_buffers()):
            moved = fn(history)
            same = moved.dtype == history.dtype
            setattr(self, name, moved if same else history.to(moved.device))
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.reset_parameters()


def scales_of(model: nn.Module) -> list[FP8Scales]:
    """The FP8Scales of all fp8 products of the model."""
    return [module for module in model.modules() if isinstance(module, FP8Scales)]


def histories_of(model: nn.Module) -> dict[str, Tensor]:
    """The histories of a model, by name."""
    return {
        f"{name}.{role}": history
        for name, module in model.named_modules()
        if isinstance(module, FP8Scales)
        for role, history in module.named_buffers()
    }
