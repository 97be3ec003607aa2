"""The checks of options that all attention calls share: scale, causal mask, window, softcap,
dropout, ALiBi slopes and sinks. Errors as in :mod:`flash_cute.call.validate`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.call import validate


class Names(NamedTuple):
    """Names in messages, for arguments whose names differ from function to function."""

    causal: str = "causal"
    dropout_p: str = "dropout_p"
    alibi_slopes: str = "alibi_slopes"
    window_size: tuple[str, str] | None = None  # left and right, if they are arguments of their own


def _largest() -> float:
    """The largest scale and softcap: kernels multiply by log2(e), in fp32. A global float, or a
    finfo's, would be an input of graphs with dynamic shapes, which are compiled again for it."""
    return 2.0**127


def _fp32_max() -> float:
    return (2.0 - 2.0**-23) * 2.0**127


OF_FUNCTIONS = Names()
OF_OPS = Names(causal="is_causal", window_size=("window_size_left", "window_size_right"))


def check(call: Any, batch: int, names: Names = OF_FUNCTIONS) -> None:
    """Checks all options of a call of any op with ``batch`` sequences. Calls over a cache have no
    dropout and no backward, those of e4m3 inputs no softcap and no slopes either."""
    softmax_scale, softcap = call.softmax_scale, getattr(call, "softcap", 0.0)
    validate.flag(names.causal, call.is_causal)
    validate.flag("deterministic", getattr(call, "deterministic", False))
    if softmax_scale is not None:
        number("softmax_scale", softmax_scale)
        is_small = validate.allowed(softmax_scale <= _largest())
        if not (is_small and validate.allowed(softmax_scale >= -_largest())):
            raise ValueError(
                f"softmax_scale is {validate.shown(softmax_scale)}; expected None or a number "
                "between -2**127 and 2**127"
            )
    window(call.window_size_left, call.window_size_right, names.window_size)
    number("softcap", softcap)
    _known("softcap", softcap)
    if softcap != 0.0:
        if not 2.0**-126 <= softcap <= _largest():
            raise ValueError(
                f"softcap is {validate.shown(softcap)}; expected 0, which switches it off, or a "
                "positive normal number of fp32, at most 2**127"
            )
        if softmax_scale is not None and not validate.allowed(
            abs(softmax_scale) <= softcap * _fp32_max()
        ):
            raise ValueError(
                f"softcap is {validate.shown(softcap)} and softmax_scale "
                f"{validate.shown(softmax_scale)}; expected a ratio softmax_scale / softcap that "
                "fp32 holds"
            )
    _dropout(names.dropout_p, getattr(call, "dropout_p", 0.0))
    heads = call.q.shape[-2]
    slopes = getattr(call, "alibi_slopes", None)
    if slopes is not None:
        _alibi_slopes(names.alibi_slopes, slopes, call.q, heads, batch)
    if call.sink is not None:
        _sink(call.sink, call.q, heads)


def sides(window_size: Any) -> tuple[int, int]:
    """(left, right) from ``window_size``; :func:`check` checks their values."""
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(f"window_size is {validate.kind_of(window_size)}; expected (left, right)")
    if len(window_size) != 2:
        raise ValueError(f"window_size is {window_size}; expected (left, right)")
    left, right = window_size
    return left, right


def no_gradient_of_slopes(x: Tensor, name: str = "alibi_slopes") -> None:
    """Refuses slopes that require grad."""
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name} requires grad, and has no gradient; detach() it")


def number(name: str, x: Any) -> None:
    """Refuses everything but numbers; a bool is not one."""
    if isinstance(x, bool) or not isinstance(x, (float, int, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} is {validate.kind_of(x)}; expected a number")


def _known(name: str, x: float) -> None:
    """Refuses a number that depends on data, since the compiled graph depends on it."""
    is_symbolic = torch.compiler.is_compiling() or isinstance(x, (torch.SymFloat, torch.SymInt))
    if is_symbolic and not (internals.is_decided(x >= 0.0) and internals.is_decided(x == 0.0)):
        raise NotImplementedError(
            f"{name} is a number that the compiled graph computes, and the graph depends on it; "
            "call item() outside of the compiled function, and give it the number"
        )


def _dropout(name: str, p: float) -> None:
    number(name, p)
    _known(name, p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} is {validate.shown(p)}; expected a probability in [0, 1]")


def window(left: int, right: int, names: tuple[str, str] | None = None) -> None:
    """Refuses bounds that no call has; ``names`` if they are arguments of their own."""
    if type(left) is not int or type(right) is not int:
        _window_types(left, right, names or ("window_size's left", "window_size's right"))
    largest = validate.INT64_MAX
    if left < -1 or right < -1 or left > largest or right > largest:
        name, x = "window_size", f"({validate.shown(left)}, {validate.shown(right)})"
        if names is not None:
            is_left = left < -1 or left > largest
            name, x = names[not is_left], validate.shown(left if is_left else right)
        raise ValueError(
            f"{name} is {x}; -1 means unbounded, others are counts >= 0 that fit int64"
        )


def _window_types(left: Any, right: Any, names: tuple[str, str]) -> None:
    for name, x in zip(names, (left, right), strict=True):
        if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
            raise TypeError(f"{name} is {validate.kind_of(x)}; expected an int")


def _alibi_slopes(name: str, x: Tensor, q: Tensor, heads: int, batch: int) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        raise TypeError(f"{name} is {validate.dtype_or_kind(x)}; expected float32")
    validate.strided(name, x)
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q on {q.device}; they must agree")
    if tuple(x.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; expected ({heads},) or ({batch}, {heads})"
        )
    validate.contiguous_last(name, x)
    no_gradient_of_slopes(x, name)


def _sink(x: Tensor, q: Tensor, heads: int) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"sink is {validate.dtype_or_kind(x)}; expected floating point")
    validate.strided("sink", x)
    if x.device != q.device:
        raise ValueError(f"sink is on {x.device}, q on {q.device}; they must agree")
    if tuple(x.shape) != (heads,):
        raise ValueError(f"sink has shape {tuple(x.shape)}; expected one logit a head, ({heads},)")
    validate.contiguous_last("sink", x)
