"""What the tests of errors share: arguments that are accepted, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BF16, INT32 = torch.bfloat16, torch.int32
Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


def good_arguments(function: str, device: str) -> Arguments:
    """Arguments that the public function flash_attn_<function> accepts."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(BF16)

    def offsets() -> torch.Tensor:
        return torch.tensor([0, 5, 8], dtype=INT32, device=device)

    sequences_q = {"cu_seqlens_q": offsets(), "max_seqlen_q": 5}
    sequences_k = {"cu_seqlens_k": offsets(), "max_seqlen_k": 5}
    q, k, v = random(2, 8, 4, 16), random(2, 8, 2, 16), random(2, 8, 2, 16)
    rows = {"q": q[0], "k": k[0], "v": v[0], **sequences_q, **sequences_k}
    return {
        "func": {"q": q, "k": k, "v": v},
        "qkvpacked_func": {"qkv": random(2, 8, 3, 4, 16)},
        "kvpacked_func": {"q": q, "kv": random(2, 8, 2, 2, 16)},
        "varlen_func": rows,
        "varlen_qkvpacked_func": {
            "qkv": random(8, 3, 4, 16),
            "cu_seqlens": offsets(),
            "max_seqlen": 5,
        },
        "varlen_kvpacked_func": {
            "q": q[0],
            "kv": random(8, 2, 2, 16),
            **sequences_q,
            **sequences_k,
        },
    }[function]


def pages(arguments: Arguments, **changes: Any) -> Arguments:
    """Paged k and v for `varlen_func`: 4 pages of 4 rows, 2 pages a sequence."""
    device = arguments["q"].device
    cache = torch.zeros(4, 4, 2, 16, dtype=BF16, device=device)
    table = torch.arange(4, dtype=INT32, device=device).view(2, 2)
    return {"k": cache, "v": cache.clone(), "block_table": table} | changes


def on(name: str, change: Callable[[Any], Any]) -> Change:
    """Replaces argument `name` by a function of it."""
    return lambda arguments: {name: change(arguments[name])}


def to(**values: Any) -> Change:
    """Sets arguments to constants."""
    return lambda arguments: values


def vector(name: str, *shape: int, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Change:
    """Sets argument `name` to ones of a shape, by default on the device of the other arguments."""

    def change(arguments: Arguments) -> Arguments:
        device = next(x for x in arguments.values() if isinstance(x, torch.Tensor)).device
        return {name: torch.ones(shape, **({"dtype": dtype, "device": device} | kwargs))}

    return change


def strided(name: str, *shape: int) -> Change:
    """Sets argument `name` to fp32 ones of a shape whose last stride is 2."""
    return lambda arguments: {name: wide(vector(name, *shape)(arguments)[name])}


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """`x` on another device."""
    return x.to("cpu" if x.is_cuda else "meta")


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` with a last stride of 2."""
    return x.repeat_interleave(2, -1)[..., ::2]
