"""Lists of tiles on the CPU: the dense masked softmax in fp64, values and gradients."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from sparse.masks import mask_of
from sparse.oracle import masked_attention, oracle_of

from flash_cute import Sparse, flash_attn_func
from flash_cute.cpu import sparse as cpu_sparse
from flash_cute.functional import gathered
from flash_cute.ops.typed import BwdCall, FwdCall
from flash_cute.sparse.lists import transposed

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def any_sparse(kind: str, batch: int, heads: int, seqlens: tuple[int, int]) -> Sparse:
    """Of random tiles, with rows that see nothing, of one of the constructors."""
    seqlen_q, seqlen_k = seqlens
    if kind == "topk":
        indices = torch.randint(-4, -(-seqlen_k // 32), (batch, heads, seqlen_q, 3))
        return Sparse.topk(indices, 32, layout="bhsk", seqlen_k=seqlen_k)
    if kind == "intervals":
        first = torch.randint(-9, seqlen_k, (batch, heads, seqlen_q, 2))
        last = first + torch.randint(-20, seqlen_k // 2 + 2, first.shape)
        return Sparse.intervals(first, last, seqlen_k=seqlen_k)
    size = int(kind)
    blocks = torch.rand(batch, heads, -(-seqlen_q // size), -(-seqlen_k // size)) < 0.4
    return Sparse.from_block_map(blocks, (size, size), seqlens=seqlens)


def tensors(batch, seqlens, heads, heads_k, dim, dim_v, dtype):
    q = torch.randn(batch, seqlens[0], heads, dim).to(dtype)
    k = torch.randn(batch, seqlens[1], heads_k, dim).to(dtype)
    v = torch.randn(batch, seqlens[1], heads_k, dim_v).to(dtype)
    return q, k, v


def run(call: FwdCall, sparse: Sparse, dout, dlse):
    results = cpu_sparse.fwd(call, sparse.tile_lists, sparse.tile_bits)
    options = {name: getattr(call, name) for name in BwdCall._fields if hasattr(call, name)}
    options |= {"out": results.out, "softmax_lse": results.softmax_lse, "dout": dout, "dlse": dlse}
    keys_first = transposed(sparse.tile_lists, sparse.key_tiles)
    return results, cpu_sparse.bwd(BwdCall(**options), keys_first, sparse.tile_bits)


def assert_right(call: FwdCall, sparse: Sparse, scale: float = 1.0) -> None:
    dtype = call.q.dtype
    dout = torch.randn(*call.q.shape[:3], call.v.shape[3]).to(dtype)
    dlse = torch.randn(len(call.q), call.q.shape[2], call.q.shape[1])
    results, gradients = run(call, sparse, dout, dlse.to(results_dtype(dtype)))
    expected, of_leaves = oracle_of(call, mask_of(sparse), dout, dlse)
    close = {"atol": scale * TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(results.out.double(), expected.out, **close)
    statistics = {"atol": 2e-5, "rtol": 2e-5}
    torch.testing.assert_close(results.softmax_lse.double(), expected.lse, **statistics)
    for name, got, right in zip(("dq", "dk", "dv", "dsink"), gradients, of_leaves, strict=False):
        error = (got.double() - right).abs().max() if right.numel() else 0
        least = 1e-7 if name == "dsink" else 0  # which is fp32
        assert error <= max(20 * TOLERANCE[dtype], least) * (1 + right.abs().max()), name
    softmax_d = (dout.double() * results.out.double()).sum(-1).transpose(1, 2) - dlse
    torch.testing.assert_close(gradients[4].double(), softmax_d, atol=1e-4, rtol=1e-4)


def results_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("kind", ["64", "128", "256", "topk", "intervals"])
@pytest.mark.parametrize("heads", [(2, 2, 1), (4, 2, 2), (4, 2, 4), (3, 3, 3), (6, 1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients(kind, heads, causal):
    heads_q, heads_k, of_lists = heads
    seqlens = random.choice([(300, 300), (129, 400), (400, 129), (64, 700), (1, 257)])
    sparse = any_sparse(kind, random.choice([1, 2]), of_lists, seqlens)
    q, k, v = tensors(2, seqlens, heads_q, heads_k, 24, 24, torch.float32)
    assert_right(FwdCall(q, k, v, is_causal=causal), sparse)


FEATURES = {
    "window": {"window_size_left": 90, "window_size_right": 45},
    "left": {"window_size_left": 0},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.7},
    "alibi": {"alibi_slopes": torch.rand(4)},
    "alibi of a batch": {"alibi_slopes": torch.rand(2, 4)},
    "sink": {"sink": torch.randn(4)},
    "dropout": {"dropout_p": 0.3, "rng": torch.tensor([5, 77])},
}


@pytest.mark.parametrize("names", [*itertools.combinations(FEATURES, 1), tuple(FEATURES)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("of_lists", [1, 2, 4])
def test_options(names, dtype, of_lists):
    seqlens = (290, 333)
    sparse = any_sparse(random.choice(["64", "topk", "intervals"]), 2, of_lists, seqlens)
    q, k, v = tensors(2, seqlens, 4, 2, 16, 24, dtype)
    options = {name: value for feature in names for name, value in FEATURES[feature].items()}
    assert_right(FwdCall(q, k, v, **options), sparse, 4.0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [1, 40, 64, 300])
def test_dtypes_and_head_dims(dtype, dim):
    sparse = any_sparse("64", 1, 2, (200, 260))
    assert_right(FwdCall(*tensors(1, (200, 260), 4, 2, dim, dim, dtype), is_causal=True), sparse)


def test_nothing_visible():
    sparse = Sparse.from_block_map(torch.zeros(1, 1, 2, 2, dtype=torch.bool))
    q, k, v = tensors(1, (200, 200), 2, 2, 8, 8, torch.float32)
    results, gradients = run(FwdCall(q, k, v), sparse, torch.randn_like(q), None)
    assert (results.out == 0).all() and (results.softmax_lse == -torch.inf).all()
    assert all((x == 0).all() for x in gradients[:3])


@pytest.mark.parametrize("of_lists", [1, 2, 4])
def test_softmax_and_row_max(of_lists):
    sparse = any_sparse("topk", 2, of_lists, (200, 300))
    q, k, v = tensors(2, (200, 300), 4, 2, 8, 8, torch.float32)
    call = FwdCall(q, k, v, dropout_p=0.2, rng=torch.tensor([1, 2]), return_softmax=True,
                   return_row_max=True)  # fmt: skip
    results = cpu_sparse.fwd(call, sparse.tile_lists, sparse.tile_bits)
    expected = masked_attention(call, mask_of(sparse))
    torch.testing.assert_close(results.softmax.double(), expected.softmax, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results.row_max.double(), expected.row_max, atol=1e-5, rtol=1e-5)


def test_hidden_numbers_do_not_matter():
    sparse = any_sparse("128", 1, 1, (384, 640))
    q, k, v = tensors(1, (384, 640), 2, 2, 8, 8, torch.float32)
    seen = mask_of(sparse)[0, 0].any(0)
    seen[:128] = True
    dout = torch.randn_like(q)
    results = []
    for odd in (0.0, torch.nan, torch.inf):
        for x in (k, v):
            x[:, ~seen] = odd
        results.append(run(FwdCall(q, k, v), sparse, dout, None))
    for other in results[1:]:
        for a, b in zip((*results[0][0][:2], *results[0][1][:3]), (*other[0][:2], *other[1][:3]),
                        strict=True):  # fmt: skip
            assert torch.equal(a, b)


def test_bits_are_repeatable():
    sparse = any_sparse("64", 1, 2, (600, 600))
    q, k, v = tensors(2, (600, 600), 4, 2, 16, 16, torch.float32)
    dout = torch.randn_like(q)
    first, second = (run(FwdCall(q, k, v, is_causal=True), sparse, dout, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[1][:3], second[1][:3], strict=True))


@pytest.mark.parametrize("of_a_kernel", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_lists_of_each_query_head_have_gradients(monkeypatch, causal, of_a_kernel):
    """In calls of the CPU's op, and in those that a GPU has no kernel for."""
    monkeypatch.setattr(gathered, "is_needed", lambda *_: not of_a_kernel)
    shapes = ((2, 200, 4, 16), (2, 300, 2, 16), (2, 300, 2, 24))
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    sink = torch.randn(4, requires_grad=True)
    indices = torch.randint(-2, 5, (2, 4, 200, 2))
    sparse = Sparse.topk(indices, 64, layout="bhsk", seqlen_k=300)
    out, lse = flash_attn_func(
        q, k, v, causal=causal, sparse=sparse, learnable_sink=sink, return_lse=True
    )
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v, sink), (dout, dlse), retain_graph=True)
    call = FwdCall(q, k, v, is_causal=causal, sink=sink)
    expected, grads = oracle_of(call, mask_of(sparse), dout, dlse)
    torch.testing.assert_close(out.double(), expected.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected.lse, atol=1e-5, rtol=1e-5)
    for x, right in zip(got, grads, strict=True):
        torch.testing.assert_close(x.double(), right, atol=1e-4, rtol=1e-4)
    buffer = torch.full_like(out, torch.nan)
    with torch.no_grad():
        flash_attn_func(q, k, v, causal=causal, sparse=sparse, learnable_sink=sink, out=buffer)
    assert torch.equal(buffer, out)
