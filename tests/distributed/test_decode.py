"""cp_decode over caches of 1 to 4 ranks is attention of one process over all keys, in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_cute import flash_attn_with_kvcache, reference
from flash_cute.distributed import ContextParallel, cp_decode

BATCH, DIM, DIM_V, CAPACITY = 3, 8, 6, 12
MASKS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"window_size": (4, -1)}, {"window_size": (9, 0)},
    {"window_size": (2, 1)},
)  # fmt: skip


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def caches(paged: bool, heads_k: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of a rank, whose unused rows are NaN; pages of 4 tokens in any order."""
    if not paged:
        shape, place = (BATCH + 1, CAPACITY), {"cache_batch_idx": torch.tensor([2, 0, 3])}
    else:
        pages = torch.randperm(BATCH * CAPACITY // 4).view(BATCH, -1)
        shape, place = (pages.numel(), 4), {"block_table": pages}
    k, v = (torch.full((*shape, heads_k, d), torch.nan).double() for d in (DIM, DIM_V))
    return k, v, {name: x.to(torch.int32) for name, x in place.items()}


def expected(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Of each sequence's first ``lengths`` keys, by the reference; ALiBi's slopes of each."""
    outs, lses = [], []
    slopes = options.get("alibi_slopes")
    left, right = options.get("window_size", (-1, -1))
    rest = {n: x for n, x in options.items() if n not in ("causal", "window_size")}
    for b, n in enumerate(lengths):
        mine = rest | {
            "is_causal": options.get("causal", False),
            "window_size_left": left,
            "window_size_right": right,
        }
        if slopes is not None and slopes.dim() == 2:
            mine["alibi_slopes"] = slopes[b : b + 1]
        out, lse, *_ = reference.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], **mine)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def worst_error(seed: int) -> tuple[float, int]:
    """A prompt, then steps: over masks, heads, pages and blocks."""
    torch.manual_seed(seed)
    cp, error, count = ContextParallel(), 0.0, 0
    room = cp.size * CAPACITY
    for (i, options), seqlen, heads_k, paged in itertools.product(
        enumerate(MASKS), (1, 3), (4, 1), (False, True)
    ):
        block = (None, 1, 3)[count % 3]
        q, k, v = randn(BATCH, seqlen, 4, DIM), randn(BATCH, room, heads_k, DIM), randn(
            BATCH, room, heads_k, DIM_V)  # fmt: skip
        given = dict(options)
        if count % 2:
            given |= {"softcap": 1.5, "softmax_scale": 0.4}
        if i % 2:
            given["sink"] = randn(4)
        if block is None and (seqlen == 1 or options in (MASKS[1], MASKS[3])):
            given["alibi_slopes"] = torch.rand((4,) if paged else (BATCH, 4))
        k_cache, v_cache, place = caches(paged, heads_k)
        done = [0, 5 % room, room - seqlen - 2]  # before the step: most ranks hold nothing of some
        prompt = torch.zeros(BATCH, dtype=torch.int32)
        for b, n in enumerate(done):  # sequences have prompts of their own lengths
            alone = dict(place)
            if paged:
                alone["block_table"] = place["block_table"][b : b + 1]
            else:
                alone["cache_batch_idx"] = place["cache_batch_idx"][b : b + 1]
            cp_decode(
                q[b : b + 1, :1], k_cache, v_cache, cp, k[b : b + 1, :n], v[b : b + 1, :n],
                cache_seqlens=prompt[b : b + 1], **alone, block=block,
            )  # fmt: skip
        for step in range(1 + (count % 8 == 0)):
            lengths = torch.tensor(done, dtype=torch.int32) + step
            new = [torch.stack([x[b, n : n + 1] for b, n in enumerate(lengths.tolist())])
                   for x in (k, v)]  # fmt: skip
            out, lse = cp_decode(
                q, k_cache, v_cache, cp, *new, lengths, **place, **given, block=block,
                return_softmax_lse=True,
            )  # fmt: skip
            true = expected(q, k, v, (lengths + 1).tolist(), given)
            for x, y in zip((out, lse), true, strict=True):
                assert torch.equal(x == -torch.inf, y == -torch.inf), (given, block)
                x, y = (z.masked_fill(z == -torch.inf, 0) for z in (x, y))
                error = max(error, (x - y).abs().max().item())
        used = cp_decode(q, k_cache, v_cache, cp, None, None, lengths + 1, **place, **given,
                         block=block)  # fmt: skip
        error = max(error, (used - true[0]).abs().max().item())
        count += 1
    return error, count


def test_one_process():
    error, count = worst_error(0)
    assert error < 1e-10 and count == 40


def test_ranks_equal_one_process(ranks):
    for error, count in ranks.run(worst_error, torch.randint(2**30, ()).item()):
        assert error < 1e-10 and count == 40


def refused(change: str) -> str:
    """The error of a call that the last rank changes; the caches must not be written."""
    cp = ContextParallel()
    q, k = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    k_cache, v_cache = torch.zeros(2, 2, 6, 2, 8).unbind()
    given: dict[str, Any] = {"cache_seqlens": torch.tensor([3, 7], dtype=torch.int32)}
    if cp.rank == cp.size - 1:
        if change == "heads":
            q = torch.randn(2, 1, 3, 8)
        elif change == "dtype":
            k_cache, v_cache = k_cache.half(), v_cache.half()
        elif change == "q":
            q = None
        elif change == "capacity":
            k_cache, v_cache = (x[:, :5] for x in (k_cache, v_cache))
        elif change == "queries with alibi":
            q, given["alibi_slopes"] = torch.randn(2, 3, 4, 8), torch.rand(4)
        else:
            given |= eval(change)
    errors = (TypeError, ValueError, NotImplementedError, RuntimeError)
    with pytest.raises(errors) as raised:
        cp_decode(q, k_cache, v_cache, cp, k, k, **given)
    assert not k_cache.any() and not v_cache.any()
    return str(raised.value)


@pytest.mark.parametrize(
    "change, words",
    [
        ("heads", "heads"),
        ("q", "rank 1: q is NoneType"),
        ("dtype", "dtype"),
        ("capacity", "ranks differ"),
        ("{'block': 0}", "block is 0"),
        ("{'block': 2}", "ranks differ"),
        ("{'block': True}", "block is bool"),
        ("{'block': 1.5}", "block is float"),
        ("{'cache_seqlens': torch.tensor([3, 6], dtype=torch.int32)}", "cache_seqlens [2]"),
        ("{'sink': torch.ones(4)}", "sink [4]"),
        ("{'sink': torch.ones(4, requires_grad=True)}", "rank 1: sink requires grad"),
        ("{'cache_seqlens': 12}", "have room for 6 each"),
        ("{'cache_seqlens': None}", "expected the tokens on all ranks before k is appended"),
        ("{'softcap': -1.0}", "softcap"),
        ("{'return_softmax_lse': None}", "return_softmax_lse is NoneType"),
        ("{'return_softmax_lse': '8'}", "return_softmax_lse is str"),
        ("{'block': 2, 'alibi_slopes': torch.rand(4)}", "alibi_slopes are given and block is 2"),
        ("queries with alibi", "3 queries that see later tokens; give causal=True"),
    ],
)
def test_all_ranks_raise_the_same_and_write_nothing(two, change, words):
    first, second = two.run(refused, change)
    assert first == second and words in first


def prompts_with_windows(ranks_block: int | None) -> float:
    """One query after a prompt that is longer than its window, and a short prompt's queries."""
    torch.manual_seed(0)
    cp, error = ContextParallel(), 0.0
    q, k, v = randn(2, 3, 4, DIM), randn(2, 100, 2, DIM), randn(2, 100, 2, DIM_V)
    for window, seqlen in itertools.product(((20, 0), (0, 0), (7, -1), (98, 0), (200, 0)), (1, 3)):
        k_cache, v_cache = randn(2, 100, 2, DIM), randn(2, 100, 2, DIM_V)
        out = cp_decode(
            q[:, :seqlen], k_cache, v_cache, cp, k, v, window_size=window, block=ranks_block
        )
        true = expected(q[:, :seqlen], k, v, [100, 100], {"window_size": window})[0]
        error = max(error, (out - true).abs().max().item())
    return error


def test_prompts_longer_than_their_window(two):
    assert prompts_with_windows(None) < 1e-12
    assert max(two.run(prompts_with_windows, 16) + two.run(prompts_with_windows, None)) < 1e-12


def full_caches(capacity: int, block: int) -> float:
    """As many tokens as all ranks have room for, half of them a prompt, the rest one by one."""
    torch.manual_seed(0)
    cp = ContextParallel()
    total = cp.size * capacity
    q, k, v = randn(1, 1, 4, DIM), randn(1, total, 2, DIM), randn(1, total, 2, DIM_V)
    k_cache, v_cache = randn(1, capacity, 2, DIM), randn(1, capacity, 2, DIM_V)
    done, error = total // 2, 0.0
    cp_decode(q, k_cache, v_cache, cp, k[:, :done], v[:, :done], block=block)
    for n in range(done, total):
        out = cp_decode(q, k_cache, v_cache, cp, k[:, n : n + 1], v[:, n : n + 1], n, block=block)
        error = max(error, (out - expected(q, k, v, [n + 1], {})[0]).abs().max().item())
    return error


@pytest.mark.parametrize("capacity, block", [(4, 3), (7, 2), (5, 4), (3, 8)])
def test_blocks_that_do_not_divide_the_capacity(three, capacity, block):
    assert max(three.run(full_caches, capacity, block)) < 1e-12


def low_precision() -> tuple[float, float]:
    """Errors of ranks and of one process in bf16, against fp64."""
    torch.manual_seed(0)
    cp = ContextParallel()
    q, k, v = (torch.randn(2, n, h, 64).bfloat16() for n, h in ((1, 8), (200, 2), (200, 2)))
    k_cache, v_cache = torch.zeros(2, 2, 64, 2, 64, dtype=torch.bfloat16).unbind()
    out = cp_decode(q, k_cache, v_cache, cp, k, v, block=16)
    true = reference.attention(q, k, v).out
    one = flash_attn_with_kvcache(q, k, v)
    return tuple(((x - true).norm() / true.norm()).item() for x in (out, one))  # type: ignore


def test_bf16_is_merged_in_fp32(four):
    """Each rank's part is rounded once, and the sum: at most 1.41 times one rounding."""
    for ours, one in four.run(low_precision):
        assert ours <= 1.45 * one


def test_wants_a_context():
    with pytest.raises(TypeError, match="cp is NoneType"):
        cp_decode(torch.zeros(1, 1, 4, 8), *torch.zeros(2, 1, 5, 2, 8).unbind(), None)


@pytest.mark.parametrize("seqlen", [1, 3])
def test_one_gpu(cuda, seqlen):
    """A rank alone is flash_attn_with_kvcache, appends and windows included."""
    kind = {"device": cuda, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(2, n, h, 64, **kind) for n, h in ((seqlen, 8), (3, 2), (3, 2)))
    lengths = torch.tensor([70, 5], dtype=torch.int32, device=cuda)
    caches = torch.randn(2, 2, 96, 2, 64, **kind)
    same = caches.clone()
    options = {"causal": True, "window_size": (20, -1), "softcap": 5.0}
    out, lse = cp_decode(
        q, *caches, ContextParallel(), k, v, lengths, **options, return_softmax_lse=True, block=16
    )
    expected, true_lse = flash_attn_with_kvcache(
        q, *same, k, v, cache_seqlens=lengths, **options, return_softmax_lse=True
    )
    assert torch.equal(caches, same)
    torch.testing.assert_close(lse, true_lse, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
