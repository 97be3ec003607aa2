"""The public functions over a key/value cache: torch.compile, opcheck, combining parts."""

from __future__ import annotations

import pytest
import torch
from kvcache_calls import call
from torch.fx.experimental.proxy_tensor import make_fx

import flash_cute
from flash_cute import reference
from flash_cute.testing import bounds
from flash_cute.testing.kvcache import CacheCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SAMPLES = {
    "contiguous": CacheCase(lengths=(33, 20), dim=64, dtype=BF16, num_splits=3),
    "paged": CacheCase(
        lengths=(33, 20), seqlens_q=3, seqlens_new=3, page_size=16, rotary="halves",
        is_causal=True, heads=4, heads_k=2, dim=64, dtype=BF16,
    ),
    "packed": CacheCase(
        lengths=(33, 20), seqlens_q=(3, 1), seqlens_new=(3, 1), batch_idx=True, leftpad=True,
        sink=True, alibi="batch", dim=64, dtype=FP16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(make_cache, name):
    inputs = make_cache(SAMPLES[name])
    for cache in ("k_cache", "v_cache"):
        inputs[cache].nan_to_num_()
    torch.library.opcheck(torch.ops.flash_cute.fwd_kvcache.default, (), inputs.arguments)


@pytest.mark.parametrize("name", SAMPLES)
def test_compile(make_cache, name):
    """One full graph; the caches are written as in eager."""
    torch._dynamo.reset()
    expected, got = make_cache(SAMPLES[name]), make_cache(SAMPLES[name])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        results = (
            compiled(got, return_softmax_lse=True), call(expected, return_softmax_lse=True)
        )  # fmt: skip
        for a, b in zip(*results, strict=True):
            bounds.check_same_bits("out", a, b)
        for cache in ("k_cache", "v_cache"):
            bounds.check_same_bits(cache, got[cache], expected[cache])


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck_of_what_appends_nothing(make_cache, name):
    inputs = make_cache(SAMPLES[name])
    for cache in ("k_cache", "v_cache"):
        inputs[cache].nan_to_num_()
    op = torch.ops.flash_cute.attend_kvcache.default
    names = [argument.name for argument in op._schema.arguments]
    torch.library.opcheck(op, (), {name: inputs.arguments[name] for name in names})


@pytest.mark.parametrize("name", SAMPLES)
def test_what_appends_nothing_is_the_same(make_cache, name):
    """The op without new keys, and the one that could append some."""
    none = dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cu_seqlens_k_new"))
    inputs = make_cache(SAMPLES[name]).changed(**none)
    for result, a, b in zip(
        ("out", "softmax_lse"), call(inputs, return_softmax_lse=True), inputs.run(), strict=True
    ):
        bounds.check_same_bits(result, a, b)


@pytest.mark.parametrize("axis", [0, 1])
def test_inductor_reads_views_of_one_tensor(device, axis):
    """Views that are made inside of the graph, with shapes that change."""
    torch._dynamo.reset()

    def attend(q, caches, lengths):
        k_cache, v_cache = caches.unbind(axis)
        return flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for batch in (2, 3, 5):
        q = torch.randn(batch, 1, 4, 64, device=device, dtype=BF16)
        shape = [batch, 20, 2, 64]
        shape.insert(axis, 2)
        caches = torch.randn(shape, device=device, dtype=BF16)
        lengths = torch.randint(1, 21, (batch,), device=device, dtype=torch.int32)
        expected = attend(q, caches, lengths)
        bounds.check_same_bits("out", compiled(q, caches, lengths), expected)


# Before torch 2.13 inductor's code for two views of one tensor, whose shapes are compared and to
# which an op writes, names a size that it never defines: so with any op that does.
@pytest.mark.xfail(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    raises=NameError,
    strict=True,
    reason="torch before 2.13",
)
def test_inductor_appends_to_views_from_outside(device):
    torch._dynamo.reset()

    def attend(q, k_cache, v_cache, k, v, lengths):
        return flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for batch in (2, 3):
        q, k, v = (torch.randn(batch, 1, 2, 64, device=device, dtype=BF16) for _ in range(3))
        caches = torch.randn(batch, 2, 20, 2, 64, device=device, dtype=BF16)
        expected_caches = caches.clone()
        lengths = torch.randint(1, 20, (batch,), device=device, dtype=torch.int32)
        got = compiled(q, *caches.unbind(1), k, v, lengths)
        expected = attend(q, *expected_caches.unbind(1), k, v, lengths)
        bounds.check_same_bits("out", got, expected)
        bounds.check_same_bits("caches", caches, expected_caches)


def test_function_is_the_op(make_cache):
    inputs = make_cache(SAMPLES["paged"])
    out, lse = inputs.fresh().run()
    ran = inputs.fresh()
    got = call(ran, return_softmax_lse=True, block_table=None, page_table=inputs["block_table"])
    for name, a, b in zip(("out", "softmax_lse"), got, (out, lse), strict=True):
        bounds.check_same_bits(name, a, b)


def test_one_length_for_all(make_cache):
    inputs = make_cache(CacheCase(lengths=(40, 40), dim=64, dtype=BF16))
    bounds.check_same_bits("out", call(inputs, cache_seqlens=40), call(inputs))


def test_a_length_may_be_symbolic():
    def half_full(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return flash_cute.flash_attn_with_kvcache(
            q, cache, cache.clone(), cache_seqlens=cache.shape[1] // 2
        )

    shapes = ((2, 1, 4, 64), (2, 32, 2, 64)), ((2, 2, 4, 64), (2, 50, 2, 64))
    first, second = ([torch.randn(shape) for shape in pair] for pair in shapes)
    traced = make_fx(half_full, tracing_mode="symbolic")(*first)
    bounds.check_same_bits("out", traced(*second), half_full(*second))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compile_with_lengths_of_data(device):
    """Lengths that are known only as the graph runs, and are checked then."""
    torch._dynamo.reset()

    def attend(q, cache, offsets, lengths):
        return flash_cute.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths.min().item(), causal=True,
            cu_seqlens_q=offsets, max_seqlen_q=(offsets[1:] - offsets[:-1]).max().item(),
        )  # fmt: skip

    q, cache = (torch.randn(n, 2, 64, device=device, dtype=BF16) for n in (6, 64))
    offsets, lengths = (
        torch.tensor(x, device=device, dtype=torch.int32) for x in ([0, 2, 6], [20, 32])
    )
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    args = (q, cache.view(2, 32, 2, 64), offsets)
    bounds.check_same_bits("out", compiled(*args, lengths), attend(*args, lengths))
    for wrong in (lengths - 21, lengths + 13):
        with pytest.raises(RuntimeError, match="assert"):
            compiled(*args, wrong)


def test_gradients_are_refused(make_cache):
    inputs = make_cache(SAMPLES["contiguous"])
    leaf = inputs.changed(q=inputs["q"].clone().requires_grad_())
    with pytest.raises(RuntimeError, match=r"requires grad, and this op is for inference"):
        leaf.run()
    with torch.no_grad():
        leaf.run()


def test_what_a_call_writes_has_another_version(make_cache):
    """So that autograd notices when it has saved the caches."""
    inputs = make_cache(CacheCase(lengths=(40, 3), seqlens_new=2, dim=64, dtype=BF16))
    weight = torch.ones((), dtype=BF16, device=inputs["q"].device, requires_grad=True)
    for new_rows, changes in ((True, {}), (False, {"k": None, "v": None})):
        cached = inputs.changed(**changes).fresh()
        product = (weight * cached["k_cache"]).sum()
        versions = [cached[name]._version for name in ("q", "k_cache", "v_cache")]
        cached.run()
        moved = [cached[name]._version > v for name, v in zip(
            ("q", "k_cache", "v_cache"), versions, strict=True)]  # fmt: skip
        assert moved == [False, new_rows, new_rows]
        if new_rows:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
        else:
            product.backward()
    with torch.inference_mode():
        inputs.fresh().run()


def test_no_query_heads(make_cache):
    """Rows are appended to the cache, and there are no queries."""
    inputs = make_cache(CacheCase(lengths=(40, 3), seqlens_new=2, dim=64, dtype=BF16))
    expected, got = inputs.fresh(), inputs.changed(q=inputs["q"][:, :, :0]).fresh()
    expected.run()
    out, lse = got.run()
    assert out.numel() == lse.numel() == 0
    bounds.check_same_bits("k_cache", got["k_cache"], expected["k_cache"])


def test_combine_takes_any_dimensions(device):
    out, lse = torch.randn(3, 2, 1, 2, 1, 2, 1, 4, device=device), torch.randn(3, 2, 1, 2, 1, 2, 1)
    got, got_lse = flash_cute.flash_attn_combine(out, lse.to(device))
    flat, flat_lse = flash_cute.flash_attn_combine(out.flatten(1, 6), lse.flatten(1).to(device))
    assert got.shape == out.shape[1:] and got_lse.shape == lse.shape[1:]
    bounds.check_same_bits("out", got.view(-1, 4), flat)
    bounds.check_same_bits("lse", got_lse.flatten(), flat_lse)


@pytest.mark.parametrize("parts", [1, 2, 17, 133])
@pytest.mark.parametrize("dim", [8, 64, 100, 256])
@pytest.mark.parametrize("dtype", [None, BF16, FP16], ids=str)
def test_combine(device, parts, dim, dtype):
    generator = torch.Generator().manual_seed(parts)
    out = torch.randn(parts, 2, 5, 3, dim, generator=generator).to(device)
    lse = (4 * torch.randn(parts, 2, 5, 3, generator=generator)).to(device)
    empty = torch.rand(lse.shape, generator=generator).to(device) < 0.3
    empty[:, 0, 0] = True
    lse[empty] = -torch.inf
    out[empty] = float("nan")
    expected, expected_lse = reference.combine(out, lse)
    got, got_lse = flash_cute.flash_attn_combine(out, lse, out_dtype=dtype)
    assert got.dtype == (dtype or FP32)
    unit = bounds.ROUNDING_UNIT[got.dtype]
    size, _ = reference.combine(out.abs(), lse)
    bounds.compare("out", got, expected, (unit + 2e-6) * size + 2**-25)
    bounds.check_lse("lse", got_lse, expected_lse)
    into = torch.empty_like(got)
    assert flash_cute.flash_attn_combine(out, lse, out=into, return_lse=False) is into
    bounds.check_same_bits("out", into, got)


def test_combine_is_the_whole(make_cache):
    """Attention over two halves of the keys, combined, is that over all of them."""
    inputs = make_cache(CacheCase(lengths=(64, 64), capacity=64, dim=64, dtype=FP16))
    whole, whole_lse = inputs.run()
    halves = [
        inputs.changed(cache_seqlens=None, k_cache=inputs["k_cache"][:, rows],
                       v_cache=inputs["v_cache"][:, rows]).run()
        for rows in (slice(0, 40), slice(40, 64))
    ]  # fmt: skip
    out = torch.stack([x.float() for x, _ in halves])
    lse = torch.stack([x for _, x in halves]).transpose(2, 3)  # (part,batch,seqlen,head)
    got, got_lse = flash_cute.flash_attn_combine(out, lse)
    torch.testing.assert_close(got, whole.float(), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(got_lse.transpose(1, 2), whole_lse)


def test_combine_compiles_as_one_graph(device):
    parts = torch.randn(3, 2, 5, 4, 16, device=device), torch.randn(3, 2, 5, 4, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(flash_cute.flash_attn_combine, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(*parts), flash_cute.flash_attn_combine(*parts), strict=True):
        assert torch.equal(x, y)
