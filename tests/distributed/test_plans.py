"""Plans and contexts: what they print, how long they take, that they die, and how graphs take
them."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import weakref

import fresh
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import flash_cute
from flash_cute.distributed import ContextParallel, Plan, cp_attention, layouts, registry
from flash_cute.distributed.plan import plan_of


def plan_of_ranks(ranks: int, strategy: str, inner: int = 1, **fields: object) -> Plan:
    """One that no process of these ranks made: numbers alone."""
    given = {"lengths": (64,), "packed": False, "layout": "contiguous", "causal": True} | fields
    return Plan(ranks=ranks, strategy=strategy, inner=inner, **given)  # type: ignore[arg-type]


def test_ranks_that_share_heads_have_as_much_work():
    total = 64 * 65 / 2
    assert plan_of_ranks(4, "ulysses", 4).work() == [total / 4] * 4
    assert "the busiest rank has 1.000 of the mean work" in str(plan_of_ranks(4, "ulysses", 4))
    ring = plan_of_ranks(4, "ring")
    assert ring.work() == [sum(range(16 * r + 1, 16 * r + 17)) for r in range(4)]
    first, last = sum(range(1, 33)), sum(range(33, 65))
    two = plan_of_ranks(4, "two_dimensional", 2)
    assert two.work() == [first / 2, first / 2, last / 2, last / 2]
    assert f"the busiest rank has {last / (total / 2):.3f} of the mean work" in str(two)


def seconds(documents: int) -> float:
    """The least of three, of all that a rank plans of as many documents."""
    times = []
    for _ in range(3):
        start = time.process_time()
        plan = plan_of_ranks(8, "ring", layout="per_document", lengths=(64,) * documents,
                             packed=True)  # fmt: skip
        plan.slots(plan.outer_parts, torch.device("cpu"))
        for alibi in (False, True):
            assert plan.launches(plan.outer_parts[1], plan.whole, (-1, 0), alibi)
            assert plan.launches(plan.outer_parts[1], plan.outer_parts[0], (-1, 0), alibi)
        times.append(time.process_time() - start)
    return min(times)


def test_planning_is_near_linear():
    assert seconds(2400) < 8 * 2 * seconds(300)  # quadratic: 64 times as long


def test_slots_are_where_tokens_lie():
    lengths = (7, 0, 12, 1, 9)
    for layout in layouts.LAYOUTS:
        plan = plan_of_ranks(3, "ring", layout=layout, lengths=lengths, packed=True, block=3)
        longest = max(map(layouts.rows, plan.parts))
        places = torch.full((3 * longest,), -1)
        starts = layouts.offsets(lengths)
        for rank, runs in enumerate(plan.parts):
            for run in runs:
                first = rank * longest + run.row
                tokens = starts[run.document] + run.start + torch.arange(run.length)
                places[first : first + run.length] = tokens
        slots = plan.slots(plan.parts, torch.device("cpu"))
        slots = torch.arange(29) if slots is None else slots
        assert torch.equal(places[slots], torch.arange(29))


def test_contexts_and_what_plans_hold_die_with_their_last_user():
    cp = ContextParallel(layout="zigzag")
    plan = cp.plan(24, causal=True)
    q = torch.randn(1, 24, 4, 8)
    cp_attention(q, q, q, plan)
    plan.slots(plan.parts, q.device)
    alive = weakref.ref(cp)
    name = cp.name
    del cp
    gc.collect()
    assert alive() is not None  # its plan is a user
    cp_attention(q, q, q, plan)
    del plan
    gc.collect()
    assert alive() is None and name not in registry._ENTRIES


def backward_after_the_context(strategy: str) -> list[torch.Tensor]:
    cp = ContextParallel(strategy=strategy)
    x = torch.randn(1, 12, 4, 8, requires_grad=True)
    out = cp_attention(x, x, x, cp.plan(12 * cp.size))
    del cp
    gc.collect()
    out.sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_backward_outlives_the_context(two, strategy):
    for out, grad in two.run(backward_after_the_context, strategy):
        assert out.isfinite().all() and grad.isfinite().all() and grad.abs().sum() > 0


def test_copies_of_a_plan_are_equal_and_usable():
    cp = ContextParallel()
    plan = cp.plan(24, causal=True)
    q = torch.randn(1, 24, 4, 8)
    for same in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), plan_of(plan.key)):
        assert same == plan and same.key == plan.key
        assert torch.equal(cp_attention(q, q, q, same), cp_attention(q, q, q, plan))


def groups_of_many_contexts() -> list[int]:
    """How many groups torch.distributed and flash_cute hold, after one context and after ten."""
    counts = []
    for count in (1, 9):
        for _ in range(count):
            cp = ContextParallel(strategy="ring")
            x = torch.randn(1, 6, 2, 8)
            cp_attention(x, x, x, cp.plan(6 * cp.size))
        del cp
        gc.collect()
        counts.append(len(registry._ENTRIES) + sum(map(len, registry._MADE.values())))
    return counts


def test_contexts_of_one_group_share_their_host_group(two):
    for one, ten in two.run(groups_of_many_contexts):
        assert one == ten


# --- in graphs ------------------------------------------------------------------------------------

FIRST = """
import torch
from flash_cute.distributed import ContextParallel, cp_attention

