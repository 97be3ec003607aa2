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
from flash_cute import kernels

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


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("option", ["dropout_p", "softcap"])
@pytest.mark.parametrize("number", [0.0, 0.5, 7.5])
def test_options_that_data_tells_are_refused(option, number):
    """What is computed depends on them, so the graph cannot be made."""

    def call(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return flash_cute.flash_attn_func(q, q, q, **{option: x.item()})

    torch._dynamo.reset()
    (q,) = randoms((1, 8, 2, 16), device="cpu")
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=f"{option} is a number that the compiled graph computes"):
        compiled(q, torch.tensor(number))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("option", ["dropout_p", "softcap"])
def test_options_whose_sign_alone_is_known_are_refused(option):
    """0 switches them off, so the graph must know that, too."""

    def call(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        number = x.item()
        torch._check(number >= 0.0)
        return flash_cute.flash_attn_func(q, q, q, **{option: number})

    torch._dynamo.reset()
    (q,) = randoms((1, 8, 2, 16), device="cpu")
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=f"{option} is a number that the compiled graph computes"):
        compiled(q, torch.tensor(0.5))


@pytest.mark.parametrize("option", ["dropout_p", "softcap"])
def test_options_that_depend_on_data_work_outside_of_graphs(option):
    """Without a full graph the number is read, and the call made for it."""

    def call(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rng = torch.tensor([3, 4])
        options = {option: x.item(), "rng": rng}
        return flash_cute.flash_attn_func(q * 2, q, q, **options) + 1

    torch._dynamo.reset()
    (q,) = randoms((1, 8, 2, 16), device="cpu")
    compiled = torch.compile(call, backend="eager")
    for number in (0.0, 0.5, 0.25):
        expected = call(q, torch.tensor(number))
        torch.testing.assert_close(compiled(q, torch.tensor(number)), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match=f"{option} is -1"):
        compiled(q, torch.tensor(-1.0))


BAD_NUMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout_p": ({"dropout_p": 1.5}, "dropout_p is a number of the graph; expected a probability"),
    "softcap": ({"softcap": -1.5}, "softcap is a number of the graph; expected 0"),
    "softmax_scale": ({"softmax_scale": 1e39}, "softmax_scale is a number of the graph; expected"),
    "window_size": ({"window_size": (-3, 4)}, "window_size is .a number of the graph, a number"),
}


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_messages_name_no_symbol(name):
    options, message = BAD_NUMBERS[name]

    def call(q: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        return flash_cute.flash_attn_func(q, q, q, **options)

    torch._dynamo.reset()
    (q,) = randoms((1, 8, 2, 16), device="cpu")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    with pytest.raises(Exception, match=message):
        compiled(q, options)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("of_data", [False, True])
def test_a_cache_that_is_too_small_under_dynamic_shapes(of_data):
    def call(q: torch.Tensor, cache: torch.Tensor, new: torch.Tensor, n: Any) -> torch.Tensor:
        used = n.item() if of_data else n
        caches = cache, cache.clone()
        return flash_cute.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=used)

    torch._dynamo.reset()
    q, cache, new = randoms((3, 1, 4, 16), (3, 40, 2, 16), (3, 1, 2, 16), device="cpu")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for used, message in ((39, ""), (40, "cache_seqlens is too large: with the rows of k it")):
        n = torch.tensor(used) if of_data else used
        if not message:
            assert torch.equal(compiled(q, cache, new, n), call(q, cache, new, n))
        elif not of_data:
            with pytest.raises(Exception, match=message):
                compiled(q, cache, new, n)
        else:  # the graph exists, and checks when it runs
            with pytest.raises(RuntimeError):
                compiled(q, cache, new, n)


def test_a_limit_within_a_compiled_function_ends_with_it():
    problem = kernels.Problem(heads=32, heads_k=8, seqlen_q=16, seqlen_k=8192)

    @torch.compile(backend="eager")
    def limited(x: torch.Tensor) -> torch.Tensor:
        with kernels.only(num_splits=3):
            return x + 1

    with kernels.only(num_splits=2):
        assert limited(torch.ones(2)).tolist() == [2, 2]
        assert kernels.plan(problem, "h100").num_splits == 2
