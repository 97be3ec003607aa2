"""``FusedGELU``: GELU in one kernel each way."""

from __future__ import annotations

from torch import nn


class FusedGELU(nn.GELU):
    """x Phi(x), Phi the normal distribution's function (arXiv 1606.08415).

    Forward is one kernel and backward one, and backward keeps the input alone: a GELU that is
    written out of ``erf`` or ``tanh`` takes several, and keeps what lies between. PyTorch's own
    operator does all of that, so this is it, with its name checked: there is nothing to win
    beside it but inside of a larger kernel, which torch.compile makes.

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
