"""Lists of tiles in the reference: a second reading of the same definition, and the CPU by it."""

from __future__ import annotations

import pytest
import torch
from sparse.masks import mask_of
from sparse.oracle import masked_attention

from flash_cute import Sparse, reference
from flash_cute.ops.typed import FwdCall
from flash_cute.reference.masks import listed


def some_sparse(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Sparse:
    indices = torch.randint(-3, -(-seqlen_k // 16), (batch, heads, seqlen_q, 4))
    return Sparse.topk(indices, 16, layout="bhsk", seqlen_k=seqlen_k)


@pytest.mark.parametrize("seqlens", [(200, 300), (128, 129), (300, 0), (0, 7)])
def test_the_mask_of_lists(seqlens):
    sparse = some_sparse(2, 3, *seqlens)
    seen = listed(sparse.tile_lists, sparse.tile_bits, *seqlens)
    assert torch.equal(seen, mask_of(sparse))


def test_entries_behind_the_ends_are_ignored():
    sparse = Sparse.from_block_map(torch.rand(1, 1, 5, 6) < 0.6)
    seen = listed(sparse.tile_lists, None, 200, 333)
    assert torch.equal(seen, mask_of(sparse)[..., :200, :333])


@pytest.mark.parametrize("of_lists", [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("odd", [None, torch.nan, torch.inf])
def test_attention_sees_what_lists_and_its_band_let_through(of_lists, odd):
    sparse = some_sparse(*of_lists, 140, 260)
    q, k, v = torch.randn(2, 140, 4, 8), *torch.randn(2, 2, 260, 2, 8).unbind()
    call = FwdCall(q, k, v, is_causal=True, softcap=2.0, sink=torch.randn(4))
    options = {"is_causal": True, "softcap": 2.0, "sink": call.sink}
    mask = mask_of(sparse)
    if odd is not None:  # in keys that nobody sees
        v[:, ~mask.any(2).flatten(0, 1).any(0)] = odd
        v[:, 259] = odd
        mask[..., 259] = False
        sparse = Sparse.from_mask_function(lambda b, h, i, j: mask[b, h, i, j], *mask.shape)
    lists = {"tile_lists": sparse.tile_lists, "tile_bits": sparse.tile_bits}
    result = reference.attention(q, k, v, **options, **lists)
    expected = masked_attention(call._replace(v=v.nan_to_num(0, 0, 0)), mask)
    torch.testing.assert_close(result.out, expected.out)
    torch.testing.assert_close(result.softmax_lse, expected.lse)
    torch.testing.assert_close(result.softmax, expected.softmax)


@pytest.mark.parametrize("shared", [False, True])
def test_each_sequence_of_a_packed_batch_has_its_own_lists(shared):
    lengths_q, lengths_k = (130, 0, 90), (200, 50, 131)
    sparse = some_sparse(1 if shared else 3, 2, 130, 200)
    q, k, v = (torch.randn(sum(n), 2, 8) for n in (lengths_q, lengths_k, lengths_k))
    offsets = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k)]
    lists = {"tile_lists": sparse.tile_lists, "tile_bits": sparse.tile_bits}
    out = reference.attention_varlen(q, k, v, *offsets, 130, 200, **lists).out
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    for index, (one_q, one_k, one_v) in enumerate(parts):
        mask = mask_of(sparse)[0 if shared else index, None, :, : len(one_q), : len(one_k)]
        expected = masked_attention(FwdCall(one_q[None], one_k[None], one_v[None]), mask).out[0]
        torch.testing.assert_close(out.split(lengths_q)[index], expected)
