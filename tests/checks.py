"""What tests of calls share: leaves, and checks of results by the fp64 oracle or by others."""

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


def gradients(inputs: Inputs, with_dlse: bool = False) -> dict[str, torch.Tensor]:
    """The same, unchecked."""
    out, lse, _, _ = inputs.forward()
    return inputs.backward(out, lse, inputs.dlse if with_dlse else None)


def same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """All that are expected have the same bits."""
    for name, grad in expected.items():
        bounds.check_same_bits(f"d{name}", got[name], grad)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def same_results(
    got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], deterministic: bool = False
) -> None:
    """Equal bits of (out, dq, dk, dv); on CUDA sums of dq have no fixed order by default."""
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        if x.is_cuda and i == 1 and not deterministic:
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-3)
        else:
            bounds.check_same_bits(f"result {i}", x, y)
