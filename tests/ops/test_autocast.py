"""Under torch.autocast: dtypes of results and gradients are those of torch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import leaf
from torch.utils.checkpoint import checkpoint

import flash_cute

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MIXTURES = {
    "fp32": (F32, F32, F32),
    "rotated": (F32, F32, BF16),  # rotary embedding in fp32
    "half": (F16, F16, F16),
    "all": (F16, BF16, F32),
    "fp64": (F64, F64, F64),
}
HALVES = [F16, BF16]


def randn(device: str, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def torchs_own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    batch, seqlen = q.shape[:2]
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen
    rows = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_cute.flash_attn_varlen_func(*rows, offsets, offsets, seqlen, seqlen)
    return out.unflatten(0, (batch, seqlen))


def fwd_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.ops.flash_cute.fwd(q, k, v)[0]


def varlen_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor([0, len(q[0])], dtype=torch.int32, device=q.device)
    ops = torch.ops.flash_cute
    longest = (q.shape[1], k.shape[1])
    samples = zip(q, k, v, strict=True)
    return torch.stack([ops.varlen_fwd(*x, offsets, offsets, *longest)[0] for x in samples])


FUNCTIONS = {
    "func": flash_cute.flash_attn_func,
    "varlen_func": varlen,
    "fwd": fwd_op,
    "varlen_fwd": varlen_op,
}


def step(attend: Callable[..., Any], leaves: list[torch.Tensor], dtype: torch.dtype) -> Any:
    """The result under autocast, and the leaves' gradients outside of it."""
    with torch.autocast(leaves[0].device.type, dtype=dtype):
        out = attend(*leaves)
    return out, torch.autograd.grad(out.float().square().sum(), leaves)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_dtypes_are_those_of_sdpa(device, mixture, name, dtype):
    if device == "cuda" and mixture == "fp64":
        pytest.skip("there are no fp64 kernels")
    leaves = [leaf(randn(device, 2, 12, 2, 16, dtype=t)) for t in MIXTURES[mixture]]
    out, grads = step(FUNCTIONS[name], leaves, dtype)
    expected, expected_grads = step(torchs_own, leaves, dtype)
    for x, y in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0.03, atol=0.03)
    with torch.no_grad(), torch.autocast(device, dtype=dtype):
        assert torch.equal(FUNCTIONS[name](*leaves), out)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_mixtures_are_refused_as_before(device, name):
    q, k, v = (randn(device, 1, 8, 2, 16, dtype=t) for t in (F32, F32, F64))
    refusals = (TypeError, RuntimeError)
    with torch.autocast(device, dtype=BF16), pytest.raises(refusals):
        FUNCTIONS[name](q, k, v)
    with torch.autocast(device, dtype=BF16), pytest.raises(RuntimeError):
        torchs_own(q, k, v)
    with pytest.raises(refusals):
        FUNCTIONS[name](q, k, v.bfloat16())


@pytest.mark.parametrize("form", ["qkv", "kv"])
@pytest.mark.parametrize("packed_rows", [False, True])
def test_packed_forms_cast_the_packed_tensor(device, form, packed_rows):
    q = leaf(randn(device, 16, 2, 16, dtype=BF16))
    packed = leaf(randn(device, 16, len(form), 2, 16))
    offsets = torch.tensor([0, 6, 16], dtype=torch.int32, device=device)
    inputs = (packed,) if form == "qkv" else (q, packed)
    if packed_rows:
        function = getattr(flash_cute, f"flash_attn_varlen_{form}packed_func")
        sequences = (offsets, 10) if form == "qkv" else (offsets, offsets, 10, 10)
    else:
        function, sequences = getattr(flash_cute, f"flash_attn_{form}packed_func"), ()

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return function(*(x if packed_rows else x[None] for x in tensors), *sequences)

    out, grads = step(attend, list(inputs), F16)
    assert out.dtype == F16 and [g.dtype for g in grads] == [x.dtype for x in inputs]
    halves = [leaf(x.half()) for x in inputs]
    expected = attend(*halves)
    assert torch.equal(out, expected)
    expected_grads = torch.autograd.grad(expected.float().square().sum(), halves)
    for x, y in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype))


def test_sinks_slopes_and_lse_keep_their_dtypes(device):
    """Their values are not rounded on the way."""
    q, k, v = (randn(device, 1, 12, 2, 16) for _ in range(3))
    options = {"sink": leaf(randn(device, 2)), "alibi_slopes": torch.rand(2, device=device)}
    asked = {"return_lse": True, **options}
    with torch.autocast(device, dtype=BF16):
        out, lse = flash_cute.flash_attn_func(q, k, v, **asked)
    expected = flash_cute.flash_attn_func(*(x.bfloat16() for x in (q, k, v)), **asked)
    assert lse.dtype == F32
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    (dsink,) = torch.autograd.grad(out.float().sum() + lse.sum(), options["sink"])
    assert dsink.dtype == F32


