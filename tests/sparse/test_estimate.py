"""Where estimates say that attention goes, and where it goes."""

from __future__ import annotations

import math

import planted
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute.sparse import estimate
from flash_cute.sparse.choose import choose_by_mass
from flash_cute.sparse.estimate import STRIDES, block_mass, estimated_mass
from flash_cute.sparse.grid import BlockGrid

# Captured at a fifth of the blocks, as a share of what the best choice captures.
ENOUGH = {"cluster": 0.76 / 0.777, "needle": 0.36 / 0.464, "slash": 0.98, "sink": 0.98,
          "random": 0.97}  # fmt: skip


@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize("kind", planted.KINDS)
def test_a_fifth_of_the_blocks_captures_what_the_best_fifth_does(kind, stride):
    grid, best, found = BlockGrid(planted.SEQLEN, 128, is_causal=True), 0.0, 0.0
    draws = 32 if kind == "needle" else 3  # the ratio of one draw of needles scatters by 0.05
    for q, k in (planted.draw(kind) for _ in range(draws)):
        true = block_mass(q, k, grid)
        estimated = estimated_mass(q, k, grid, stride=stride)
        best += (true * choose_by_mass(true, grid, 0.8).kept).sum().item() / grid.blocks / draws
        found += (
            (true * choose_by_mass(estimated, grid, 0.8).kept).sum().item() / grid.blocks / draws
        )
    assert found >= ENOUGH[kind] * best
    assert kind != "cluster" or best > 0.7
    assert kind != "needle" or best > 0.3


def mass_in_fp64(q: Tensor, k: Tensor, grid: BlockGrid, lengths: list[int]) -> Tensor:
    """(batch, heads_k, blocks, blocks), score matrix and all."""
    group = q.shape[2] // k.shape[2]
    mass = torch.zeros(len(q), k.shape[2], grid.blocks, grid.blocks, dtype=torch.float64)
    for b, length in enumerate(lengths):
        for h in range(q.shape[2]):
            scores = q[b, :length, h].double() @ k[b, :length, h // group].double().T
            if grid.is_causal:
                hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            shares = (scores / math.sqrt(q.shape[-1])).softmax(-1)
            for i, rows in enumerate(shares.split(grid.block)):
                for j, part in enumerate(rows.split(grid.block, 1)):
                    mass[b, h // group, i, j] += part.sum() / len(rows) / group
    return mass


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, [300, 65, 1]], ids=["whole", "lengths"])
def test_block_mass_is_the_true_one(device, causal, lengths):
    q = torch.randn(3, 300, 4, 32, device=device)
    k = torch.randn(3, 300, 2, 32, device=device)
    grid = BlockGrid(300, 64, causal)
    given = None if lengths is None else torch.tensor(lengths, device=device)
    found = block_mass(q, k, grid, lengths=given).cpu().double()
    expected = mass_in_fp64(q.cpu(), k.cpu(), grid, lengths or [300] * 3)
    visible = grid.visible(torch.device("cpu"), given if given is None else given.cpu())
    found, expected = (x.masked_fill(~visible, 0) for x in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_stride_of_one_is_the_true_mass_and_rows_sum_to_one(device):
    q, k = torch.randn(2, 1, 200, 2, 16, device=device).unbind()
    grid = BlockGrid(200, 64, is_causal=True)
    sums = estimate._mass_of_patches(q, k, grid, 1, 0.25, None)
    torch.testing.assert_close(sums, block_mass(q, k, grid))
    for stride in STRIDES:
        mass = estimated_mass(q, k, grid, stride=stride)
        torch.testing.assert_close(mass.sum(-1), torch.ones_like(mass[..., 0]))
        assert not mass.triu(1).any()


@pytest.mark.parametrize("causal", [False, True])
def test_no_sequences_have_no_shares(device, causal):
    q, k = (torch.randn(0, 200, heads, 16, device=device) for heads in (4, 2))
    grid = BlockGrid(200, 64, causal)
    for lengths in (None, torch.zeros(0, dtype=torch.int32, device=device)):
        for found in (
            estimated_mass(q, k, grid, lengths=lengths),
            block_mass(q, k, grid, lengths=lengths),
        ):
            assert found.shape == (0, 2, 4, 4)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_behind_a_sequence_is_not_looked_at(device, causal):
    q, k = torch.randn(2, 2, 400, 2, 16, device=device).unbind()
    grid = BlockGrid(400, 64, causal)
    lengths = torch.tensor([400, 128], device=device)
    expected = estimated_mass(q, k, grid, lengths=lengths)
    alone = estimated_mass(q[1:, :128], k[1:, :128], BlockGrid(128, 64, causal))
    torch.testing.assert_close(expected[1:, :, :2, :2], alone)
    q[1, 128:] = 1e3
    k[1, 128:] = 1e3
    found = estimated_mass(q, k, grid, lengths=lengths)
    torch.testing.assert_close(found[1, :, :2], expected[1, :, :2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_is_in_fp32_whatever_the_dtype(device, dtype):
    q, k = torch.randn(2, 1, 500, 2, 64, device=device).to(dtype).unbind()
    grid = BlockGrid(500, 64, is_causal=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = estimated_mass(q, k, grid)
    assert found.dtype == torch.float32
    expected = estimated_mass(q.float(), k.float(), grid)
    torch.testing.assert_close(found, expected, rtol=16 * torch.finfo(dtype).eps + 1e-5, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest result of any op."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("causal", [False, True])
def test_scores_are_made_some_rows_at_a_time(monkeypatch, causal):
    q, k = torch.randn(2, 1, 2048, 2, 16).unbind()
    grid = BlockGrid(2048, 64, causal)
    expected = estimated_mass(q, k, grid), block_mass(q, k, grid)
    monkeypatch.setattr(estimate, "_SCORES_AT_ONCE", 1)
    with LargestTensor() as largest:
        found = estimated_mass(q, k, grid), block_mass(q, k, grid)
    assert largest.elements <= 2 * 64 * 2048  # a row of blocks
    torch.testing.assert_close(found, expected)
