"""What is wrong with descales, as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute.call import fp8, validate


def descale_status(
    q_descale: fp8.Descale = None, k_descale: fp8.Descale = None, v_descale: fp8.Descale = None
) -> Tensor:
    """Whether descales are positive finite numbers, without waiting for the device.

    On the CPU the attention functions refuse others by a ValueError, on CUDA they do not look, but
    with ``FLASH_CUTE_CHECK=1``: out of such a call is 0, inf or NaN where they are used. Here every
    entry counts, also those of rows that no sequence uses, which may be anything in a call.

    Args:
        q_descale, k_descale, v_descale: those of a call, tensors of any shape; numbers are refused
            here as the functions do.

    Returns:
        int32 (3,), on the descales' device: for q's, k's and v's the sum of 1 if one is 0 or
        negative, 2 if one is infinite, 4 if one is NaN; 0 if all are right, or None is given.

    Raises:
        TypeError, ValueError: names the argument, what was given and what is supported.

    Example::

        import torch
        from flash_cute import descale_status

        k_descale = torch.tensor([[0.5, 0.0]])  # of a kv head that was never calibrated
        assert descale_status(torch.ones(1, 2), k_descale).tolist() == [0, 1, 0]
    """
    given = (q_descale, k_descale, v_descale)
    first = next((x for x in given if isinstance(x, Tensor)), torch.empty(0))
    status = []
    for name, x in zip(fp8.NAMES, given, strict=True):
        if x is None or not validate.is_descale_tensor(x, name, first, "the first tensor"):
            status.append(torch.zeros((), dtype=torch.int32, device=first.device))
            continue
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype}; expected torch.float32")
        x = x.float()
        is_low, is_inf, is_nan = ((x <= 0).any(), x.isinf().any(), x.isnan().any())
        status.append(is_low.int() + 2 * is_inf.int() + 4 * is_nan.int())
    return torch.stack(status)
