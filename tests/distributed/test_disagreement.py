"""Ranks that disagree, or of which one is wrong, raise the same message on all; a rank that dies is
an error on the others, in time."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from flash_cute import reference
from flash_cute.attention import create_ring_attention
from flash_cute.distributed import ContextParallel, Links, cp_attention, description, measure_links
from flash_cute.testing import disagreement
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


def call_in_halves() -> str:
    """Ranks 0 and 1 are a group, and 2 and 3; in each group the ranks' calls differ. Returns the
    error of this rank."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    cp = ContextParallel(halves[rank // 2])
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError) as error:
        cp_attention(q, q, q, cp.plan(8), softcap=float(rank))
    return str(error.value)


def test_an_error_names_only_ranks_of_its_group(four):
    errors = four.run(call_in_halves)
    assert errors[0] == errors[1] != errors[2] == errors[3]
    for text, softcaps in ((errors[0], "01"), (errors[2], "23")):
        first, second = text.split("; rank 1 has ")
        assert f"softcap {softcaps[0]}.0" in first and f"softcap {softcaps[1]}.0" in second


def alone_after_equal_calls(strategy: str) -> None:
    """After three equal calls the second rank makes a different one. In "local" the window is so
    short that attention communicates nothing."""
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


@pytest.mark.parametrize("strategy", disagreement.STRATEGIES)
def test_what_must_agree(two, strategy):
    """All cases of flash_cute.testing.disagreement, which also runs as a module, over NCCL."""
    for case in disagreement.CASES:
        outcomes = two.outcomes(disagreement.one_differs, case, strategy, "cpu")
        assert disagreement.wrong_of(case, outcomes) == "", case
    assert two.run(fine) == [0, 1]


def test_backward_of_one_rank_alone_is_an_error_in_time():
    with Ranks(2, seconds=4.0, method="forkserver") as ranks:
        first, second = ranks.outcomes(disagreement.backward_alone, "ulysses", "cpu")
    assert first < 1 and 3 < second < 12


def backward_against_a_layer_call() -> None:
    """The second rank runs backward of a layer, while the first one makes the next call."""
    torch.manual_seed(0)
    layer = create_ring_attention(16, 2)
    x = torch.randn(1, 5, 16)
    out = layer(x)
    if dist.get_rank() == 1:
        out.sum().backward()
    layer(x)


def test_backward_of_one_rank_while_a_layer_goes_on(two):
    first, second = two.outcomes(backward_against_a_layer_call)
    assert first.kind == "ValueError" and first.message == second.message
    assert "backward of cp_attention" in first.message and "a layer's tokens" in first.message
    assert two.run(fine) == [0, 1]


def lse_in_one_loss(strategy: str) -> float:
    """Only the second rank's loss depends on the LSE. Returns the largest error of gradients."""
    cp = cases.context(strategy, "contiguous", 1, "cpu")
    plan = cp.plan(24)
    torch.manual_seed(0)
    qkv = torch.randn(3, 1, 24, 4, 8, dtype=torch.float64).unbind()
    rows = slice(12 * cp.rank, 12 * cp.rank + 12)
    leaves = [x[:, rows].clone().requires_grad_() for x in qkv]
    out, lse = cp_attention(*leaves, plan, return_lse=True)
    (out.sin().sum() + (lse.sum() if cp.rank == 1 else 0)).backward()
    whole = [x.clone().requires_grad_() for x in qkv]
    true_out, true_lse, *_ = reference.attention(*whole)
    (true_out.sin().sum() + true_lse[:, :, 12:].sum()).backward()
    return max((a.grad - b.grad[:, rows]).abs().max().item()
               for a, b in zip(leaves, whole, strict=True))  # fmt: skip


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_the_lse_in_the_loss_of_one_rank(two, strategy):
    assert max(two.run(lse_in_one_loss, strategy)) < 1e-12


def digest_collisions() -> int:
    """The number of equal digests among tensors that hardly differ."""
    x = torch.tensor([0.25, 0.5, 0.5, 0.25, 1.0, -1.0])
    changed = [x, x[[1, 0, 3, 2, 4, 5]], x[[1, 0, 2, 3, 4, 5]], x.roll(1), x.nextafter(x + 1)]
    changed += [x.double(), x.bfloat16(), torch.cat((x, x[:1]))]
    return len(changed) - len({description.digest(y).item() for y in changed})


def test_digests_differ_after_small_changes_and_swaps(two):
    assert digest_collisions() == 0
    assert description.digest(torch.ones(3)).item() == description.digest(torch.ones(3)).item()


