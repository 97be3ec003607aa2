"""Kernels that walk lists of tiles against the oracle, and the layer that calls them, on a GPU."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from planned import plan

from flash_cute import Sparse, flash_attn_func, flash_attn_varlen_func, kernels, ops, reference
from flash_cute.attention import SparsePattern, create_sparse_attention
from flash_cute.functional import gathered
from flash_cute.native import library
from flash_cute.reference.masks import listed
from flash_cute.sparse.lists import tile_lists, tiles_of
from flash_cute.testing.cases import Case, VarlenCase, make_inputs
from flash_cute.testing.kernels import parse
from flash_cute.testing.verify import verify_forward

KERNELS = [id for id in library.kernels() if parse(id).walks_lists]
FORWARD = [id for id in KERNELS if id.startswith("fwd")]
BACKWARD = [id for id in KERNELS if id.startswith("bwd")]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = {  # seqlen_q, seqlen_k, density of tiles
    "whole tiles": (512, 640, 0.5),
    "ends inside of tiles": (333, 467, 0.7),
    "one query": (1, 300, 0.8),
    "half a tile": (65, 129, 1.0),
    "empty lists": (200, 300, 0.1),
    "no lists": (150, 140, 0.0),
}


def random_lists(batch, heads, seqlens, density, masked):
    """Lists with whole tiles, quadrants, and if `masked` token masks; half of the lists have whole
    tiles alone otherwise."""
    shape = (batch, heads, *map(tiles_of, seqlens))
    codes = torch.where(torch.rand(shape) < 0.5, 15, torch.randint(1, 16, shape))
    codes = torch.where(torch.rand(shape) < density, codes, 0).int()
    bits = None
    if not masked:
        codes[:, :, ::2] = torch.where(codes[:, :, ::2] > 0, 15, 0)
    else:
        has_mask = (codes > 0) & (torch.rand(shape) < 0.4)
        numbers = has_mask.flatten().cumsum(0).view(shape)
        codes = torch.where(has_mask, codes + 16 * numbers, codes).int()
        masks = int(has_mask.sum())
        bits = torch.randint(-(2**31), 2**31, (masks, 128, 4), dtype=torch.int32).cuda()
    return Sparse(tile_lists(codes.cuda()), bits, *seqlens, "blocks")


def check(got, expected, unit, bound=None):
    """Within the contract's bound, or 8 units of the largest element."""
    error = (got.double() - expected).abs()
    if bound is None:
        bound = 8 * unit * expected.abs().max().clamp_min(1)
    assert (error <= bound).all(), (error / bound).max()


def has_backward(kernel, options):
    """Whether this GPU has a backward over lists for what the kernel computes."""
    rules = {"softcap": "softcap" in options, "alibi": "alibi_slopes" in options}
    dims = {"head_dim": kernel.dim, "head_dim_v": kernel.dim_v}
    problem = kernels.Problem("bwd", kernel.dtype, **dims, lists=True, **rules)
    return bool(kernels.supports(problem))


def verify(name, shape, masked, causal, kernel, deterministic):
    seqlen_q, seqlen_k, density = SHAPES[shape]
    q, k, v = (
        torch.randn(2, rows, heads, dim, device="cuda", dtype=kernel.dtype)
        for rows, heads, dim in (
            (seqlen_q, 4, kernel.dim), (seqlen_k, 2, kernel.dim), (seqlen_k, 2, kernel.dim_v),
        )
    )  # fmt: skip
    options = {"softcap": 15.0, "alibi_slopes": torch.rand(4, device="cuda")}
    options = options if kernel.tier == "rich" else {}
    sparse = random_lists(2, 2, (seqlen_q, seqlen_k), density, masked)
    trains = kernel.op == "bwd" or has_backward(kernel, options)
    inputs = [x.requires_grad_(trains) for x in (q, k, v)]
    with library.only(name, f"{kernel.other_op}_"):
        out, lse = flash_attn_func(
            *inputs, causal=causal, sparse=sparse, return_lse=True, deterministic=deterministic,
            **options,
        )  # fmt: skip
        dout = torch.randn_like(out)
        gradients = torch.autograd.grad(out, inputs, dout) if trains else ()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    of_oracle = {"is_causal": causal, "tile_lists": sparse.tile_lists, **options}
    of_oracle["tile_bits"] = sparse.tile_bits
    expected = reference.attention(*exact, **of_oracle)
    unit = UNIT[kernel.dtype]
    spread = reference.attention(*exact[:2], exact[2].abs(), **of_oracle).out.detach()
    wanted = expected.out.detach()
    check(out.detach(), wanted, unit, unit * wanted.abs() + 2 * unit * spread + 1e-7)
    torch.testing.assert_close(lse.double(), expected.softmax_lse.detach(), atol=2e-3, rtol=1e-4)
    wanted = torch.autograd.grad(expected.out, exact, dout.double()) if trains else ()
    for x, y in zip(gradients, wanted, strict=True):
        check(x, y, unit)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORWARD)
