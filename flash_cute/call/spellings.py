"""Converts arguments as other libraries spell them to the form that
:mod:`flash_cute.call.validate` checks. What cannot be converted is returned as it is, and refused
there.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable
from numbers import Real
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from flash_cute.call import validate
from flash_cute.call.validate import options as validate_options

# Scheduling options of FlashAttention-3's kernels, which are ignored here: results do not depend on
# them.
HINTS = {"num_splits": int, "pack_gqa": bool, "sm_margin": int}
# Arguments of features that do not exist here, with the values that switch them off.
ABSENT = {
    "qv": None, "q_descale": None, "k_descale": None, "v_descale": None, "attention_chunk": 0,
    "scheduler_metadata": None,
}  # fmt: skip
# Arguments of torch's attention, and what to use instead.
_ELSEWHERE = {
    "is_causal": "causal=",
    "scale": "softmax_scale=",
    "attn_mask": "causal=, window_size=, a varlen function with the lengths, or flash_attn_func's "
    "sparse=",
    "key_padding_mask": "a varlen function with the lengths",
    "attn_bias": "alibi_slopes=; other biases are not supported",
    "block_mask": "flash_attn_func's sparse=, with flash_cute.Sparse.blocks",
    "mask_mod": "flash_attn_func's sparse=, with flash_cute.Sparse.from_mask_function",
    "enable_gqa": "k and v with fewer heads, which needs no argument",
    "return_softmax": "return_attn_probs=",
}
IntegerLike = Any  # int, or a numpy integer or tensor without dimensions


def copy_if_last_dim_strided(*tensors: Any) -> tuple[Any, ...]:
    """The tensors; those whose last dimension is not contiguous are copied, as flash-attn does."""
    return tuple(x.contiguous() if _is_last_dim_strided(x) else x for x in tensors)


def _is_last_dim_strided(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided or x.dim() == 0:
        return False
    return not validate.has_rows(x)


def integer(x: IntegerLike) -> Any:
    """An int from an IntegerLike. Reading a tensor on a GPU synchronises the host."""
    if type(x) is int or isinstance(x, (bool, float, torch.SymInt)) or x is None:
        return x
    if isinstance(x, Tensor):
        is_one = x.dim() == 0 and not (x.is_floating_point() or x.is_complex())
        return x.item() if is_one and x.dtype != torch.bool else x
    try:
        return operator.index(x)
    except TypeError:
        return x


def real(x: Any) -> Any:
    """A float from a number of numpy, or from a tensor without dimensions and gradient. Reading a
    tensor on a GPU synchronises the host."""
    if isinstance(x, Tensor):
        is_one = x.dim() == 0 and x.dtype != torch.bool and not x.is_complex()
        return float(x) if is_one and not (x.requires_grad or torch.compiler.is_compiling()) else x
    return float(x) if isinstance(x, Real) and not isinstance(x, (bool, int)) else x


def with_reals(call: Any) -> Any:
    """The call with floats for its softmax_scale, softcap and dropout_p; most have them."""
    for name in ("softmax_scale", "softcap", "dropout_p"):
        if type(x := getattr(call, name, None)) not in (float, int, NoneType):
            call = call._replace(**{name: real(x)})
    return call


def window(x: Any) -> Any:
    """(left, right) from any sequence of two; None means unbounded, for one side or for both."""
    if type(x) is tuple and len(x) == 2 and type(x[0]) is type(x[1]) is int:
        return x
    if x is None:
        return (-1, -1)
    if not isinstance(x, (tuple, list)):
        if getattr(x, "ndim", None) != 1:
            return x
        x = x.tolist()
    return tuple(-1 if side is None else integer(side) for side in x)


def sides(x: Any) -> tuple[int, int]:
    """:func:`window`'s two sides; TypeError or ValueError if it is not a sequence of two."""
    return validate_options.sides(window(x))


def sink(sink: Any, s_aux: Any, learnable_sink: Any) -> Any:
    """The sink, from its three names: vLLM and transformers use the second, FA4 the third.

    Raises:
        ValueError: several are given.
    """
    given = [x for x in (sink, s_aux, learnable_sink) if x is not None]
    if len(given) > 1:
        raise ValueError("sink, s_aux and learnable_sink are names of one argument; give one")
    return given[0] if given else None


def pack_keys(
    k: Tensor, v: Tensor, seqused_k: Tensor | None, block_table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """k, v and cu_seqlens_k of a call with ``cu_seqlens_k=None``, which gives seqused_k instead.

    Raises:
        ValueError: seqused_k is None, or k is neither (batch, seqlen, heads, dim) nor in pages.
    """
    if not isinstance(seqused_k, Tensor) or not isinstance(k, Tensor) or k.dim() != 4:
        raise ValueError(
            "cu_seqlens_k is None; that needs seqused_k, and k in pages (block_table) or of shape "
            "(batch, seqlen, heads, dim)"
        )
    if block_table is not None:
        sums = seqused_k.cumsum(0, dtype=torch.int32)
        return k, v, torch.nn.functional.pad(sums, (1, 0))
    batch, seqlen = k.shape[:2]
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * seqlen
    return k.flatten(0, 1), v.flatten(0, 1), offsets


def check_extra_kwargs(function: Callable[..., Any], named: dict[str, Any]) -> bool:
    """Checks keywords that the function does not name: hints, which are ignored, features that do
    not exist and must be off, and ``return_softmax_lse``, whose value it returns.

    Raises:
        NotImplementedError: a feature that does not exist is switched on.
        TypeError: any other keyword; the message has flash_cute's name for it.
    """
    for name, x in named.items():
        if name in HINTS:
            if name == "pack_gqa" and not isinstance(x, (bool, NoneType)):
                raise TypeError(f"{name} is {validate.kind_of(x)}; expected bool")
            if name != "pack_gqa" and x is not None:
                validate.count(name, integer(x))
        elif name in ABSENT:
            number, off = integer(x), ABSENT[name]
            if x is not None and (off is None or type(number) is not int or number != off):
                raise NotImplementedError(
                    f"{name} is given, and {function.__name__} has no such feature yet; leave it "
                    f"{off}"
                )
        elif name != "return_softmax_lse":
            raise TypeError(_unknown(function, name))
    asked = named.get("return_softmax_lse", False)
    validate.flag("return_softmax_lse", asked)
    return bool(asked)


def _unknown(function: Callable[..., Any], name: str) -> str:
    message = f"{function.__name__}() got an unexpected keyword argument '{name}'"
    if name in _ELSEWHERE:
        return f"{message}; use {_ELSEWHERE[name]}"
    known = list(inspect.signature(function).parameters)
    close = difflib.get_close_matches(name, known, 1)
    return f"{message}; did you mean {close[0]}=?" if close else message
