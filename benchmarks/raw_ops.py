"""The bare ops of flash_cute and its rivals on random cases, without functions and autograd around
them: what is replayed as a CUDA graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .random_cases import RandomCase
from .rivals import OURS, Work
from .suites import Inputs


def _gradients(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value[:3])


def _out(value: Any) -> tuple[torch.Tensor, ...]:
    return (value[0],)


def flash_cute(case: RandomCase, x: Inputs) -> Work:
    ops, options = torch.ops.flash_cute, x.options
    if case.group == "decode":
        return Work(partial(ops.fwd_kvcache.default, x.q, x.k, x.v, **options), _out)
    packed = case.group.startswith("packed")
    fwd, bwd = (ops.varlen_fwd, ops.varlen_bwd) if packed else (ops.fwd, ops.bwd)
    forward = partial(fwd.default, x.q, x.k, x.v, **options)
    if case.direction == "fwd":
        return Work(forward, _out)
    out, lse, *_ = forward()
    return Work(partial(bwd.default, x.dout, x.q, x.k, x.v, out, lse, **options), _gradients)


def flash_attention_3(case: RandomCase, x: Inputs) -> Work:
    ops = torch.ops.flash_attn_3
    options = {**_used(x.options), "softmax_scale": case.dim**-0.5}
    forward = partial(ops.fwd, x.q, x.k, x.v, **options)
    if case.direction == "fwd":
        return Work(forward, _out)
    out, lse, *_ = forward()
    grads = tuple(torch.empty_like(t) for t in (x.q, x.k, x.v))
    backward = partial(ops.bwd, x.dout, x.q, x.k, x.v, out, lse, *grads, **options)
    return Work(backward, lambda _: grads)


def flash_attention_4(case: RandomCase, x: Inputs) -> Work:
    module = importlib.import_module("flash_attn.cute.interface")
    options = _used(x.options)
    options["causal"] = options.pop("is_causal")
    forward = partial(module._flash_attn_fwd, x.q, x.k, x.v, return_lse=True, **options)
    if case.direction == "fwd":
        return Work(forward, _out)
    out, lse, *_ = forward()
    backward = partial(module._flash_attn_bwd, x.q, x.k, x.v, out, x.dout, lse, **options)
    return Work(backward, _gradients)


def _used(options: dict[str, Any]) -> dict[str, Any]:
    """Options by FlashAttention-3's and 4's names."""
    return {"seqused_k" if n == "cache_seqlens" else n: value for n, value in options.items()}


def cudnn(case: RandomCase, x: Inputs) -> Work:
    """torch's ops for cuDNN. They take no window and no lengths of a cache, packed sequences only
    with as many kv heads, and they count causal queries from the first key."""
    if "window_size_left" in x.options:
        raise NotImplementedError("no windows")
    if case.group == "decode" and (case.queries > 1 or len({*case.lengths}) > 1):
        raise NotImplementedError("neither ragged caches nor several queries")
    packed = case.group.startswith("packed")
    if packed and case.heads > case.heads_k:
        raise NotImplementedError("no groups of heads in packed sequences")

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t if packed else t.transpose(1, 2)

    q, k, v, dout = map(turned, (x.q, x.k, x.v, x.dout))
    if case.group == "decode":
        k, v = (t[:, :, : case.lengths[0]] for t in (k, v))
    causal = case.mask != "full" and case.queries != 1
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    ends = [x.options[name] for name in names if packed]
    fwd, bwd = (getattr(torch.ops.aten, name).default for name in _CUDNN[packed])
    with_lse = case.direction == "bwd"
    forward = partial(fwd, q, k, v, None, *ends, with_lse, 0.0, causal)
    if case.direction == "fwd":
        return Work(forward, lambda value: (turned(value[0]),))
    out, lse, *ends, seed, offset, _ = forward()
    saved = (q, k, v, out, lse, seed, offset, None, *ends, 0.0, causal)
    return Work(partial(bwd, dout, *saved), lambda grads: tuple(map(turned, grads)))


_CUDNN = {  # by whether sequences are packed
    False: (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    ),
    True: ("_cudnn_attention_forward", "_cudnn_attention_backward"),
}

CALLS: dict[str, Callable[[RandomCase, Inputs], Work]] = {
    OURS: flash_cute,
    "fa3": flash_attention_3,
    "fa4": flash_attention_4,
    "cudnn": cudnn,
}
