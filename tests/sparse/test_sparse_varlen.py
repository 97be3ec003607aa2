"""Lists of tiles on the CPU: packed sequences, and what is not computed."""

from __future__ import annotations

import time

import pytest
import torch
from sparse.masks import mask_of
from sparse.oracle import oracle_of
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute import Sparse, cpu, flash_attn_varlen_func
from flash_cute.cpu import sparse as cpu_sparse
from flash_cute.ops.typed import BwdCall, FwdCall, VarlenBwdCall, VarlenFwdCall
from flash_cute.sparse.lists import transposed

LENGTHS = ((130, 200), (0, 50), (300, 300), (77, 0), (1, 257))


def packed(heads: int, heads_k: int, dim: int):
    lengths_q, lengths_k = zip(*LENGTHS, strict=True)
    offsets = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths_q, lengths_k))
    q = torch.randn(sum(lengths_q), heads, dim)
    k, v = (torch.randn(sum(lengths_k), heads_k, dim) for _ in range(2))
    return q, k, v, *offsets, max(lengths_q), max(lengths_k)


@pytest.mark.parametrize("of_lists", [(1, 1), (5, 1), (5, 2), (1, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_each_sequence_is_attention_of_its_own_lists(of_lists, causal):
    sequences = packed(4, 2, 16)
    indices = torch.randint(-2, 5, (*of_lists, 300, 2))
    sparse = Sparse.topk(indices, 64, layout="bhsk", seqlen_k=300)
    options = {
        "is_causal": causal, "dropout_p": 0.25, "rng": torch.tensor([3, 9]),
        "sink": torch.randn(4), "alibi_slopes": torch.rand(4),
    }  # fmt: skip
    call = VarlenFwdCall(*sequences, **options)
    out, lse, _, _ = cpu_sparse.varlen_fwd(call, sparse.tile_lists, sparse.tile_bits)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    q, k, v, *lengths = sequences
    backward = VarlenBwdCall(dout, q, k, v, out, lse, *lengths, dlse=dlse, **options)
    keys_first = transposed(sparse.tile_lists, sparse.key_tiles)
    dq, dk, dv, dsink, _ = cpu_sparse.varlen_bwd(backward, keys_first, sparse.tile_bits)
    mask, total, begin_q, begin_k = mask_of(sparse), torch.zeros(4).double(), 0, 0
    for index, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        rows = slice(begin_q, begin_q + seqlen_q)
        keys = slice(begin_k, begin_k + seqlen_k)
        begin_q, begin_k = rows.stop, keys.stop
        own = mask[index % len(mask), None, :, :seqlen_q, :seqlen_k]
        one = FwdCall(q[None, rows], k[None, keys], v[None, keys], **options)
        expected, grads = oracle_of(one, own, dout[None, rows], dlse[None, :, rows], index)
        close = {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(out[rows].double(), expected.out[0], **close)
        torch.testing.assert_close(lse[:, rows].double(), expected.lse[0], **close)
        for got, right in zip((dq[rows], dk[keys], dv[keys]), grads, strict=False):
            torch.testing.assert_close(got.double(), right[0], **close)
        total += grads[3]
    torch.testing.assert_close(dsink.double(), total, atol=1e-3, rtol=1e-4)


class Products(TorchDispatchMode):
    """Floating-point operations of batched matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if "bmm" in name or "addmm" in name or name.startswith("aten.mm"):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.flops += 2 * a.numel() * b.shape[-1]
        assert "scaled_dot_product" not in name and "flash_attention" not in name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 4])
def test_products_follow_the_density(causal, group):
    """A tenth of the pairs is a tenth of the products, and what a causal mask hides is none."""
    seqlen, heads, dim = 2048, 4, 32
    q = torch.randn(1, seqlen, heads, dim)
    k, v = torch.randn(2, 1, seqlen, heads // group, dim).unbind()
    sparse = Sparse.from_block_map(torch.rand(1, heads // group, 16, 16) < 0.1)
    tiles = sparse.visible_pairs(causal) / 128**2
    if causal:  # those of the diagonal are computed as a whole
        diagonal = sparse.visible_pairs(causal, (127, -1)) / 128**2
        tiles += diagonal
    call = FwdCall(q, k, v, is_causal=causal)
    with Products() as forward:
        out, lse, _, _ = cpu_sparse.fwd(call, sparse.tile_lists, None)
    per_tile = 4 * 128 * 128 * dim * heads
    assert forward.flops <= 1.05 * tiles * per_tile + per_tile
    given = BwdCall(torch.randn_like(out), q, k, v, out, lse, is_causal=causal)
    with Products() as backward:
        cpu_sparse.bwd(given, transposed(sparse.tile_lists, 16), None)
    assert backward.flops == 2.5 * forward.flops > 0


def seconds(call) -> float:
    """Of this process, the least of some runs."""
    found = []
    for _ in range(5):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def test_a_tenth_of_the_pairs_takes_less_time_than_all_of_them():
    q, k, v = torch.randn(3, 1, 4096, 4, 64).unbind()
    blocks = torch.rand(1, 4, 32, 32) < 0.07
    sparse = Sparse.from_block_map(blocks | torch.eye(32, dtype=torch.bool))
    call, lists = FwdCall(q, k, v), sparse.tile_lists
    dense = seconds(lambda: cpu.fwd(call))
    assert seconds(lambda: cpu_sparse.fwd(call, lists, None)) < 0.7 * dense
    out, lse, _, _ = cpu.fwd(call)
    backward = BwdCall(torch.randn_like(q), q, k, v, out, lse)
    dense = seconds(lambda: cpu.bwd(backward))
    lists = transposed(lists, 32)
    assert seconds(lambda: cpu_sparse.bwd(backward, lists, None)) < 0.7 * dense


def test_keys_that_no_query_sees_have_no_gradient_whatever_they_hold():
    """Lists may be for more queries than a sequence has; what is behind its end sees nothing."""
    blocks = torch.tensor([[[[False, True], [True, True]]]])  # the first keys: of later queries
    sparse = Sparse.from_block_map(blocks, (64, 64), seqlens=(128, 128))
    cu_seqlens = torch.tensor([0, 64, 192], dtype=torch.int32)
    q, k, v = torch.randn(3, 192, 1, 4).unbind()
    k[:64] = torch.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_varlen_func(*inputs, cu_seqlens, cu_seqlens, 128, 128, sparse=sparse)
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert not gradient[:64].any() and gradient.isfinite().all()
