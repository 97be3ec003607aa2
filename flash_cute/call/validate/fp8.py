"""The checks of the ops of attention of e4m3 inputs. Errors as in :mod:`flash_cute.call.validate`.

Descales are what stored numbers are multiplied by, fp32 with any strides; how many dimensions one
has tells what shares an entry:

* (batch, heads_k): a kv head of a sequence, with all query heads that read it; of q, k and v. One
  number for all is an expanded view;
* of q and of k one of each row and head: the shape of q, or k, without the head dim, with 1 in
  front if the sequences are packed; of pages (num_blocks, page_size, heads_k);
* of v one of each channel: (batch, heads_k, dim_v).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute.call import validate
from flash_cute.call.sizes import batch_of
from flash_cute.call.validate import options as validate_options

DTYPES = (torch.float8_e4m3fn,)
OUT_DTYPES = (torch.bfloat16, torch.float16)
DESCALES = ("q_descale", "k_descale", "v_descale")


def arguments(call: Any) -> None:
    """Checks a direct call of ``fp8_fwd`` or ``fp8_varlen_fwd``, but for the descales' values."""
    q, k, v = call.q, call.k, call.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        validate.tensor(name, x)
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name} has dtype {x.dtype}; supported: {validate.listed(DTYPES)}, which "
                "flash_cute.quantize_fp8 makes"
            )
    if hasattr(call, "cu_seqlens_q"):
        validate.varlen(
            q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k,
            call.seqused_q, call.seqused_k, call.block_table, dtypes=DTYPES,
        )  # fmt: skip
    else:
        validate.dense(q, k, v, dtypes=DTYPES)
    batch = batch_of(call)
    validate_options.check(call, batch, validate_options.OF_OPS)
    if call.sink is not None and call.sink.dtype != torch.float32:
        raise TypeError(f"sink has dtype {call.sink.dtype}; expected torch.float32: call float()")
    validate.flag("two_level", call.two_level)
    if call.dtype is not None and call.dtype not in OUT_DTYPES:
        raise TypeError(
            f"dtype is {call.dtype}, that of out; supported: {validate.listed(OUT_DTYPES)}"
        )
    _descales(call, batch)


def out_dtype(call: Any) -> torch.dtype:
    """The dtype of out of a valid call."""
    return call.dtype or OUT_DTYPES[0]


def _descales(call: Any, batch: int) -> None:
    heads = (batch, call.k.shape[-2])
    rows = [(1,) * (x.dim() == 3) + tuple(x.shape[:-1]) for x in (call.q, call.k)]
    own = (*rows, (*heads, call.v.shape[-1]))
    for name, shape in zip(DESCALES, own, strict=True):
        x = getattr(call, name)
        if x is None:
            continue
        validate.tensor(name, x)
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; expected torch.float32: call float()")
        if x.device != call.q.device:
            raise ValueError(f"{name} is on {x.device}, q on {call.q.device}; they must agree")
        if tuple(x.shape) not in (heads, shape):
            what = "channel" if name == "v_descale" else "row and head"
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected (batch, heads_k), {heads}, or one "
                f"for each {what}, {shape}"
            )


def values(name: str, x: Tensor) -> None:
    """Refuses descales that are no positive finite numbers, by looking at all: on the CPU alone."""
    if not ((x > 0) & (x <= validate.FP32_MAX)).all():
        wrong = x[~((x > 0) & (x <= validate.FP32_MAX))][0].item()
        raise ValueError(
            f"{name} holds {wrong}; expected positive finite numbers. A tensor of nothing but "
            "zeros has 1, as flash_cute.quantize_fp8 gives it"
        )
