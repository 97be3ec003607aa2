"""Views that an op writes into, under torch.compile: right, or refused with the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import flash_cute
from flash_cute.testing import bounds

LAYERS, CAPACITY = 3, 8
BATCHES = (2, 3, 5)
REFUSED = r"torch\.compile would write at element 0"


def decode(q, k_caches, v_caches, k, v, lengths):
    """One token through all layers, each of which has a cache."""
    for k_cache, v_cache in zip(k_caches, v_caches, strict=True):
        q = flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    return q


def decode_stacked(q, k_all, v_all, k, v, lengths):
    for i in range(LAYERS):
        q = flash_cute.flash_attn_with_kvcache(q, k_all[i], v_all[i], k, v, cache_seqlens=lengths)
    return q


def inputs(batch: int, device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(batch)
    q, k, v = (torch.randn(batch, 1, 2, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    shape = (LAYERS, batch, CAPACITY, 2, 16)
    k_all, v_all = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.randint(0, CAPACITY, (batch,), device=device, dtype=torch.int32)
    return q, k_all, v_all, k, v, lengths


def unstacked(args: Sequence[torch.Tensor]) -> list[Any]:
    """The same with a tensor of its own for each layer's cache."""
    q, k_all, v_all, *rest = args
    return [q, *([x.clone() for x in caches] for caches in (k_all, v_all)), *rest]


def check(call: Callable[..., torch.Tensor], args: Sequence[Any], expected: Sequence[Any]) -> None:
    """A call's result and caches, by those of the eager loop over caches of their own."""
    bounds.check_same_bits("out", call(*args), decode(*expected))
    for name, got, right in zip(("k", "v"), args[1:3], expected[1:3], strict=True):
        for i in range(LAYERS):
            bounds.check_same_bits(f"{name}_cache {i}", got[i], right[i])


@pytest.fixture(autouse=True)
def no_graphs_of_before():
    """Nor graphs that torch caches on disk: it reuses one with other offsets."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def test_stacked_caches_in_eager(device):
    args = inputs(2, device)
    check(decode_stacked, args, unstacked(args))


@pytest.mark.parametrize("dynamic", [None, True])
def test_stacked_caches_of_dynamic_sizes_are_refused(device, dynamic):
    """Inductor would write every layer into the first one."""
    compiled = torch.compile(decode_stacked, fullgraph=True, dynamic=dynamic)
    args = inputs(BATCHES[0], device)
    if dynamic is None:  # sizes are static until they change
        check(compiled, args, unstacked(args))
    for batch in BATCHES[1:]:
        with pytest.raises(Exception, match=REFUSED) as raised:
            compiled(*inputs(batch, device))
        for word in ("k_cache", "pytorch#198068", "tensor of its own", "mark_static"):
            assert word in str(raised.value)


@pytest.mark.parametrize("batch", BATCHES)
def test_stacked_caches_outside_of_a_full_graph(device, batch):
    """The calls run in between of graphs."""
    args = inputs(batch, device)
    check(torch.compile(decode_stacked, dynamic=True), args, unstacked(args))


@pytest.mark.parametrize("batch", BATCHES)
def test_stacked_caches_of_static_sizes(device, batch):
    args = inputs(batch, device)
    compiled = torch.compile(decode_stacked, fullgraph=True, dynamic=False)
    check(compiled, args, unstacked(args))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("are_views", [False, True])
def test_caches_of_each_layer(device, dynamic, are_views):
    """Tensors of their own, or views that were made outside of the graph."""
    compiled = torch.compile(decode, fullgraph=True, dynamic=dynamic)
    for batch in BATCHES:
        args = inputs(batch, device)
        expected, own = unstacked(args), unstacked(args)
        views = [args[0], *(list(caches.unbind()) for caches in args[1:3]), *args[3:]]
        check(compiled, views if are_views else own, expected)


def test_reading_stacked_caches(device):
    """Nothing is written: what begins where does not matter."""

    def attend(q, k_all, v_all, lengths):
        for i in range(LAYERS):
            q = flash_cute.flash_attn_with_kvcache(q, k_all[i], v_all[i], cache_seqlens=lengths)
        return q

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for batch in BATCHES:
        q, k_all, v_all, _, _, lengths = inputs(batch, device)
        args = (q, k_all, v_all, lengths.clamp(min=1))
        bounds.check_same_bits("out", compiled(*args), attend(*args))


@pytest.mark.parametrize("dynamic", [None, True])
def test_slices_of_views_from_outside_are_refused(device, dynamic):
    """torch would count their rows from where the whole stack begins, and append to none."""

    def append(q, k_cache, v_cache, k, v, lengths):
        caches = (x[:, : CAPACITY - 1] for x in (k_cache, v_cache))
        return flash_cute.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths)

    q, k_all, v_all, k, v, lengths = inputs(2, device)
    compiled = torch.compile(append, fullgraph=True, dynamic=dynamic)
    with pytest.raises(Exception, match=r"k_cache .* outside of the compiled function"):
        compiled(q, k_all[1], v_all[1], k, v, lengths)
    torch._dynamo.reset()
    results = []
    for call in (compiled, append):
        caches = k_all[1].clone(), v_all[1].clone()
        results.append((call(q, *caches, k, v, lengths), *caches))
    for name, got, expected in zip(("out", "k_cache", "v_cache"), *results, strict=True):
        bounds.check_same_bits(name, got, expected)


def test_out_overloads_of_stacked_results(device):
    def attend(q, k, v, out, lse):
        torch.ops.flash_cute.fwd.out(q, k, v, out=out, softmax_lse=lse)
        return out + 0

    def attend_stacked(q, k, v, outs, lses):
        return attend(q, k, v, outs[1], lses[1])

    compiled, refused = (
        torch.compile(x, fullgraph=True, dynamic=True) for x in (attend, attend_stacked)
    )
    for batch in BATCHES:
        qkv = torch.randn(3, batch, 9, 2, 16, device=device, dtype=torch.bfloat16).unbind()
        outs = torch.zeros(2, batch, 9, 2, 16, device=device, dtype=torch.bfloat16)
        lses = torch.zeros(2, batch, 2, 9, device=device)
        expected = attend(*qkv, outs[1], lses[1])
        out, lse = torch.zeros_like(outs[1]), torch.zeros_like(lses[1])
        bounds.check_same_bits("out", compiled(*qkv, out, lse), expected)
        bounds.check_same_bits("lse", lse, lses[1])
        with pytest.raises(Exception, match=REFUSED):
            refused(*qkv, outs, lses)
