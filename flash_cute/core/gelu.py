"""``FusedGELU``: GELU in one kernel each way."""

from __future__ import annotations

from torch import nn


class FusedGELU(nn.GELU):
    """x Phi(x), Phi the normal distribution's function (arXiv 1606.08415).

    Forward and backward are one kernel each, and only the input is saved for backward: a GELU
    composed of ``erf`` or ``tanh`` takes several kernels, and saves intermediate results. This is
    PyTorch's own operator with its argument checked: only fusion into a larger kernel, as
    torch.compile does it, is faster.

    Args:
        approximate: "none" is exact; "tanh" is 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))),
            at most 5e-4 away.

    Raises:
        ValueError: another approximation.

    Example::

        import torch
        from flash_cute.core import FusedGELU

        y = FusedGELU()(torch.randn(2, 100, 512))  # any shape, any floating dtype
    """

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate is {approximate!r}; expected 'none' or 'tanh'")
        super().__init__(approximate)
