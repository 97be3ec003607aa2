"""A calibration in use: plans and explanations follow it where the kernel fits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from calibrated import FEW_QUERIES, PROBLEM, PROBLEMS, fitting, others

from flash_cute import kernels
from flash_cute.kernels import GPUS
from flash_cute.tuning import Choice

pytestmark = pytest.mark.usefixtures("without_calibration")


def use(*rules):
    torch.ops.flash_cute.set_calibration("\n".join(f"{b} = {k}" for b, k in rules))


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_plan_takes_the_calibrated_kernel(name, coarse):
    problem = PROBLEMS[name]
    bucket = kernels.bucket(problem, "h100")
    for kernel in others(problem):
        use((bucket.partition(" | ")[0] if coarse else bucket, kernel))
        assert kernels.plan(problem, "h100").kernel.id == kernel
        verdicts = {row.id: row for row in kernels.explain(problem, "h100")}
        assert verdicts[kernel].verdict == "chosen"
        use()
        assert kernels.plan(problem, "h100").kernel.id != kernel


def test_the_finer_bucket_comes_first():
    bucket, (first, second, *_) = kernels.bucket(PROBLEM, "h100"), others(PROBLEM)
    use((bucket.partition(" | ")[0], first), (bucket, second))
    assert kernels.plan(PROBLEM, "h100").kernel.id == second
    assert kernels.plan(replace(PROBLEM, batch=64), "h100").kernel.id == first


DIFFERENT = {
    "op": {"op": "bwd"},
    "dtype": {"dtype": torch.float16},
    "head_dim": {"head_dim": 64},
    "head_dim_v": {"head_dim": 192, "head_dim_v": 128},
    "mask": {"causal": False},
    "window": {"window_size": (100, -1)},
    "rules": {"softcap": True},
    "packed": {"varlen": True},
    "longer": {"seqlen_q": 8192},
    "more keys": {"seqlen_k": 8192},
    "more work": {"batch": 8},
    "group": {"heads_k": 32},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_calls_are_in_other_buckets(name):
    other = replace(PROBLEM, **DIFFERENT[name])
    assert kernels.bucket(other, "h100") != kernels.bucket(PROBLEM, "h100")
    planned = kernels.plan(other, "h100")
    use((kernels.bucket(PROBLEM, "h100"), others(PROBLEM)[0]))
    assert kernels.plan(other, "h100") == planned


def test_other_gpus_are_in_other_buckets():
    buckets = {kernels.bucket(PROBLEM, name) for name in GPUS}
    assert len(buckets) == len(GPUS)


def test_lengths_within_a_power_of_two_share_a_bucket():
    at = {n: kernels.bucket(replace(PROBLEM, seqlen_q=n), "h100") for n in (4095, 4096, 8191, 8192)}
    assert at[4096] == at[8191] and at[4095] != at[4096] and at[8191] != at[8192]


def test_calls_that_copy_their_keys_have_no_bucket():
    problem = replace(PROBLEM, varlen=True, page_size=16, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="copies its keys out of their pages; the calibration"):
        kernels.bucket(problem, "h100")


def test_a_kernel_that_cannot_is_passed_over():
    planned, narrow = kernels.plan(PROBLEM, "h100"), replace(PROBLEM, head_dim=64)
    too_narrow = kernels.plan(narrow, "h100").kernel.id
    use((kernels.bucket(PROBLEM, "h100"), too_narrow))
    assert kernels.plan(PROBLEM, "h100") == planned
    reasons = {row.id: row.reason for row in kernels.explain(PROBLEM, "h100")}
    assert reasons[too_narrow].endswith(
        "the calibration in use names this kernel, but it cannot run this call"
    )
    assert reasons[too_narrow].startswith("head dim up to 64, the call has 128")


def test_a_limit_comes_before_the_calibration():
    first, second, *_ = others(PROBLEM)
    use((kernels.bucket(PROBLEM, "h100"), first))
    with kernels.only(second):
        assert kernels.plan(PROBLEM, "h100").kernel.id == second


def test_explain_says_that_others_were_slower():
    kernel = others(PROBLEM)[0]
    use((kernels.bucket(PROBLEM, "h100"), kernel))
    fits = [row for row in kernels.explain(PROBLEM, "h100") if row.verdict == "fits"]
    assert fits
    assert {row.reason for row in fits} == {f"slower than {kernel} by the calibration in use"}


def test_threads_plan_while_it_changes():
    planned, kernel = kernels.plan(PROBLEM, "h100").kernel.id, others(PROBLEM)[0]
    rule = (kernels.bucket(PROBLEM, "h100"), kernel)
    with ThreadPoolExecutor(4) as pool:
        plans = [pool.submit(lambda: kernels.plan(PROBLEM, "h100").kernel.id) for _ in range(200)]
        for _ in range(200):
            use(rule)
            use()
    assert {plan.result() for plan in plans} <= {planned, kernel}


def test_parted_keys_do_not_depend_on_it():
    problem = replace(PROBLEMS["decode"], num_splits=4)
    planned = kernels.plan(problem, "h100")
    use((kernels.bucket(problem, "h100"), others(problem)[0]))
    assert kernels.plan(problem, "h100") == planned


def test_decoding_that_was_measured_is_preferred_to_forward():
    problem = replace(PROBLEM, op="decode", seqlen_q=1024, seqlen_k=8192)
    assert kernels.plan(problem, "h100").kernel.op == "fwd"
    kernel = next(i for i in fitting(problem) if i.startswith("decode"))
    use((kernels.bucket(problem, "h100"), kernel))
    assert kernels.plan(problem, "h100").kernel.id == kernel


def test_what_was_measured_of_forward_is_not_for_calls_over_a_cache():
    problem = replace(PROBLEM, op="decode", batch=1, causal=False, seqlen_q=128, seqlen_k=65536)
    plan, rows = kernels.plan(problem, "h100"), kernels.explain(problem, "h100")
    assert plan.kernel.op == "fwd" and plan.num_splits > 2
    forward = replace(problem, op="fwd")
    taken = []
    for kernel in [i for i in fitting(forward) if "_sm90_" in i]:
        use((kernels.bucket(forward, "h100"), Choice(kernel, num_splits=2)))
        taken.append(kernels.plan(forward, "h100").num_splits)
        assert kernels.plan(problem, "h100") == plan and kernels.explain(problem, "h100") == rows
    assert 2 in taken


@pytest.mark.parametrize("num_splits", [None, 1, 3, 8])
@pytest.mark.parametrize("pack_gqa", [None, 1, 2, 4])
def test_a_plan_takes_the_calibrated_numbers(num_splits, pack_gqa):
    bucket = kernels.bucket(FEW_QUERIES, "h100")
    packing = [i for i in fitting(FEW_QUERIES) if i.endswith("_m128_n128_s2_w8_c1_x1")]
    assert len(packing) == 2
    for kernel in packing:
        choice = Choice(kernel, num_splits, pack_gqa)
        use((bucket, choice))
        measured = kernels.plan(FEW_QUERIES, "h100")
        use()
        assert measured.kernel.id == kernel and choice.numbers.items() <= vars(measured).items()
        if choice.numbers:
            with kernels.only(kernel, **choice.numbers):
                assert measured == kernels.plan(FEW_QUERIES, "h100")


def test_numbers_that_a_call_cannot_have_are_passed_over():
    bucket, free = kernels.bucket(FEW_QUERIES, "h100"), kernels.plan(FEW_QUERIES, "h100")
    for choice in (
        Choice(free.kernel.id, num_splits=64),  # more than fill two waves
        Choice(free.kernel.id, pack_gqa=3),
        Choice(free.kernel.id, pack_gqa=8),
        Choice(free.kernel.id, 1000, 16),
    ):
        use((bucket, choice))
        assert kernels.plan(FEW_QUERIES, "h100") == free
    use((bucket, Choice(free.kernel.id, 2, 3)))
    plan = kernels.plan(FEW_QUERIES, "h100")
    assert (plan.num_splits, plan.pack_gqa) == (2, free.pack_gqa)


def test_calibrated_numbers_are_those_of_their_kernel():
    bucket, free = kernels.bucket(FEW_QUERIES, "h100"), kernels.plan(FEW_QUERIES, "h100")
    kernel = others(FEW_QUERIES)[0]
    use((bucket, Choice(kernel, num_splits=2)))
    with kernels.only(free.kernel.id):
        assert kernels.plan(FEW_QUERIES, "h100") == free
    with kernels.only(kernel):
        assert kernels.plan(FEW_QUERIES, "h100").num_splits == 2


def test_numbers_of_a_limit_come_before_the_calibration():
    bucket, free = kernels.bucket(FEW_QUERIES, "h100"), kernels.plan(FEW_QUERIES, "h100")
    use((bucket, Choice(free.kernel.id, 2, 1)))
    with kernels.only(num_splits=3):
        plan = kernels.plan(FEW_QUERIES, "h100")
    assert (plan.num_splits, plan.pack_gqa) == (3, free.pack_gqa)


BACKWARD = "bwd_sm80_bf16_plain_d64x64_m64_n128_s2_w4_c2"
BAD_LINES = {
    "a bucket": ("a bucket", "expected a bucket, "),
    "no kernel": ("a bucket = no_kernel", "no_kernel is no kernel's id; kernels.. lists them"),
    "nothing": ("a bucket = ", " is no kernel's id"),
    "below 1": ("a bucket = {fwd} num_splits=0", "a whole number from 1 on, got num_splits=0"),
    "no number": ("a bucket = {fwd} pack_gqa=two", "from 1 on, got pack_gqa=two"),
    "too large": ("a bucket = {fwd} pack_gqa=99999999999", "from 1 on, got pack_gqa=9999"),
    "no name": ("a bucket = {fwd} 2", "num_splits=N or pack_gqa=N after a kernel's id, got 2"),
    "another name": ("a bucket = {fwd} order=2", "expected num_splits=N or pack_gqa=N, "),
    "backward": (
        f"a bucket = {BACKWARD} num_splits=2",
        f"only Hopper's forward has num_splits and pack_gqa, not {BACKWARD}",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_changes_nothing(name):
    kernel = others(PROBLEM)[0]
    use((kernels.bucket(PROBLEM, "h100"), kernel))
    line, message = BAD_LINES[name]
    with pytest.raises((RuntimeError, ValueError), match=message):
        torch.ops.flash_cute.set_calibration(line.format(fwd=kernel))
    assert kernels.plan(PROBLEM, "h100").kernel.id == kernel