for strategy in ("all_gather", "ulysses"):
    cp = ContextParallel(strategy=strategy)
    plan = cp.plan(24, causal=True)
    q = torch.randn(1, 24, 4, 8)
    compiled = torch.compile(
        lambda q: cp_attention(q, q, q, plan), fullgraph=True, backend="aot_eager"
    )
    out = compiled(q)
    assert torch.equal(out, cp_attention(q, q, q, plan))
"""


def test_a_graph_takes_a_plan_that_no_call_has_used():
    """In a fresh process: nothing was called before."""
    done = fresh.run(FIRST)
    assert done.returncode == 0, done.stderr


def one_function() -> float:
    """Plans of several strategies and lengths, each compiled before any call outside of a graph."""
    torch._dynamo.reset()
    compiled = torch.compile(cp_attention, fullgraph=True, backend="aot_eager")
    contexts = [
        ContextParallel(strategy="ulysses"),
        ContextParallel(init_device_mesh("cpu", (2, 1))),
        ContextParallel(init_device_mesh("cpu", (1, 2))),
        ContextParallel(strategy="ring"),
    ]
    errors = []
    for cp in contexts:
        plan = cp.plan(24, causal=True)
        torch.manual_seed(0)
        q, k = (torch.randn(1, 24, heads, 8, dtype=torch.float64) for heads in (4, 1))
        mine = [cp.shard(x, plan) for x in (q, k, k)]
        out = cp.unshard(compiled(*mine, plan), plan)
        errors.append((out - flash_cute.flash_attn_func(q, k, k, causal=True)).abs().max().item())
    return max(errors)


def test_plans_of_different_kinds_through_one_function(two):
    assert max(two.run(one_function)) < 1e-12


def refused_in_a_graph() -> str:
    torch._dynamo.reset()
    cp = ContextParallel(strategy="ring")
    plan = cp.plan(24)
    x = torch.randn(1, 12, 4, 8)
    rng = torch.zeros(2, dtype=torch.int64)
    compiled = torch.compile(cp_attention, fullgraph=True, backend="aot_eager")
    try:
        compiled(x, x, x, plan, dropout_p=0.5, rng=rng)
    except Exception as error:
        return str(error)
    return "nothing"


def test_graphs_refuse_the_same_arguments_as_calls(two):
    for told in two.run(refused_in_a_graph):
        assert "dropout needs strategy='ulysses'" in told


def values_in_a_graph(strategy: str) -> None:
    torch._dynamo.reset()
    cp = ContextParallel(strategy=strategy)
    plan = cp.plan(24)
    x = torch.randn(1, 12, 4, 8)
    sink = torch.full((4,), float(dist.get_rank()))
    torch.compile(cp_attention, fullgraph=True, backend="aot_eager")(x, x, x, plan, sink=sink)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_graphs_compare_values(two, strategy):
    first, second = two.outcomes(values_in_a_graph, strategy)
    assert first.kind == "ValueError" and first.message == second.message
    assert "sink [4] torch.float32 cpu of values" in first.message


# --- one rank, and derivatives --------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["auto", "all_gather", "ring", "ulysses"])
def test_dropout_of_one_rank(strategy):
    cp = ContextParallel(strategy=strategy)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 40, 4, 8).unbind()
    rng = flash_cute.rng_state()
    for plan, cut in ((cp.plan(40), slice(None)), (cp.plan(cu_seqlens=[0, 40]), 0)):
        out = cp_attention(*(x[cut] for x in (q, k, v)), plan, dropout_p=0.5, rng=rng)
        expected = flash_cute.flash_attn_func(q, k, v, dropout_p=0.5, rng=rng)[cut]
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_forward_mode_is_refused(strategy):
    cp = ContextParallel(strategy=strategy)
    plan = cp.plan(8)
    x = torch.randn(1, 8, 2, 4)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda x: cp_attention(x, x, x, plan), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="forward mode"):
            cp_attention(x, x, dual, plan)