def test_forward(cuda, name, shape, masked, causal):
    verify(name, shape, masked, causal, parse(name), False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(cuda, name, shape, masked, deterministic):
    verify(name, shape, masked, True, parse(name), deterministic)


def test_backward_needs_one_list_for_all_query_heads_of_a_kv_head(cuda):
    q, k = (torch.randn(1, 200, heads, 64, device=cuda, dtype=torch.bfloat16) for heads in (4, 2))
    lists = random_lists(1, 4, (200, 200), 1.0, False).tile_lists
    lse = torch.zeros(1, 4, 200, device=cuda)
    words = "tile_lists has 4 heads; backward on CUDA needs one list .* of a kv head: 1 or 2 heads"
    with pytest.raises(RuntimeError, match=words):
        torch.ops.flash_cute.bwd(q, q, k, k, q, lse, tile_lists=lists)


@pytest.mark.parametrize("name", [id for id in BACKWARD if "bf16" in id])
def test_deterministic_gradients_repeat(cuda, name):
    kernel = parse(name)
    q = torch.randn(2, 2000, 8, kernel.dim, device="cuda", dtype=torch.bfloat16)
    q.requires_grad_()
    v = q[..., : kernel.dim_v]
    sparse = random_lists(1, 1, (2000, 2000), 0.5, False)
    with library.only(name, "fwd_"):
        out = flash_attn_func(q, q, v, sparse=sparse, deterministic=True)
        dout = out.detach()
        expected = torch.autograd.grad(out, q, dout, retain_graph=True)[0]
        for _ in range(50):
            assert torch.equal(torch.autograd.grad(out, q, dout, retain_graph=True)[0], expected)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(cuda, causal):
    lengths = [333, 1, 128, 0, 700]
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (
        torch.randn(sum(lengths), heads, 128, device="cuda", dtype=torch.bfloat16)
        for heads in (4, 2, 2)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    sparse = random_lists(len(lengths), 2, (700, 700), 0.6, True)
    out = flash_attn_varlen_func(
        *inputs, cu_seqlens, cu_seqlens, 700, 700, causal=causal, sparse=sparse
    )
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference.attention_varlen(
        *exact, cu_seqlens, cu_seqlens, 700, 700, is_causal=causal, tile_lists=sparse.tile_lists,
        tile_bits=sparse.tile_bits,
    ).out  # fmt: skip
    check(out.detach(), expected.detach(), UNIT[torch.bfloat16])
    for x, y in zip(gradients, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        check(x, y, UNIT[torch.bfloat16])


CASES = {
    "window": Case(seqlen_q=500, seqlen_k=700, window=(70, 33), sparse="pairs"),
    "causal window": Case(seqlen_q=300, seqlen_k=900, is_causal=True, window=(200, 0),
                          sparse="halves", list_heads="keys"),
    "queries that see nothing": Case(seqlen_q=333, seqlen_k=200, is_causal=True, sparse="pairs"),
    "lists of query heads": Case(heads=6, heads_k=2, seqlen_q=400, seqlen_k=333, sparse="pairs",
                                 list_heads="queries"),
    "rules": Case(heads=4, heads_k=2, seqlen_q=300, seqlen_k=400, is_causal=True, softcap=9.0,
                  alibi="batch", dropout_p=0.2, sink=True, sparse="pairs", list_heads="keys"),
    "dropout in a window": Case(seqlen_q=400, seqlen_k=400, window=(77, 50), dropout_p=0.3,
                                sparse="halves"),
    "scale below 0": Case(seqlen_q=200, seqlen_k=300, softmax_scale=-0.2, sparse="whole"),
    "varlen": VarlenCase(lengths_q=(64, 0, 1, 333), lengths_k=(64, 17, 1, 200), is_causal=True,
                         sink=True, sparse="pairs", list_heads="keys"),
    "lengths in use": VarlenCase(lengths_q=(300, 140), lengths_k=(280, 500), used_q=(211, 140),
                                 used_k=(100, 333), rows_before=3, rows_after=5, sparse="halves"),
    "odd rows": Case(seqlen_q=300, seqlen_k=200, layout="odd_rows", sparse="pairs"),
    "large logits": Case(seqlen_q=150, seqlen_k=300, spread=8.0, sparse="pairs"),
}  # fmt: skip


@pytest.mark.parametrize("dims", [(64, 64), (40, 72), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_forward_of_every_gpu(cuda, case, dtype, dims):
    """By the oldest family, which does what newer kernels refuse."""
    dim, dim_v = dims
    inputs = make_inputs(replace(CASES[case], dtype=dtype, dim=dim, dim_v=dim_v), cuda)
    with library.only("fwd_sm80_"):
        verify_forward(inputs)


def test_rows_that_share_their_memory(cuda):
    q, k = (torch.randn(1, 300, 2, 128, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    lists = random_lists(1, 1, (300, 300), 0.7, True)
    of_lists = {"tile_lists": lists.tile_lists, "tile_bits": lists.tile_bits}
    q, k = q.expand(3, -1, -1, -1), k[:, :1].expand(3, 300, -1, -1)
    with library.only("fwd_sm80_"):
        expected = ops.fwd(q.contiguous(), k.contiguous(), k.contiguous(), **of_lists)
        found = ops.fwd(q, k, k, **of_lists)
    by_default = ops.fwd(q, k, k, **of_lists)
    for x, y, z in zip(expected[:2], found, by_default, strict=False):
        assert torch.equal(x, y) and torch.equal(x, z)


def test_lists_are_those_of_the_cpu(cuda):
    codes = torch.randint(0, 3, (2, 3, 37, 70), dtype=torch.int32)
    codes[0] = (codes[0] > 1) * 15  # whole tiles
    of_cpu = torch.ops.flash_cute.tile_lists(codes, 70)
    assert torch.equal(torch.ops.flash_cute.tile_lists(codes.cuda(), 70).cpu(), of_cpu)
    for x, y in zip(
        torch.ops.flash_cute.transposed_tile_lists(of_cpu.cuda(), 70),
        torch.ops.flash_cute.transposed_tile_lists(of_cpu, 70),
        strict=True,
    ):
        assert torch.equal(x.cpu(), y)


def gradients_in_fp64(q, k, v, dout, shown):
    """dq, dk, dv of (1, seqlen, 1, dim), some queries at a time; ``shown`` (seqlen_q, seqlen_k)."""
    q, k, v, dout = (x[0, :, 0].double() for x in (q, k, v, dout))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    for rows in torch.arange(len(q), device=q.device).split(8192):
        scores = (scale * q[rows] @ k.T).masked_fill(~shown[rows], -torch.inf)
        shares = scores.softmax(-1).nan_to_num(0)
        of_shares = dout[rows] @ v.T
        of_scores = shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True))
        dq[rows] = scale * of_scores @ k
        dk += scale * of_scores.T @ q[rows]
        dv += shares.T @ dout[rows]
    return (x[None, :, None] for x in (dq, dk, dv))


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "strips"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])
def test_backward_of_long_walks(cuda, masked, deterministic):
    """Walks that start where the others are, by tiles and by strips."""
    seqlen_q, seqlen_k, dim = 70_001, 1500, 128
    shapes = ((1, n, 1, dim) for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q))
    q, k, v, dout = (torch.randn(x, device=cuda, dtype=torch.bfloat16) for x in shapes)
    sparse = random_lists(1, 1, (seqlen_q, seqlen_k), 0.3, masked)
    sizes = (1, 1, 1, seqlen_q, seqlen_k, dim, dim)
    planned = plan("bwd", *sizes, lists=True, deterministic=deterministic)
    assert planned.shares_l2 != deterministic
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*inputs, sparse=sparse, deterministic=deterministic)
    shown = listed(sparse.tile_lists, sparse.tile_bits, seqlen_q, seqlen_k)[0, 0]
    expected = list(gradients_in_fp64(*(x.detach() for x in inputs), dout, shown))
    for _ in range(3):
        got = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        for x, y in zip(got, expected, strict=True):
            check(x, y, UNIT[torch.bfloat16])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", [SparsePattern.LOCAL_GLOBAL, SparsePattern.STRIDED])
def test_layer_in_16_bits(cuda, pattern, causal):
    """Static patterns, whose blocks do not depend on rounding, against the same layer on the
    CPU."""
    layer = create_sparse_attention(256, 4, 0.8, pattern, causal=causal)
    on_gpu = copy.deepcopy(layer).to("cuda", torch.bfloat16)
    layer = layer.double()
    x = torch.randn(1, 4096, 256).bfloat16()
    expected = layer(x.double())
    got = on_gpu(x.cuda())
    assert on_gpu.last_sparsity == pytest.approx(layer.last_sparsity) and layer.last_sparsity > 0.7
    assert (got.double().cpu() - expected).abs().max() < 0.03 * expected.abs().max()


def test_sparse_calls_without_a_kernel_are_computed(cuda):
    """fp32, whose results are compared with the CPU's; a limited thread gets the refusal."""
    q = torch.randn(2, 300, 4, 64, device="cuda", requires_grad=True)
    sparse = random_lists(2, 4, (300, 300), 0.6, True)
    with pytest.warns(UserWarning, match="no kernel does a sparse call"):
        gathered._say.cache_clear()
        out = flash_attn_func(q, q, q, causal=True, sparse=sparse, dropout_p=0.2, softcap=9.0)
    gradient = torch.autograd.grad(out, q, out, retain_graph=True)[0]
    exact = q.detach().cpu().requires_grad_()
    on_cpu = Sparse(sparse.tile_lists.cpu(), sparse.tile_bits.cpu(), 300, 300, "blocks")
    options = {"causal": True, "softcap": 9.0}
    found, expected = (
        flash_attn_func(x, x, x, sparse=lists, **options)
        for x, lists in ((q, sparse), (exact, on_cpu))
    )
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)
    gradients = (torch.autograd.grad(x, y, x)[0] for x, y in ((found, q), (expected, exact)))
    torch.testing.assert_close(next(gradients).cpu(), next(gradients), atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.autograd.grad(out, q, out)[0], gradient)  # bitwise repeatable
    with library.only("fwd_"), pytest.raises(RuntimeError, match="no kernel"):
        flash_attn_func(q, q, q, sparse=sparse)
