"""Tensors of other layouts are refused by name; tensors without elements are not refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_arguments import BF16, INT32, good_arguments, pages

import flash_cute
from flash_cute.call import validate
from flash_cute.call.validate import ops as validate_ops

FUNCTIONS = (
    "func", "qkvpacked_func", "kvpacked_func", "varlen_func", "varlen_qkvpacked_func",
    "varlen_kvpacked_func", "paged", "with_kvcache", "combine",
)  # fmt: skip


def arguments_of(function: str, device: str) -> dict[str, Any]:
    """Arguments that it accepts, with every tensor that it takes."""

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    if function == "combine":
        return {"out_partial": ones(2, 3, 8), "lse_partial": ones(2, 3), "out": ones(3, 8)}
    scores = {"sink": ones(4), "alibi_slopes": ones(4)}
    if function == "with_kvcache":
        names = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_seqlens")
        caches = {name: ones(2, 8, 2, 16, dtype=BF16) for name in ("k_cache", "v_cache")}
        new = {name: ones(2, 3, 2, 16, dtype=BF16) for name in "kv"}
        rotary = {name: ones(64, 4, dtype=BF16) for name in ("rotary_cos", "rotary_sin")}
        lengths = {name: torch.arange(2, dtype=INT32, device=device) for name in names}
        return {"q": ones(2, 3, 4, 16, dtype=BF16), **caches, **new, **rotary, **lengths, **scores}
    arguments = good_arguments("varlen_func" if function == "paged" else function, device)
    if function == "paged":
        arguments |= pages(arguments)
    if function == "varlen_func":
        arguments |= {name: ones(2, dtype=INT32) for name in ("seqused_q", "seqused_k")}
    if function == "varlen_qkvpacked_func":
        arguments |= {"seqused": ones(2, dtype=INT32)}
    return arguments | scores


def call_of(function: str) -> Callable[..., Any]:
    name = "varlen_func" if function == "paged" else function
    return getattr(flash_cute, f"flash_attn_{name}")


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(x[None] if x.dim() == 1 else x))


def jagged(x: torch.Tensor) -> torch.Tensor:
    rows = list(x[:, None] if x.dim() == 1 else x)
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "nested": (nested, "is a nested tensor; .*values"),
    "jagged": (jagged, "is a nested tensor; .*values"),
    "sparse_coo": (torch.Tensor.to_sparse, r"has layout torch.sparse_coo; .*\.to_dense\(\)"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensors_of_other_layouts_are_refused_by_name(device, function, layout):
    arguments, call = arguments_of(function, device), call_of(function)
    if function != "paged" or device == "cpu":
        call(**arguments)
    change, said = LAYOUTS[layout]
    tensors = [name for name, x in arguments.items() if isinstance(x, torch.Tensor)]
    for name in tensors:
        with pytest.raises(NotImplementedError, match=rf"^{name} {said}"):
            call(**(arguments | {name: change(arguments[name])}))


EMPTY: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "no_batch": ("func", {"q": (0, 5, 4, 16), "k": (0, 7, 2, 16), "v": (0, 7, 2, 8)}),
    "no_query": ("func", {"q": (2, 0, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 8)}),
    "no_key": ("func", {"q": (2, 5, 4, 16), "k": (2, 0, 2, 16), "v": (2, 0, 2, 8)}),
    "no_head": ("func", {"q": (2, 5, 0, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 8)}),
    "qkv_of_no_batch": ("qkvpacked_func", {"qkv": (0, 5, 3, 4, 16)}),
    "qkv_of_no_token": ("qkvpacked_func", {"qkv": (2, 0, 3, 4, 16)}),
    "kv_of_no_batch": ("kvpacked_func", {"q": (0, 5, 4, 16), "kv": (0, 7, 2, 2, 16)}),
    "kv_of_no_query": ("kvpacked_func", {"q": (2, 0, 4, 16), "kv": (2, 7, 2, 2, 16)}),
    "kv_of_no_key": ("kvpacked_func", {"q": (2, 5, 4, 16), "kv": (2, 0, 2, 2, 16)}),
    "kv_of_no_head": ("kvpacked_func", {"q": (2, 5, 0, 16), "kv": (2, 7, 2, 2, 16)}),
    "packed_no_query": ("varlen_func", {"q": (0, 4, 16), "k": (7, 2, 16), "v": (7, 2, 8)}),
    "packed_no_key": ("varlen_func", {"q": (5, 4, 16), "k": (0, 2, 16), "v": (0, 2, 8)}),
    "packed_no_head": ("varlen_func", {"q": (5, 0, 16), "k": (7, 2, 16), "v": (7, 2, 8)}),
    "packed_qkv_of_no_token": ("varlen_qkvpacked_func", {"qkv": (0, 3, 4, 16)}),
    "packed_kv_of_no_query": ("varlen_kvpacked_func", {"q": (0, 4, 16), "kv": (7, 2, 2, 16)}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "features": {"causal": True, "softcap": 5.0, "dropout_p": 0.3, "deterministic": True},
}


def lengths_of(function: str, tensors: dict[str, torch.Tensor], batch: int) -> dict[str, Any]:
    """One sequence, or none, of all rows."""
    if "varlen" not in function:
        return {}

    def offsets(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0, len(x)][: batch + 1], dtype=INT32, device=x.device)

    q, k = (tensors.get(x, next(iter(tensors.values()))) for x in ("q", "k"))
    k = tensors.get("kv", k)
    if "qkv" in tensors:
        return {"cu_seqlens": offsets(q), "max_seqlen": len(q)}
    cu_seqlens = {"cu_seqlens_q": offsets(q), "cu_seqlens_k": offsets(k)}
    return {**cu_seqlens, "max_seqlen_q": len(q), "max_seqlen_k": len(k)}


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", EMPTY)
def test_tensors_without_elements_train(device, name, options, batch):
    """The gradient of a sum is expanded, from nothing too: its strides are 0."""
    function, shapes = EMPTY[name]
    if batch == 0 and "varlen" not in function:
        pytest.skip("there is no sequence to leave out")
    tensors = {
        x: torch.randn(shape, dtype=BF16, device=device).requires_grad_()
        for x, shape in shapes.items()
    }
    lengths = lengths_of(function, tensors, batch)
    out = call_of(function)(**tensors, **lengths, **OPTIONS[options])
    out.sum().backward()
    for x, y in tensors.items():
        assert y.grad is not None and y.grad.shape == y.shape, x
        assert not y.grad.any(), x
    assert not out.any()


@pytest.mark.parametrize("name", ["no_batch", "no_query", "qkv_of_no_batch", "packed_no_query"])
def test_strides_of_tensors_without_elements_say_nothing(device, name):
    function, shapes = EMPTY[name]
    tensors = {
        x: torch.ones((), dtype=BF16, device=device).expand(shape) for x, shape in shapes.items()
    }
    tensors = {x: y if y.numel() == 0 else y.contiguous() for x, y in tensors.items()}
    out = call_of(function)(**tensors, **lengths_of(function, tensors, 1))
    assert out.numel() == 0


def test_no_sequence_over_a_cache(device):
    q, cache = (torch.ones((), dtype=BF16, device=device) for _ in range(2))
    q, cache = q.expand(0, 3, 4, 16), cache.expand(0, 8, 2, 16)
    table = torch.zeros((), dtype=INT32, device=device).expand(0, 4)
    lengths = torch.zeros((), dtype=INT32, device=device).expand(0)
    for places in ({}, {"block_table": table}):
        out = flash_cute.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, **places)
        assert out.shape == (0, 3, 4, 16)
    new = cache[:, :3]
    other = cache.clone()
    out = flash_cute.flash_attn_with_kvcache(q, cache, other, new, new, cache_seqlens=lengths)
    assert out.shape == (0, 3, 4, 16)


def test_rows_of_one_page_may_have_any_stride(device):
    """A table of one block a sequence."""
    arguments = arguments_of("with_kvcache", device)
    table = torch.tensor([1, 0], dtype=INT32, device=device).as_strided((2, 1), (1, 5))
    places = {"cache_batch_idx": None, "block_table": table}
    by_pages = flash_cute.flash_attn_with_kvcache(**(arguments | places))
    rows = {"cache_batch_idx": table[:, 0].contiguous()}
    assert torch.equal(by_pages, flash_cute.flash_attn_with_kvcache(**(arguments | rows)))


def test_nothing_shares_no_memory():
    validate_ops.check_not_expanded("out", torch.ones(()).expand(0, 4))
    validate.contiguous_last("q", torch.ones(()).expand(0, 4))


@pytest.mark.parametrize("names", ["q", "k", "v", "qv"])
def test_pages_name_what_requires_a_gradient(names):
    arguments = good_arguments("varlen_func", "cpu")
    arguments |= pages(arguments)
    for name in names:
        arguments[name] = arguments[name].clone().requires_grad_()
    said = " and ".join(names) + (" require" if len(names) > 1 else " requires") + " grad"
    for call in (flash_cute.flash_attn_varlen_func, torch.ops.flash_cute.varlen_fwd):
        with pytest.raises(NotImplementedError, match=f"block_table.*{said}"):
            call(**arguments)
        with torch.no_grad():
            call(**arguments)
