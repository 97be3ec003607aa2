"""indexer_topk: the choice that torch.topk makes of all scores, and no more memory than a part."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute import Sparse
from flash_cute.sparse import indexer, indexer_topk


def scores_of(q, k, weights, causal, granularity, local_blocks=0):
    """Scores of all blocks in fp64: (batch, seqlen_q, heads or 1, blocks)."""
    q, k = q.double(), k.double().expand(-1, -1, q.shape[2], -1)
    scores = torch.einsum("bihd,bjhd->bihj", q, k)
    if weights is not None:
        scores = (scores.relu() * weights.double()[..., None]).sum(2, keepdim=True)
    at = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    if causal:
        scores = scores.masked_fill((torch.arange(k.shape[1]) > at)[:, None], -torch.inf)
    parts = [x.amax(-1) for x in scores.split(granularity, -1)]
    blocks = torch.stack(parts, -1)
    for i, own in enumerate(at[:, 0].tolist()):
        for block in range(max(own // granularity - local_blocks + 1, 0), own // granularity + 1):
            if local_blocks:
                blocks[:, i, :, block] = torch.inf
    return blocks


def assert_best(chosen, scores):
    """The same scores, best first, as torch.topk has; each block once; -1 for what is hidden."""
    k = chosen.shape[-1]
    room = torch.full((*scores.shape[:-1], max(k, 0)), -torch.inf).double()
    padded = torch.cat((scores, room), -1)
    expected = padded.topk(k, -1).values
    at = chosen.long().masked_fill(chosen < 0, scores.shape[-1])
    assert torch.equal(padded.gather(-1, at), expected)
    ordered = torch.where(chosen < 0, -1 - torch.arange(k), chosen).sort(-1).values
    assert (ordered.diff(dim=-1) != 0).all()
    assert ((chosen == -1) == (expected == -torch.inf)).all()


def eighths(*shape):
    """Numbers whose products and sums are exact in fp32."""
    return torch.randint(-16, 17, shape) / 8


@pytest.fixture(autouse=True, params=[(2**24, 4096), (2**11, 128)])
def parts(request, monkeypatch):
    monkeypatch.setattr(indexer, "_SCORES_AT_ONCE", request.param[0])
    monkeypatch.setattr(indexer, "_KEYS_AT_ONCE", request.param[1])


@pytest.mark.parametrize("granularity", [1, 8, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlens", [(300, 300), (40, 517), (200, 90)])
@pytest.mark.parametrize("heads_k", [1, 3])
def test_the_best_blocks_of_each_head(granularity, causal, seqlens, heads_k):
    q, k = eighths(2, seqlens[0], 3, 16), eighths(2, seqlens[1], heads_k, 16)
    chosen = indexer_topk(q, k, 5, granularity=granularity, causal=causal)
    assert chosen.shape == (2, seqlens[0], 3, 5) and chosen.dtype == torch.int32
    assert_best(chosen, scores_of(q, k, None, causal, granularity))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_heads_that_choose_together(dtype):
    q, k, weights = eighths(2, 150, 4, 8), eighths(2, 300, 1, 8), eighths(2, 150, 4)
    given = [x.to(dtype) for x in (q, k, weights)]
    chosen = indexer_topk(*given[:2], 7, granularity=16, weights=given[2])
    assert chosen.shape == (2, 150, 1, 7)
    assert_best(chosen, scores_of(q, k, weights, True, 16))


@pytest.mark.parametrize("seqlens", [(300, 300), (70, 300), (300, 70)])
@pytest.mark.parametrize("local_blocks", [1, 2])
def test_local_blocks_come_first(seqlens, local_blocks):
    q, k = eighths(1, seqlens[0], 2, 8), eighths(1, seqlens[1], 1, 8)
    options = {"granularity": 32, "local_blocks": local_blocks}
    chosen = indexer_topk(q, k, 4, **options)
    assert_best(chosen, scores_of(q, k, None, True, 32, local_blocks))


def test_chosen_blocks_make_a_sparse_call():
    chosen = indexer_topk(torch.randn(1, 400, 2, 8), torch.randn(1, 400, 1, 8), 2, local_blocks=1)
    sparse = Sparse.topk(chosen)
    assert sparse.tile_lists.shape[:3] == (1, 2, 4)
    assert sparse.visible_pairs(causal=True) > 0


def test_nothing_to_choose_from():
    assert (indexer_topk(torch.randn(1, 5, 2, 8), torch.randn(1, 0, 1, 8), 3) == -1).all()
    assert indexer_topk(torch.randn(1, 0, 2, 8), torch.randn(1, 7, 1, 8), 3).shape == (1, 0, 2, 3)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.nbytes)
        return result


def test_scores_are_not_stored(monkeypatch):
    monkeypatch.setattr(indexer, "_SCORES_AT_ONCE", 2**16)
    monkeypatch.setattr(indexer, "_KEYS_AT_ONCE", 256)
    q, k = torch.randn(1, 2048, 2, 16), torch.randn(1, 2048, 1, 16)
    with Largest() as largest:
        indexer_topk(q, k, 4, granularity=1)
    assert largest.bytes <= 2**20 < 4 * 2 * 2048**2 / 16


REFUSED = [
    ({"q_idx": torch.ones(1, 4, 2, 8).int()}, TypeError, "q_idx is torch.int32"),
    ({"k_idx": torch.ones(4, 2, 8)}, ValueError, "k_idx has shape"),
    ({"k_idx": torch.ones(1, 4, 3, 8)}, ValueError, "1 head of k_idx or as many"),
    ({"k_idx": torch.ones(1, 4, 1, 9)}, ValueError, "one batch and dim"),
    ({"k_idx": torch.ones(1, 4, 1, 8, device="meta")}, ValueError, "k_idx on meta"),
    ({"weights": torch.ones(1, 4, 1)}, ValueError, "weights have shape"),
    ({"weights": 1.0}, TypeError, "weights is float"),
    ({"k": 0}, ValueError, "k is 0"),
    ({"k": 2.0}, TypeError, "k is 2.0"),
    ({"granularity": 3}, ValueError, "granularity is 3"),
    ({"causal": None}, TypeError, "causal is None"),
    ({"causal": False, "local_blocks": 1}, ValueError, "local_blocks is 1, and causal is False"),
    ({"local_blocks": -1}, ValueError, "local_blocks is -1"),
    ({"local_blocks": 3}, ValueError, "local_blocks is 3, and k 2"),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED)
def test_what_is_refused(given, kind, message):
    right = {"q_idx": torch.ones(1, 4, 2, 8), "k_idx": torch.ones(1, 4, 1, 8), "k": 2}
    with pytest.raises(kind, match=message):
        indexer_topk(**right | given)
