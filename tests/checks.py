"""Results of a call, checked against the fp64 oracle: asserted, and returned."""

from __future__ import annotations

import torch

from flash_cute.testing import bounds
from flash_cute.testing.cases import Inputs


def forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """out and softmax_lse."""
    out, lse, _, _ = inputs.forward()
    bounds.check_forward(out, lse, bounds.forward_oracle(inputs))
    return out, lse


def backward(inputs: Inputs, with_dlse: bool = False) -> dict[str, torch.Tensor]:
    """The gradients, with one of softmax_lse if `with_dlse`."""
    out, lse, _, _ = inputs.forward()
    grads = inputs.backward(out, lse, inputs.dlse if with_dlse else None)
    bounds.check_gradients(grads, inputs, out, with_dlse)
    return grads


def same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """All that are expected have the same bits."""
    for name, grad in expected.items():
        bounds.check_same_bits(f"d{name}", got[name], grad)
