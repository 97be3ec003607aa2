"""What holds of every plan, for problems that hypothesis draws, and shrinks where they fail."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_cute import kernels as k

NEAR_POWERS = st.builds(lambda bit, by: (1 << bit) + by, st.integers(2, 28), st.integers(-1, 1))
SIZES = st.integers(1, 300) | NEAR_POWERS | st.sampled_from([0, 4096, 2**29 - 1])
HEADS = st.sampled_from([1, 1, 2, 3, 8, 64])
DIMS = st.sampled_from([64, 96, 128, 192, 256] * 50 + list(range(1, 320)))
BOUNDS = st.just(-1) | st.just(-1) | SIZES
RARE = st.sampled_from([False] * 7 + [True])
FLAGS = ("causal", "softcap", "alibi", "dropout", "varlen", "unaligned", "allow_tf32")
OF_OP = {
    "fwd": {},
    "bwd": {"deterministic": RARE, "fp32_gradients": RARE},
    "decode": {"page_size": st.just(0) | SIZES, "lengths": RARE, "leftpad": RARE,
               "num_splits": st.just(0) | st.integers(0, 200), "split_size": st.just(0) | SIZES},
}  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> k.Problem:
    op, heads_k = draw(st.sampled_from(k.OPS)), draw(HEADS)
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    options = {name: draw(values) for name, values in OF_OP[op].items()}
    if options.get("num_splits"):
        options["split_size"] = 0  # a call has one of them at most
    return k.Problem(
        op, dtype, draw(st.integers(0, 8) | SIZES), heads_k * draw(HEADS), heads_k,
        draw(SIZES), draw(SIZES), draw(DIMS), draw(DIMS) if draw(RARE) else None,
        window_size=(draw(BOUNDS), draw(BOUNDS)), softmax_scale=-1.0 if draw(RARE) else 1.0,
        **{name: draw(RARE) for name in FLAGS},
        **options,
    )  # fmt: skip


@settings(max_examples=300, deadline=None, database=None)
@given(
    problems().filter(lambda problem: problem.op == "fwd"),
    st.integers(1, 70), st.integers(1, 9), st.sampled_from(["h100", "a100"]),
)  # fmt: skip
def test_a_plan_of_forward_obeys_overrides(problem, num_splits, pack_gqa, gpu):
    try:
        free = k.plan(problem, gpu)
    except RuntimeError:
        return
    for asked in ({"num_splits": num_splits}, {"pack_gqa": pack_gqa}, {"num_splits": 1}):
        with k.only(free.kernel.id, **asked):
            try:
                plan = k.plan(problem, gpu)
            except RuntimeError as error:
                ((name, number),) = asked.items()
                assert number > 1 or free.kernel.tiles == "tokens"  # which have whole groups
                assert f"{free.kernel.id}: {name} is {number}; it supports" in str(error)
                continue
        assert {name: getattr(plan, name) for name in asked} == asked
        assert plan.pack_gqa <= free.pack_gqa and free.pack_gqa % plan.pack_gqa == 0


@settings(max_examples=500, deadline=None, database=None)
@given(problems(), st.sampled_from(["h100", "h100", *k.GPUS]))
def test_a_problem_is_planned_or_refused_with_a_reason(problem, gpu):
    verdicts = k.explain(problem, gpu)
    chosen = [row.id for row in verdicts if row.verdict == "chosen"]
    assert all(bool(row.reason) == (row.verdict != "chosen") for row in verdicts)
    try:
        plan = k.plan(problem, gpu)
    except RuntimeError as error:
        if chosen:  # more tiles than can be numbered
            assert problem.op == "decode" and "2^30" in str(error)
        else:
            assert "no kernel for this call" in str(error)
            assert all(row.verdict == "refused" and row.reason in str(error) for row in verdicts)
        return
    assert [plan.kernel.id] == chosen and plan == k.plan(problem, gpu)
    assert plan.kernel.head_dim >= problem.head_dim
    assert plan.kernel.head_dim_v >= (problem.head_dim_v or problem.head_dim)
    assert k.ctas_an_sm(plan.kernel, k.GPUS[gpu]) >= 1
    group = problem.heads // problem.heads_k
    assert group % plan.splits_of_heads == 0 and group % plan.pack_gqa == 0
    assert min(plan.num_splits, plan.splits_of_queries) >= 1 and plan.whole_tiles >= 0
    assert (plan.workspace_bytes or 0) >= 0 and (plan.ctas or 0) >= 0
    if problem.op == "bwd":
        assert plan.num_splits == plan.splits_of_heads * plan.splits_of_queries
        assert (plan.dq_accumulate == "serialized") == problem.deterministic
