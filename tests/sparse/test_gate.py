"""The gate of LEARNED: its loss is what it says, and it learns."""

from __future__ import annotations

import pytest
import torch

from flash_cute.sparse.choose import choose_blocks
from flash_cute.sparse.estimate import block_mass
from flash_cute.sparse.gate import LearnedGate
from flash_cute.sparse.grid import BlockGrid, grid_of


def hidden_keys(seqlen: int = 1024, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block of queries looks for one key of another block, which the mean of keys hides."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, seqlen, heads, 32).unbind()
    blocks = seqlen // 64
    sought = torch.eye(32)[torch.arange(blocks) % 32]
    k[0, torch.arange(blocks) * 64 + 17] += 9 * sought[:, None]
    k[0, torch.arange(blocks) * 64 + 40] -= 9 * sought[:, None]  # the mean is as before
    looks_for = torch.randperm(blocks).repeat_interleave(64)
    return q + 8 * sought[looks_for][None, :, None], k


def test_untrained_it_takes_products_of_means(device):
    q, k = torch.randn(2, 2, 256, 3, 32, device=device).unbind()
    gate = LearnedGate(3, 3, 32, device=device)
    grid = BlockGrid(256, 64)
    means = (x.unflatten(1, (4, 64)).mean(2).transpose(1, 2) for x in (q, k))
    scores = next(means) @ next(means).mT / 32**0.5
    torch.testing.assert_close(gate(q, k, grid), scores.softmax(-1))


@pytest.mark.parametrize("lengths", [None, [200, 130]], ids=["whole", "lengths"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_loss_is_a_divergence_from_true_attention(device, causal, lengths):
    q = torch.randn(2, 200, 4, 16, device=device)
    k = torch.randn(2, 200, 2, 16, device=device)
    given = None if lengths is None else torch.tensor(lengths, device=device)
    gate, grid = LearnedGate(4, 2, 16, device=device), BlockGrid(200, 64, causal)
    loss = gate.distill_loss(q, k, grid, lengths=given)
    true = block_mass(q, k, grid, lengths=given).double()
    shares = gate(q, k, grid, lengths=given).double()
    rows = []
    for b in range(2):
        blocks = 4 if lengths is None else -(-lengths[b] // 64)
        for h in range(2):
            for i in range(blocks):
                seen = slice(0, i + 1 if causal else blocks)
                p, s = true[b, h, i, seen], shares[b, h, i, seen]
                rows.append((p * (p / s).log()).sum())
    torch.testing.assert_close(loss.double(), torch.stack(rows).mean(), rtol=1e-4, atol=1e-5)
    assert loss > 0


def test_the_loss_has_a_gradient_for_the_gate_alone(device):
    q, k = torch.randn(2, 1, 300, 2, 16, device=device).unbind()
    q, k = q.requires_grad_(), k.requires_grad_()
    gate = LearnedGate(2, 2, 16, device=device)
    lengths = torch.tensor([0], device=device)
    for given in (None, lengths):  # a sequence without tokens, too
        gate.zero_grad()
        gate.distill_loss(q, k, grid_of(300, True), lengths=given).backward()
        assert q.grad is k.grad is None
        for x in gate.parameters():
            assert x.grad is not None and x.grad.isfinite().all()
            assert x.grad.any() == (given is None)


def test_it_learns_what_means_do_not_show():
    q, k = hidden_keys()
    gate, grid = LearnedGate(2, 2, 32), grid_of(1024, False)
    true = block_mass(q, k, grid)

    def chosen() -> torch.Tensor:
        return choose_blocks(q, k, "learned", 0.75, gate=gate).kept

    before = chosen()
    optimizer = torch.optim.Adam(gate.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = gate.distill_loss(q, k, grid)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    captured = [((true * kept).sum() / true.sum()).item() for kept in (before, chosen())]
    assert losses[-1] < 0.5 * losses[0]
    assert captured[1] > captured[0] + 0.1 and not torch.equal(before, chosen())


def test_state_and_low_precision(device):
    gate = LearnedGate(4, 2, 16, device=device, dtype=torch.bfloat16)
    q = torch.randn(1, 200, 4, 16, device=device, dtype=torch.bfloat16)
    k = torch.randn(1, 200, 2, 16, device=device, dtype=torch.bfloat16)
    gate.distill_loss(q, k, grid_of(200, False)).backward()
    assert gate(q, k, grid_of(200, False)).dtype == torch.float32
    assert {name: tuple(x.shape) for name, x in gate.state_dict().items()} == {
        "query_weight": (4, 16, 16), "key_weight": (2, 48, 16),
    }  # fmt: skip
    assert all(x.grad.dtype == torch.bfloat16 for x in gate.parameters())
