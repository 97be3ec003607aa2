"""Sparse in a graph: as an argument, and made inside."""

from __future__ import annotations

import pytest
import torch

from flash_cute import Sparse


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_an_argument_of_a_graph():
    def used(x, sparse):
        sparse.check(1, 2, 1, (256, 256), x.device, causal=False)
        return x + sparse.tile_lists.sum() + sparse.tile_bits.sum() + sparse.key_tiles

    compiled = torch.compile(used, fullgraph=True, backend="aot_eager")
    x = torch.zeros(3, dtype=torch.int64)
    for shift in (0, 5, 40):
        sparse = Sparse.from_mask_function(lambda b, h, q, k, s=shift: k <= q + s, 1, 1, 256, 256)
        assert torch.equal(compiled(x, sparse), used(x, sparse))


def test_a_graph_refuses_a_value_of_other_lengths():
    sparse = Sparse.from_block_map(torch.ones(1, 1, 2, 2, dtype=torch.bool))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def refused(x):
        sparse.check(1, 1, 1, (512, 256), x.device, causal=False)
        return x

    with pytest.raises(Exception, match="sparse is for 256 queries, and the call has 512"):
        refused(torch.zeros(1))


def test_blocks_become_lists_inside_of_a_graph():
    def lists(blocks):
        return Sparse.from_block_map(blocks, (64, 128)).tile_lists

    blocks = torch.rand(2, 2, 5, 4) < 0.5
    compiled = torch.compile(lists, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(blocks), lists(blocks))
