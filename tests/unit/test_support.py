"""kernels.supports: the one answer to whether kernels can do a call."""

from __future__ import annotations

import pytest
import torch

from flash_cute import kernels, support
from flash_cute.ops.typed import FwdCall, FwdKvcacheCall

BF16 = torch.bfloat16


def test_of_a_call():
    q = torch.zeros(1, 8, 2, 64, dtype=BF16)
    found = kernels.supports(FwdCall(q, q, q, softcap=5.0), "h100")
    assert found and found.reasons == ()
    assert found.plan.kernel.id.startswith("fwd_sm90_bf16_rich")
    wide = torch.zeros(1, 8, 2, 300, dtype=BF16)
    refused = kernels.supports(FwdCall(wide, wide, wide), "h100")
    assert not refused and refused.plan is None
    rows = [row for row in kernels.kernels() if row.op == "fwd"]
    assert [line.split(":")[0] for line in refused.reasons] == [row.id for row in rows]
    assert all("the call has 300" in line for line in refused.reasons)
    few = torch.zeros(1, 8, 2, 60, dtype=BF16)
    cached = kernels.supports(FwdKvcacheCall(few, few, few), "a100")
    assert cached.plan.launches[0] == "gather_pages"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": torch.float64}, "dtype torch.float64 has no CUDA kernel"),
        ({"heads": 3, "heads_k": 2}, "heads is 3; expected a multiple of heads_k, 2"),
    ],
)
def test_fields_that_no_kernel_has(fields, words):
    found = kernels.supports(fields, "h100")
    assert not found and found.reasons[0].startswith(words)


@pytest.mark.parametrize("dim", [8, 64, 72, 100, 256, 257])
def test_of_dtypes_and_head_dims(dim):
    """Whatever the thread is limited to."""
    gpu = 0 if torch.cuda.is_available() else None
    for dtype in (BF16, torch.float16, torch.float32, torch.float64):
        of_16_bits = dtype in (BF16, torch.float16)
        with kernels.only("fwd_sm80_fp16_plain_d32x32_m128_n64_s2_w4_c3"):
            plain = support.has_kernel(dtype, dim, gpu)
            cached = support.reads_caches_in_place(dtype, dim, dim, gpu)
        assert plain == (dim <= 256 and dtype != torch.float64)
        assert cached == (of_16_bits and dim % 8 == 0 and dim <= 256)


def test_ratios_under_a_limit_are_those_of_what_it_asks_for():
    """A kernel is chosen, and compared, with the splits that run."""
    problem = kernels.Problem(batch=1, heads=4, seqlen_q=128, seqlen_k=8192)
    for splits in (1, 2, 8):
        with kernels.only(num_splits=splits):
            plan, rows = kernels.plan(problem, "h100"), kernels.explain(problem, "h100")
        assert plan.num_splits == splits
        (chosen,) = (row.id for row in rows if row.verdict == "chosen")
        assert chosen == plan.kernel.id
        ratios = [float(row.reason.split()[3]) for row in rows if "times as long" in row.reason]
        assert ratios and min(ratios) >= 1
    with kernels.only(num_splits=1):
        one = {row.id: row.reason for row in kernels.explain(problem, "h100")}
    free = {row.id: row.reason for row in kernels.explain(problem, "h100")}
    assert one != free
