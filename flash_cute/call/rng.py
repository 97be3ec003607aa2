"""The random state that dropout of a call uses."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cute.call import validate
from flash_cute.call.validate.rng import check_generator, check_rng


def rng_state(
    device: torch.device | str | int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Draws a random state for dropout: calls with the same ``rng`` drop the same weights.

    Args:
        device: of the state, which must be q's; None is the generator's device, or torch's default
            device.
        generator: what draws it; None is the device's default generator.

    Returns:
        int64 (2,): seed and offset. There is no host synchronisation.

    Raises:
        TypeError, ValueError: ``device`` is not a device, or ``generator`` not a torch.Generator.
        ValueError: ``generator`` is on another kind of device.
        NotImplementedError: ``generator`` is given inside of torch.compile or torch.export.

    Example::

        import flash_cute
        import torch

        q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
        state = flash_cute.rng_state(q.device)
        out = flash_cute.flash_attn_func(q, k, v, dropout_p=0.1, rng=state)
        same = flash_cute.flash_attn_func(q, k, v, dropout_p=0.1, rng=state)
    """
    if device is not None and not isinstance(device, (torch.device, str, int)):
        raise TypeError(
            f"device is {validate.kind_of(device)}; expected a torch.device, e.g. q.device; pass a "
            "generator by name: generator="
        )
    if isinstance(device, (str, int)):
        _check_device(device)
    if generator is not None:
        check_generator("generator", generator, device)
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "generator is given, which cannot be traced; draw a state outside of the compiled "
                "function and give it: rng=flash_cute.rng_state(generator=generator)"
            )
        device = generator.device if device is None else device
    return torch.randint(-(2**63), 2**63 - 1, (2,), device=device, generator=generator)


def _check_device(device: str | int) -> None:
    if isinstance(device, int):
        validate.count("device", device)
    try:
        torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"device is {device!r}; expected a torch.device: {str(error).splitlines()[0]}"
        ) from error


def rng_of_call(
    q: Tensor, dropout_p: float, generator: torch.Generator | None, rng: Tensor | None
) -> Tensor | None:
    """``rng``, or a state drawn from ``generator``; None without dropout."""
    if generator is not None:
        check_generator("generator", generator, q.device)
    if rng is not None:
        check_rng(rng, q)
        if generator is not None:
            raise ValueError(
                "rng and generator are given; rng is what a generator would draw: give one of them"
            )
    if dropout_p == 0.0:
        return None
    return rng_state(q.device, generator) if rng is None else rng