def test_autocast_that_is_off_or_for_another_device(device):
    q, k, v = (randn(device, 1, 12, 2, 16) for _ in range(3))
    plain = flash_cute.flash_attn_func(q, k, v)
    with torch.autocast(device, dtype=BF16):
        with torch.autocast(device, enabled=False):
            assert torch.equal(flash_cute.flash_attn_func(q, k, v), plain)
            assert torch.equal(fwd_op(q, k, v), plain)
        meta = flash_cute.flash_attn_func(*(x.to("meta") for x in (q, k, v)))
        assert meta.dtype == torchs_own(*(x.to("meta") for x in (q, k, v))).dtype == F32
    if device == "cuda":
        with torch.autocast("cpu", dtype=BF16):
            assert torch.equal(flash_cute.flash_attn_func(q, k, v), plain)


@pytest.mark.parametrize("cache_dtype", [F16, BF16, F32])
def test_caches_keep_their_dtype(device, cache_dtype):
    """Queries, appended keys and values, and rotary tables are cast to the cache's dtype."""
    if device == "cuda" and cache_dtype == F32:
        pytest.skip("there are no fp32 kernels over caches")
    q, k, v = (randn(device, 2, 1, 2, 16, dtype=t) for t in (F32, F32, BF16))
    tables = [randn(device, 8, 8).cos(), randn(device, 8, 8, dtype=F16).sin()]
    caches = [randn(device, 2, 8, 2, 16, dtype=cache_dtype) for _ in "kv"]
    results = []
    for autocast in (True, False):
        written = [x.clone() for x in caches]
        given = [q, k, v, *tables] if autocast else [x.to(cache_dtype) for x in (q, k, v, *tables)]
        with torch.autocast(device, dtype=BF16, enabled=autocast):
            out = flash_cute.flash_attn_with_kvcache(
                given[0], *written, *given[1:], cache_seqlens=5
            )
            again = flash_cute.flash_attn_with_kvcache(given[0], *written, cache_seqlens=6)
        results.append((out, again, *written))
    for x, y in zip(*results, strict=True):
        assert x.dtype == cache_dtype and torch.equal(x, y)


def test_combine_is_not_affected(device):
    parts, lse = randn(device, 3, 5, 16), randn(device, 3, 5)
    with torch.autocast(device, dtype=BF16):
        out, _ = flash_cute.flash_attn_combine(parts, lse)
    assert out.dtype == F32 and torch.equal(out, flash_cute.flash_attn_combine(parts, lse)[0])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("form", ["func", "qkvpacked_func"])
def test_compiled(device, form, inside):
    """In a full graph, with autocast inside of the compiled function or around it."""
    torch._dynamo.reset()
    function = getattr(flash_cute, f"flash_attn_{form}")
    lead = (1, 12) if form == "func" else (1, 12, 3)
    args = [leaf(randn(device, *lead, 2, 16)) for _ in range(3 if form == "func" else 1)]

    def under_autocast(*args: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=BF16):
            return function(*args)

    expected = step(function, args, BF16)
    target = under_autocast if inside else function
    compiled = torch.compile(target, fullgraph=True, backend="aot_eager")
    if inside:
        out = compiled(*args)
        grads = torch.autograd.grad(out.float().square().sum(), args)
    else:
        compiled(*args)  # one without autocast, from which the next is told apart
        out, grads = step(compiled, args, BF16)
    assert out.dtype == BF16 and torch.equal(out, expected[0])
    for x, y in zip(grads, expected[1], strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
        assert device != "cpu" or torch.equal(x, y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(device, use_reentrant):
    args = [leaf(randn(device, 1, 12, 2, 16, dtype=t)) for t in (F32, F32, BF16)]

    def plain(*args: torch.Tensor) -> torch.Tensor:
        return flash_cute.flash_attn_func(*args, deterministic=True)

    def checkpointed(*args: torch.Tensor) -> torch.Tensor:
        return checkpoint(plain, *args, use_reentrant=use_reentrant)

    results = []
    for attend in (checkpointed, plain):
        with torch.autocast(device, dtype=BF16):
            out = attend(*args)
        out.float().square().sum().backward()
        results.append((out, *(x.grad for x in args)))
        for x in args:
            x.grad = None
    for x, y in zip(*results, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


def test_mapped(device):
    q, k, v = randn(device, 3, 4, 1, 12, 2, 16)
    with torch.autocast(device, dtype=BF16):
        for attend in (flash_cute.flash_attn_func, fwd_op):
            out = torch.vmap(attend)(q, k, v)
            expected = torch.stack([attend(*x) for x in zip(q, k, v, strict=True)])
            assert out.dtype == BF16
            torch.testing.assert_close(out, expected)
            grad = torch.func.grad(lambda q, f=attend: f(q, k[0], v[0]).float().sum())(q[0])
            assert grad.dtype == F32
