"""Results that are written in place: none is a view, and gradients are those of new tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors

import flash_cute

CU = torch.tensor([0, 9, 18], dtype=torch.int32)


def packed(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    cu = CU.to(q.device)
    rows = map(packed, (q, k, v))
    return flash_cute.flash_attn_varlen_func(*rows, cu, cu, 9, 9, **options)


def kv_rows(q: Tensor, k: Tensor, v: Tensor) -> Any:
    cu, kv = CU.to(q.device), packed(torch.stack((k, v), 2))
    return flash_cute.flash_attn_varlen_kvpacked_func(packed(q), kv, cu, cu, 9, 9)


def qkv_rows(q: Tensor, k: Tensor, v: Tensor) -> Any:
    qkv = packed(torch.stack((q, k, v), 2))
    return flash_cute.flash_attn_varlen_qkvpacked_func(qkv, CU.to(q.device), 9)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Any:
    from flash_cute.integrations import sdpa

    with sdpa.activated():
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "plain": flash_cute.flash_attn_func,
    "causal": lambda q, k, v: flash_cute.flash_attn_func(q, k, v, causal=True),
    "window": lambda q, k, v: flash_cute.flash_attn_func(q, k, v, window_size=(3, 0)),
    "lse": lambda q, k, v: flash_cute.flash_attn_func(q, k, v, return_lse=True),
    "all": lambda q, k, v: flash_cute.flash_attn_func(
        q, k, v, return_attn_probs=True, return_max_logits=True, dropout_p=0.1, return_rng=True,
    ),
    "varlen": varlen,
    "varlen_lse": lambda q, k, v: varlen(q, k, v, softcap=3.0, return_lse=True),
    "kvpacked": lambda q, k, v: flash_cute.flash_attn_kvpacked_func(q, torch.stack((k, v), 2)),
    "qkvpacked": lambda q, k, v: flash_cute.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2)),
    "varlen_kvpacked": kv_rows,
    "varlen_qkvpacked": qkv_rows,
    "tiled": lambda q, k, v: flash_cute.flash_attention_forward(q, k, v, return_stats=True),
    "module": lambda q, k, v: flash_cute.FlashAttention()(q, k, v),
    "sdpa": sdpa,
}  # fmt: skip
INFERENCE: dict[str, Callable[..., Any]] = {
    "cache": lambda q, k, v: flash_cute.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True),
    "append": lambda q, k, v: flash_cute.flash_attn_with_kvcache(
        q, k.clone(), v.clone(), k[:, :1].clone(), v[:, :1].clone(), cache_seqlens=3, causal=True,
        return_softmax_lse=True,
    ),
    "combine": lambda q, k, v: flash_cute.flash_attn_combine(
        torch.stack((q, k)).float(), torch.zeros(2, *q.shape[:3], device=q.device)
    ),
    "mha": lambda q, k, v: flash_cute.mha.mha_fwd(q, k, v)[0],
    "mha_bwd": lambda q, k, v: flash_cute.mha.mha_bwd(
        q, q, k, v, *flash_cute.mha.mha_fwd(q, k, v)[::4]
    ),
    "tiled_bwd": lambda q, k, v: flash_cute.flash_attention_backward(
        q, k, v, q, q, *(torch.ones(q.shape[:3], device=q.device) for _ in "lm")
    ),
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def inputs(device: torch.device, dtype: torch.dtype, needs_grad: bool = True) -> list[Tensor]:
    if dtype == torch.float64 and torch.device(device).type == "cuda":
        pytest.skip("fp64 is for the CPU")
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(3, 2, 9, 4, 16, generator=generator).to(device, dtype)
    return [x.clone().requires_grad_(needs_grad) for x in drawn]


def results(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    found = function(*tensors)
    return list(found) if isinstance(found, tuple) else [found]


def floats(tensors: list[Tensor]) -> list[Tensor]:
    return [x for x in tensors if x is not None and x.is_floating_point()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(device, name, dtype):
    """Of results that are doubled in place, in the mode in which torch allows it."""
    function, found = FUNCTIONS[name], []
    for in_place in (False, True):
        tensors = inputs(device, dtype)
        torch.manual_seed(5)
        with allow_mutation_on_saved_tensors():
            out = [x for x in floats(results(function, tensors)) if x.requires_grad]
            doubled = [x.mul_(2) if in_place else x * 2 for x in out]
            sum((x.double() ** 2).sum() for x in doubled).backward()
        found.append([x.grad for x in tensors])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FUNCTIONS, *INFERENCE])
def test_results_without_a_gradient(device, name, dtype):
    """They may take one in place: results of a part of a model that is not trained."""
    function = (FUNCTIONS | INFERENCE)[name]
    tensors = inputs(device, dtype, needs_grad=False)
    if name in ("cache", "append") and device == "cuda" and dtype == torch.float32:
        with pytest.raises(NotImplementedError, match="float32 is not supported over a key/value"):
            function(*tensors)
        return
    with torch.no_grad():
        out = results(function, tensors)
    weight = torch.full((), 3.0, device=device, requires_grad=True)
    for x in floats(out):
        before = x.clone()
        x.mul_(weight.to(x.dtype))
        assert torch.equal(x, before * 3)
        assert x.requires_grad


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_result_is_a_view(device, name):
    if name in ("sdpa", "module"):
        pytest.skip("torch's own function, or a module, returns a view of it")
    for needs_grad in (True, False):
        for x in results(FUNCTIONS[name], inputs(device, torch.float32, needs_grad)):
            assert not x._is_view()
