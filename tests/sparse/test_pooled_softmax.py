"""The op behind estimates and true masses, against fp64."""

from __future__ import annotations

import pytest
import torch
import vmap_calls
from torch import Tensor

pooled_softmax = torch.ops.flash_cute.pooled_softmax


def expected(scores: Tensor, seen: Tensor, scale: float, queries: int, keys: int) -> Tensor:
    """By a loop over rows."""
    batch, heads, group, rows, columns = scores.shape
    result = torch.zeros(batch, heads, rows // queries, columns // keys, dtype=torch.float64)
    seen = seen.expand(batch, -1)
    for b in range(batch):
        taking_part = (seen[b] > 0).unflatten(0, (-1, queries)).sum(-1).clamp(min=1)
        for row in range(rows):
            some = int(seen[b, row])
            shares = torch.zeros(heads, group, columns, dtype=torch.float64)
            shares[..., :some] = (scale * scores[b, :, :, row, :some].double()).softmax(-1)
            of_blocks = shares.unflatten(-1, (-1, keys)).sum((1, 3))
            result[b, :, row // queries] += of_blocks / group / taking_part[row // queries]
    return result


# batch, heads, group, blocks, queries, blocks of keys, keys
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 2, 3, 4, 5, 8),
    (1, 2, 3, 2, 16, 70, 3),
    (2, 1, 40, 2, 8, 300, 4),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("is_shared", [False, True], ids=["of_batch", "shared"])
def test_is_that_of_fp64(device, sizes, is_shared):
    batch, heads, group, blocks, queries, blocks_k, keys = sizes
    scores = 3 * torch.randn(batch, heads, group, blocks * queries, blocks_k * keys, device=device)
    shape = (1 if is_shared else batch, blocks * queries)
    seen = torch.randint(0, blocks_k * keys + 1, shape, device=device, dtype=torch.int32)
    seen[:, 0] = blocks_k * keys
    scores[..., 0, :] *= 30  # far apart
    for scale in (0.3, -1.0):
        found = pooled_softmax(scores, seen, scale, queries, keys)
        right = expected(scores.cpu(), seen.cpu(), scale, queries, keys)
        torch.testing.assert_close(found.cpu().double(), right, rtol=1e-4, atol=1e-6)
        assert torch.equal(found, pooled_softmax(scores, seen, scale, queries, keys))


def test_what_no_row_sees_is_not_looked_at(device):
    scores = torch.randn(1, 1, 2, 8, 16, device=device)
    seen = torch.tensor([[3, 16, 0, 1, 0, 0, 0, 0]], dtype=torch.int32, device=device)
    clean = pooled_softmax(scores, seen, 1.0, 4, 4)
    hidden = torch.arange(16, device=device) >= seen[..., None]
    assert torch.equal(
        pooled_softmax(scores.masked_fill(hidden, torch.nan), seen, 1.0, 4, 4), clean
    )
    assert not clean[:, :, 1].any()
    torch.testing.assert_close(clean[:, :, 0].sum(-1), torch.ones(1, 1, device=device))


@pytest.mark.parametrize("size", [1e3, 1e6, 1e10])
def test_rows_of_large_scores_sum_to_one(device, size):
    scores = size * torch.randn(1, 2, 2, 16, 64, device=device)
    scores[..., 1::2] = scores[..., ::2]  # pairs of equal ones share
    seen = torch.full((1, 16), 64, dtype=torch.int32, device=device)
    sums = pooled_softmax(scores, seen, 0.088, 4, 8).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_nan_reaches_its_block_of_queries_alone(device):
    scores = torch.randn(1, 1, 1, 8, 16, device=device)
    scores[..., 1, 5] = torch.nan
    seen = torch.full((1, 8), 16, dtype=torch.int32, device=device)
    found = pooled_softmax(scores, seen, 1.0, 4, 4)
    assert found[:, :, 0].isnan().all()
    assert found[:, :, 1].isfinite().all()


def test_empty_and_traced(device):
    seen = torch.zeros(1, 8, dtype=torch.int32, device=device)
    assert pooled_softmax(seen.new_zeros(0, 2, 1, 8, 16).float(), seen, 1.0, 4, 8).shape == (
        0,
        2,
        2,
        2,
    )
    scores = torch.randn(2, 3, 1, 8, 16, device=device)
    torch.library.opcheck(pooled_softmax.default, (scores, seen + 16, 0.5, 4, 8))


@pytest.mark.parametrize("is_shared", [False, True], ids=["of_batch", "shared"])
@pytest.mark.parametrize(
    "mapped", [{"scores": 0}, {"seen": 1}, {"scores": 3, "seen": 0}], ids=lambda x: "_".join(x)
)
def test_samples_of_vmap_are_one_call(device, mapped, is_shared):
    def of(name: str, x: Tensor) -> Tensor:
        return x.movedim(0, mapped[name]) if name in mapped else x[0].contiguous()

    scores = torch.randn(vmap_calls.SAMPLES, 2, 3, 1, 8, 16, device=device)
    shape = (vmap_calls.SAMPLES, 1 if is_shared else 2, 8)
    seen = torch.randint(0, 17, shape, device=device, dtype=torch.int32)
    given = {"scores": of("scores", scores), "seen": of("seen", seen)}
    vmap_calls.check(
        lambda **x: (pooled_softmax(**x, scale=0.5, queries=4, keys=4),), given, mapped
    )


def test_vmap_of_no_samples(device):
    scores = torch.randn(0, 2, 3, 1, 8, 16, device=device)
    seen = torch.full((1, 8), 16, dtype=torch.int32, device=device)
    found = torch.vmap(lambda x: pooled_softmax(x, seen, 1.0, 4, 4))(scores)
    assert found.shape == (0, 2, 3, 2, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(1, 1, 8, 16)}, "scores"),
        ({"scores": torch.zeros(1, 1, 1, 8, 16, dtype=torch.float64)}, "scores"),
        ({"queries": 3}, "queries"),
        ({"queries": 0}, "queries"),
        ({"keys": 5}, "keys"),
        ({"keys": -1}, "keys"),
        ({"seen": torch.zeros(1, 7, dtype=torch.int32)}, "seen"),
        ({"seen": torch.zeros(2, 8, dtype=torch.int32)}, "seen"),
        ({"seen": torch.zeros(1, 8, dtype=torch.int64)}, "seen"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(device, change, message):
    given = {
        "scores": torch.zeros(1, 1, 1, 8, 16),
        "seen": torch.zeros(1, 8, dtype=torch.int32),
        "scale": 1.0,
        "queries": 4,
        "keys": 4,
    }
    given |= change
    given = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}
    with pytest.raises((RuntimeError, ValueError), match=message):
        pooled_softmax(**given)