def die_in_the_middle(strategy: str) -> float:
    """The last rank exits after a successful call. Returns the seconds until the others raise."""
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
    with Ranks(3, seconds=10.0, method="forkserver") as ranks:
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
        (lambda: cp.shard(q, plan, dim=5), ValueError, "dim is 5"),
        (lambda: cp.shard(q, plan, dim=True), ValueError, "dim is True"),
        (lambda: cp.unshard(None, plan), TypeError, "x is NoneType"),
        (lambda: cp.shard(q, "plan"), TypeError, "plan is str"),
        (lambda: plan.rows(-1), ValueError, "rank is -1; expected one of 1"),
        (lambda: plan.position_ids(1), ValueError, "rank is 1; expected one of 1"),
        (lambda: ContextParallel(head_groups=-1), ValueError, "head_groups is -1"),
        (lambda: ContextParallel(head_groups=0), ValueError, "head_groups is 0"),
        (lambda: ContextParallel(head_groups=True), TypeError, "head_groups is bool"),
        (lambda: ContextParallel(head_groups=1.5), TypeError, "head_groups is float"),
        (lambda: ContextParallel(check=1), TypeError, "check is int"),
        (lambda: ContextParallel(timeout=3), TypeError, "timeout is int"),
        (lambda: ContextParallel(timeout=timedelta(0)), ValueError, "timeout is 0:00:00"),
        (lambda: ContextParallel(links=(1, 2, 3)), TypeError, "links is tuple"),
        (lambda: ContextParallel("cp"), TypeError, "ranks is str"),
        (lambda: ContextParallel(-100), TypeError, "ranks is int"),
        (lambda: Links(gb_s=0), ValueError, "gb_s is 0"),
        (lambda: Links(tflops=float("nan")), ValueError, "tflops is nan"),
        (lambda: Links(memory_gb_s="3"), TypeError, "memory_gb_s is str"),
        (lambda: measure_links(megabytes=float("inf")), ValueError, "megabytes is inf"),
        (lambda: measure_links(megabytes=float("nan")), ValueError, "megabytes is nan"),
        (lambda: measure_links(rounds=2.0), TypeError, "rounds is float"),
        (lambda: measure_links(rounds=True), TypeError, "rounds is bool"),
        (lambda: cp.plan(8.0), TypeError, "seqlen is float"),
        (lambda: cp.plan(True), TypeError, "seqlen is bool"),
        (lambda: cp.plan(cu_seqlens=[0, 3.5, 8]), TypeError, "cu_seqlens has entries of float"),
        (lambda: cp.plan(cu_seqlens=[0, True]), TypeError, "cu_seqlens has entries of bool"),
        (lambda: cp.plan(cu_seqlens=torch.tensor([0.0, 8.0])), TypeError, "entries of float"),
        (lambda: cp.plan(8, block=0), ValueError, "block is 0"),
        (lambda: cp.plan(8, block=2.0), TypeError, "block is float"),
        (lambda: cp.plan(8, sizes=[8.0]), TypeError, "sizes' entries is float"),
        (lambda: cp.plan(8, sizes=[-8]), ValueError, "sizes' entries is -8"),
        (lambda: cp.plan(8, heads=0), ValueError, "heads is 0"),
        (lambda: cp.plan(8, heads=4, heads_k=3), ValueError, "heads is 4 and heads_k 3"),
        (lambda: cp.plan(8, heads_k=3), ValueError, "heads_k is 3 without heads"),
        (lambda: cp.plan(8, head_dim=-1), ValueError, "head_dim is -1"),
        (lambda: cp.plan(8, dtype="bf16"), TypeError, "dtype is str"),
        (lambda: cp_attention(q, q, q, plan, return_lse="no"), TypeError, "return_lse is str"),
        (lambda: cp_attention(q, q, q, plan, rng=1), TypeError, "rng is int"),
        (lambda: cp_attention(q, q, q, plan, generator=1), TypeError, "generator is int"),
        (lambda: cp_attention(q, q, q, "plan"), TypeError, "plan is str"),
        (lambda: cp_attention(q[0], q, q, plan), ValueError, "q has shape"),
        (lambda: cp_attention(q, q, None, plan), TypeError, "v is NoneType"),
        (lambda: cp_attention(q, q, q, plan, softcap=-1), ValueError, "softcap"),
    ):
        with pytest.raises(error, match=words):
            wrong()
