"""torch.compile makes one graph: of shapes that change, and of backward alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flash_cute

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def randoms(*shapes: tuple[int, ...], device: str) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]


def dense_call(seqlen: int, device: str) -> Call:
    return flash_cute.flash_attn_func, (*randoms(*[(2, seqlen, 4, 16)] * 3, device=device),)


def packed_call(name: str, seqlen: int, device: str) -> Call:
    q, kv, qkv = randoms(*((2, seqlen, *rest, 4, 16) for rest in ((), (2,), (3,))), device=device)
    args = (qkv,) if name == "qkvpacked" else (q, kv)
    return getattr(flash_cute, f"flash_attn_{name}_func"), args


def varlen_call(name: str, seqlen: int, device: str) -> Call:
    offsets = torch.tensor([0, seqlen, seqlen + 40], device=device, dtype=torch.int32)
    q, k, v = randoms(*[(seqlen + 40, 4, 16)] * 3, device=device)
    longest = max(seqlen, 40)
    sequences = (offsets, offsets, longest, longest)
    args = {
        "varlen": (q, k, v, *sequences),
        "varlen_kvpacked": (q, torch.stack((k, v), 1), *sequences),
        "varlen_qkvpacked": (torch.stack((q, k, v), 1), offsets, longest),
    }[name]
    return getattr(flash_cute, f"flash_attn_{name}_func"), args


def kvcache_call(appends: bool, capacity: int, device: str) -> Call:
    q, k, v = randoms(*[(2, 1, 4, 16)] * 3, device=device)
    caches = randoms(*[(2, capacity, 4, 16)] * 2, device=device)
    lengths = torch.tensor([3, 5], device=device, dtype=torch.int32)
    new = (k, v) if appends else (None, None)
    return flash_cute.flash_attn_with_kvcache, (q, *caches, *new, None, None, lengths)


CALLS: dict[str, Callable[[int, str], Call]] = {
    "dense": dense_call,
    "qkvpacked": partial(packed_call, "qkvpacked"),
    "kvpacked": partial(packed_call, "kvpacked"),
    "varlen": partial(varlen_call, "varlen"),
    "varlen_kvpacked": partial(varlen_call, "varlen_kvpacked"),
    "varlen_qkvpacked": partial(varlen_call, "varlen_qkvpacked"),
    "kvcache": partial(kvcache_call, True),
    "attend_kvcache": partial(kvcache_call, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_dynamic_lengths_are_compiled_once(device, name):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    options = {"fullgraph": True, "dynamic": True, "backend": counter}
    compiled = torch.compile(CALLS[name](64, device)[0], **options)
    for seqlen in (64, 65, 100, 17):
        function, args = CALLS[name](seqlen, device)
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        torch.testing.assert_close(compiled(*args), function(*copies), rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", CALLS)
def test_defaults_are_zero(name):
    parameters = inspect.signature(CALLS[name](17, "cpu")[0]).parameters
    for option in {"softcap", "dropout_p"} & parameters.keys():
        assert parameters[option].default == 0.0


@pytest.mark.parametrize("name", ["dense", "qkvpacked", "varlen", "varlen_kvpacked"])
def test_compiled_autograd_of_calls_in_eager(device, name):
    torch._dynamo.reset()
    function, args = CALLS[name](17, device)
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for x in leaves:
        x.requires_grad_()
    loss = function(*args).square().sum()
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiler = torch.compile(backend=counter, fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        loss.backward()
    for x, grad in zip(leaves, expected, strict=True):
        torch.testing.assert_close(x.grad, grad)
    assert counter.frame_count == 1
