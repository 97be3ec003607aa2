"""cp_attention of 1 to 4 processes is attention of one, in fp64, whatever the options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import flash_cute
from flash_cute.distributed import ContextParallel, cp_attention
from flash_cute.testing import distributed as cases
from flash_cute.testing.ranks import Ranks

FEW = cases.cases()
PLAIN = cases.Case(
    "all_gather", "zigzag", (24,), (-1, 0), 4, "", 0.0, False, 0.0, 1, False, False
)  # fmt: skip


def failures(ranks: Ranks, some: list[cases.Case], seed: int) -> list[str]:
    return [
        f"rank {rank}: {failure}"
        for rank, (failed, _) in enumerate(ranks.run(cases.check_all, some, "cpu", seed))
        for failure in failed
    ]


def test_pairs_of_options(ranks):
    assert failures(ranks, FEW, torch.randint(2**30, ()).item()) == []


def test_one_process():
    """Without torch.distributed."""
    for strategy in ("all_gather", "ring", "ulysses"):
        cp = ContextParallel(strategy=strategy)
        plan = cp.plan(29, window_size=(7, 3))
        case = replace(PLAIN, strategy=strategy, documents=(29,), window=(7, 3), sink=True)
        made = cases.inputs(case, 0)
        found, true = cases.shared(case, cp, plan, made), cases.expected(case, made)
        for name, x in true.items():
            bound = cases.BOUND_OF_DSINK if name == "dsink" else 1e-10
            assert cases.error(found[name], x) < bound


def mask_of_call() -> tuple[float, float]:
    """The plan's mask, and one that the call gives."""
    cp = cases.context("ring", "zigzag", 1, "cpu")
    plan = cp.plan(24, causal=True)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 24, 4, 8, dtype=torch.float64).unbind()
    mine = [cp.shard(x, plan) for x in (q, k, v)]
    errors = []
    for given, same in (({}, {"causal": True}), ({"window_size": (3, 0)}, {"window_size": (3, 0)})):
        out = cp.unshard(cp_attention(*mine, plan, **given), plan)
        errors.append((out - flash_cute.flash_attn_func(q, k, v, **same)).abs().max().item())
    return errors[0], errors[1]


def test_the_mask_of_a_call_is_its_own_or_the_plan_s(two):
    for errors in two.run(mask_of_call):
        assert max(errors) < 1e-12


def half_precision(dtype: torch.dtype) -> list[tuple[str, str, float]]:
    """Errors of ranks against fp64, divided by those of one process."""
    results = []
    for strategy, documents, heads_k, window in (
        ("all_gather", (150,), 4, (-1, 0)),
        ("all_gather", (60, 0, 90, 30), 12, (-1, 0)),
        ("ring", (150,), 4, (-1, 0)),
        ("ring", (150,), 4, (-1, -1)),
        ("ulysses", (150,), 4, (-1, 0)),
        ("ulysses", (150,), 1, (-1, 0)),  # each of the ranks has a copy of its kv head
        ("ulysses", (60, 0, 90, 30), 2, (40, 0)),
        ("two_dimensional", (150,), 4, (-1, 0)),
        ("two_dimensional", (150,), 1, (-1, 0)),
    ):
        case = replace(
            PLAIN, strategy=strategy, documents=documents, heads_k=heads_k, window=window,
            of_lse=True, sink=documents != (150,),
        )  # fmt: skip
        cp = cases.context(strategy, "zigzag", 2, "cpu")
        plan, made = cases.plan_of_case(case, cp, 4), cases.inputs(case, 3, (16, 16))
        ratios = cases.ratios(case, cp, plan, made, dtype)
        results += [(f"{case}", name, x) for name, x in ratios.items()]
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_accurate_as_one_process(four, dtype):
    """Gradients are rounded once, after they were added up. Where out of several calls is merged
    each of these is rounded, too: twice the square of the error at most."""
    for case, name, ratio in four.run(half_precision, dtype)[0]:
        merges = name == "out" and ("ring" in case or "two_dim" in case)
        assert ratio <= (1.45 if merges else 1.06), (case, name)


def dropped(ranks_given: int) -> torch.Tensor:
    cp = cases.context("ulysses", "contiguous", 1, "cpu")
    assert cp.size == ranks_given
    plan = cp.plan(40, causal=True)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 40, 12, 8).unbind()
    torch.manual_seed(cp.rank)  # the first rank's state is everybody's
    mine = [cp.shard(x, plan) for x in (q, k, v)]
    return cp.unshard(cp_attention(*mine, plan, dropout_p=0.4), plan)


def test_dropout_does_not_depend_on_the_number_of_ranks(two, three, four):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 40, 12, 8).unbind()
    torch.manual_seed(0)
    expected = flash_cute.flash_attn_func(q, k, v, causal=True, dropout_p=0.4)
    for ranks, count in ((two, 2), (three, 3), (four, 4)):
        for out in ranks.run(dropped, count):
            torch.testing.assert_close(out, expected)


def repeated() -> bool:
    """Two calls with deterministic sums, bit for bit."""
    case = replace(PLAIN, strategy="ring", deterministic=True, documents=(90,))
    cp = cases.context("ring", "zigzag", 1, "cpu")
    plan = cp.plan(90, causal=True)
    made = {n: x.float() for n, x in cases.inputs(case, 0).items()}
    first, second = (cases.shared(case, cp, plan, made) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_repeats_are_equal_bit_for_bit(four):
    assert all(four.run(repeated))


def parts_of_uneven_sizes() -> float:
    """A batch that is shared out already: 5 tokens on the first rank, 20 on the second."""
    cp = cases.context("all_gather", "contiguous", 1, "cpu")
    plan = cp.plan_of_parts(5 if cp.rank == 0 else 20, causal=True)
    assert plan.sizes == (5, 20)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 25, 4, 8, dtype=torch.float64).unbind()
    rows = slice(0, 5) if cp.rank == 0 else slice(5, 25)
    out = cp_attention(q[:, rows], k[:, rows], v[:, rows], plan)
    expected = flash_cute.flash_attn_func(q, k, v, causal=True)[:, rows]
    return (out - expected).abs().max().item()


def test_parts_of_uneven_sizes(two):
    assert max(two.run(parts_of_uneven_sizes)) < 1e-12


def of_several_groups() -> float:
    """Two groups of two ranks, each with a batch of its own, as of data parallelism."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], strategy="ring")
    assert (cp.size, cp.rank) == (2, dist.get_rank() % 2)
    torch.manual_seed(dist.get_rank() // 2)
    seqlen = 20 + 4 * (dist.get_rank() // 2)
    q, k, v = torch.randn(3, 1, seqlen, 4, 8, dtype=torch.float64).unbind()
    plan = cp.plan(seqlen, causal=True)
    out = cp.unshard(cp_attention(*(cp.shard(x, plan) for x in (q, k, v)), plan), plan)
    return (out - flash_cute.flash_attn_func(q, k, v, causal=True)).abs().max().item()


def test_independent_groups_at_the_same_time(four):
    assert max(four.run(of_several_groups)) < 1e-12
