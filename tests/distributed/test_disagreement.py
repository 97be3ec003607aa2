"""Ranks that disagree, or of which one is wrong, raise the same message on all; a rank that dies is
an error on the others, in time."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from flash_cute.distributed import ContextParallel, cp_attention
from flash_cute.testing import distributed as cases
from flash_cute.testing.ranks import Raised, Ranks


def call(wrong: str) -> None:
    """A call that is wrong on the second rank alone."""
    is_wrong = dist.get_rank() == 1
    cp = cases.context("all_gather", "contiguous", 1, "cpu")
    lengths = 28 if wrong == "plan" and is_wrong else 24
    plan = cp.plan(lengths, causal=wrong == "mask of plan" and is_wrong)
    heads = 6 if wrong == "heads" and is_wrong else 4
    dtype = torch.float64 if wrong == "dtype" and is_wrong else torch.float32
    rows = plan.rows(cp.rank) - (wrong == "rows" and is_wrong)
    q = torch.randn(1, rows, heads, 8, dtype=dtype)
    k = torch.randn(1, rows, 4 if heads == 4 else 2, 8, dtype=dtype)
    q.requires_grad_(wrong == "grad" and is_wrong)
    cp_attention(
        q, k, k, plan, softcap=2.0 if wrong == "softcap" and is_wrong else 0.0,
        window_size=(3, 1) if wrong == "window" and is_wrong else None,
        dropout_p=0.1 if wrong == "dropout" and is_wrong else 0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ("plan", "ValueError", "ranks differ: rank 0 has plan .*; rank 1 has plan "),
        ("mask of plan", "ValueError", "ranks differ"),
        ("heads", "ValueError", r"rank 1 has cp_attention of q \[1, -1, 6, 8\]"),
        ("dtype", "ValueError", "torch.float64"),
        ("rows", "ValueError", "rank 1: q has shape .*by the plan this rank has 12 of 24"),
        ("grad", "ValueError", "with grad"),
        ("softcap", "ValueError", "softcap 2.0"),
        ("window", "ValueError", r"window_size \(3, 1\)"),
        ("dropout", "NotImplementedError", "rank 1: dropout_p is 0.1.*ulysses"),
    ],
)
def test_all_ranks_raise_the_same(two, wrong, kind, words):
    outcomes = two.outcomes(call, wrong)
    assert all(isinstance(outcome, Raised) for outcome in outcomes)
    assert {outcome.kind for outcome in outcomes} == {kind}
    first, second = outcomes
    assert first.message == second.message
    with pytest.raises(ValueError, match=words):
        raise ValueError(first.message)


def fine() -> int:
    call("nothing")
    return dist.get_rank()


def test_ranks_go_on_afterwards(two):
    assert isinstance(two.outcomes(call, "dtype")[0], Raised)
    assert two.run(fine) == [0, 1]


def alone_after_equal_calls(strategy: str) -> None:
    """Calls that were equal before are asked about again: the second rank makes another one, and
    in "local" of a window so short that nothing is communicated."""
    cp = cases.context("ring" if strategy == "local" else strategy, "contiguous", 1, "cpu")
    window = (0, 0) if strategy == "local" else (-1, -1)
    plan = cp.plan(24, window_size=window)
    q = torch.randn(1, plan.rows(cp.rank), 4, 8)
    for _ in range(3):
        cp_attention(q, q, q, plan)
    cp_attention(q, q, q, plan, softcap=2.0 if cp.rank == 1 else 0.0)


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses", "local"])
def test_a_rank_that_differs_alone_is_found_after_equal_calls(two, strategy):
    first, second = two.outcomes(alone_after_equal_calls, strategy)
    assert isinstance(first, Raised) and first.kind == second.kind == "ValueError"
    assert first.message == second.message and "softcap 2.0" in first.message
    assert two.run(fine) == [0, 1]


def die_in_the_middle(strategy: str) -> float:
    """The last rank ends after a call that went well; seconds until the others know."""
    cp = cases.context(strategy, "contiguous", 1, "cpu")
    plan = cp.plan(24)
    q = torch.randn(1, plan.rows(cp.rank), 12, 8)
    cp_attention(q, q, q, plan)
    if cp.rank == cp.size - 1:
        os._exit(1)
    start = time.perf_counter()
    try:
        cp_attention(q, q, q, plan)
    except RuntimeError:
        return time.perf_counter() - start
    raise AssertionError("a rank is gone, and nobody noticed")


@pytest.mark.parametrize("strategy", ["ring"])
def test_a_rank_that_dies_is_an_error_in_time(strategy):
    with Ranks(3, seconds=10.0) as ranks:
        *others, gone = ranks.outcomes(die_in_the_middle, strategy)
    assert isinstance(gone, Raised) and gone.kind == "EOFError"
    assert all(isinstance(x, float) and x < 20 for x in others), others


def test_one_process_says_what_is_wrong():
    cp = ContextParallel()
    plan = cp.plan(8)
    q = torch.randn(1, 8, 2, 4)
    for wrong, error, words in (
        (lambda: ContextParallel(strategy="rings"), ValueError, "strategy is 'rings'; supported"),
        (lambda: ContextParallel(layout="striped"), ValueError, "layout is 'striped'; supported"),
        (lambda: ContextParallel(strategy="two_dimensional"), ValueError, "two dimensions"),
        (lambda: cp.plan(), ValueError, "give seqlen"),
        (lambda: cp.plan(8, cu_seqlens=[0, 8]), ValueError, "give seqlen"),
        (lambda: cp.plan(0), ValueError, "no tokens"),
        (lambda: cp.plan(cu_seqlens=[1, 8]), ValueError, "ascending offsets from 0"),
        (lambda: cp.plan(8, window_size=(-2, 0)), ValueError, "window_size"),
        (lambda: cp.plan(8, sizes=[4]), ValueError, "sizes is"),
        (lambda: cp.shard(q, plan, dim=2), ValueError, "tokens in dim 2; the plan is of 8"),
        (lambda: cp.unshard(q, plan, dim=2), ValueError, "the rank has 8"),
        (lambda: plan.shift_labels(torch.zeros(1, 7)), ValueError, "the plan is of 8"),
        (lambda: cp_attention(q, q, q, "plan"), TypeError, "plan is str"),
        (lambda: cp_attention(q[0], q, q, plan), ValueError, "q has shape"),
        (lambda: cp_attention(q, q, None, plan), TypeError, "v is NoneType"),
        (lambda: cp_attention(q, q, q, plan, softcap=-1), ValueError, "softcap"),
    ):
        with pytest.raises(error, match=words):
            wrong()
