"""The checks of 8-bit caches and their descales. Errors as in :mod:`flash_cute.call.validate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_cute.call import validate
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.call.validate import ops as validate_ops
from flash_cute.call.validate.options import OF_OPS

if TYPE_CHECKING:
    from flash_cute.ops.typed import FwdKvcacheCall

DTYPES = (torch.float8_e4m3fn, torch.int8)
Q_DTYPES = (*validate.DTYPES, validate_kvcache.E4M3)


def is_quantized(
    k_cache: Any, v_cache: Any, q_descale: Any, k_descale: Any, v_descale: Any
) -> bool:
    """Whether the caches are of 8 bits; refuses other dtypes of one byte, and descales of caches
    that are not."""
    caches, descales = (("k", k_cache), ("v", v_cache)), (("k", k_descale), ("v", v_descale))
    for name, x in caches:
        validate.tensor(f"{name}_cache", x)
    if k_cache.element_size() > 1 and v_cache.element_size() > 1:
        for name, x in descales:
            if x is not None:
                raise ValueError(
                    f"{name}_descale is given, and the caches have {k_cache.dtype}; descales are "
                    f"of caches of {validate.listed(DTYPES)}: leave it None"
                )
        if q_descale is not None:
            raise NotImplementedError(
                f"q_descale is given, and the caches have {k_cache.dtype}; it is of calls over "
                f"caches of {validate.listed(DTYPES)}: multiply q by it, and leave it None"
            )
        return False
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in DTYPES:
        raise TypeError(
            f"k_cache has {k_cache.dtype}, v_cache {v_cache.dtype}; supported: both of q's dtype, "
            f"or both of one of {validate.listed(DTYPES)}"
        )
    for name, x in descales:
        if x is None and k_cache.dtype == torch.int8:
            raise ValueError(
                f"{name}_descale is None; caches of torch.int8 need what their numbers are "
                "multiplied by, e.g. the largest magnitude / 127"
            )
    return True


def check_descales(
    call: FwdKvcacheCall, batch: int, q_descale: Any, k_descale: Any, v_descale: Any
) -> None:
    """Checks the descales of a call that is valid but for them."""
    rows, heads_k = tuple(call.k_cache.shape[:-1]), call.k_cache.shape[2]
    if q_descale is not None and validate.is_descale_tensor(q_descale, "q_descale", call.q):
        if q_descale.dtype != torch.float32:
            raise TypeError(f"q_descale has dtype {q_descale.dtype}; expected torch.float32")
        shape, own = tuple(q_descale.shape), (*call.q.shape[:-1], 1)
        shapes = ((), (1,), (heads_k,), (batch, heads_k), own)
        if not any(len(shape) == len(x) and shape == x for x in shapes):
            raise ValueError(
                f"q_descale has shape {shape}; expected one element, (heads_k,), {(heads_k,)}, "
                f"(batch, heads_k), {(batch, heads_k)}, or one for each row and head, {own}"
            )
    written = []
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        if x is None or not validate.is_descale_tensor(x, name, call.q):
            continue
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; expected torch.float32: call float()")
        shape = tuple(x.shape)
        if shape not in ((), (1,), (heads_k,), (batch, heads_k), rows):
            raise ValueError(
                f"{name} has shape {shape}; expected one element, (heads_k,), {(heads_k,)}, "
                f"(batch, heads_k), {(batch, heads_k)}, or the caches' without the last dimension, "
                f"{rows}"
            )
        if call.k is not None and x.dim() == 3:
            validate_ops.check_not_expanded(name, x)
            written.append(x)
    is_known = not torch.compiler.is_compiling()
    if len(written) == 2 and (
        k_descale is v_descale or (is_known and validate_ops.overlap(k_descale, v_descale))
    ):
        raise ValueError(
            "k_descale and v_descale share memory; appending k and v writes both: give two tensors"
        )


def check_op(call: FwdKvcacheCall, k_descale: Any, v_descale: Any) -> None:
    """Checks a direct call of ``attend_quantized_kvcache`` on the CPU."""
    for name, x in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        validate.tensor(name, x)
    if call.k_cache.dtype != call.v_cache.dtype or call.k_cache.dtype not in DTYPES:
        raise TypeError(
            f"k_cache has {call.k_cache.dtype}, v_cache {call.v_cache.dtype}; supported: both of "
            f"one of {validate.listed(DTYPES)}; caches of q's dtype go to attend_kvcache"
        )
    batch = validate_kvcache.check(call, OF_OPS, is_quantized=True)
    shapes = ((batch, call.k_cache.shape[2]), tuple(call.k_cache.shape[:-1]))
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        if x is not None:
            _check_descale_of_op(name, x, call.q, shapes)


def _check_descale_of_op(
    name: str, x: Tensor, q: Tensor, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """``shapes``: of a descale for each sequence and head, and for each token and head."""
    validate.tensor(name, x)
    if x.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {x.dtype}; expected torch.float32: call float()")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q on {q.device}; they must agree")
    if not any(x.dim() == len(shape) and tuple(x.shape) == shape for shape in shapes):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; expected (batch, heads_k), {shapes[0]}, or the "
            f"caches' without the last dimension, {shapes[1]}"
        )
