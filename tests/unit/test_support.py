"""kernels.supports: the one answer to whether kernels can do a call."""

from __future__ import annotations

import pytest
import torch

from flash_cute import kernels
from flash_cute.kernels import support
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


def test_is_a_constant_in_graphs():
    """Also in a block that limits kernels, which a cache must not remember."""

    def ask(x):
        if support.has_kernel(x.dtype, 88) and support.reads_caches_in_place(x.dtype, 88, 88):
            return x + 1
        return x

    x = torch.zeros(2, dtype=BF16)
    with kernels.only("fwd_sm80_fp16_plain_d32x32_m128_n64_s2_w4_c3"):
        compiled = torch.compile(ask, fullgraph=True, backend="eager")(x)
    assert torch.equal(compiled, x + 1) and support.has_kernel(BF16, 88)


def test_calls_over_pages_say_why_no_kernel_can():
    wide = kernels.Problem(varlen=True, head_dim=512, page_size=16, seqlen_k=64, max_blocks=4)
    refused = kernels.supports(wide, "h100")
    assert not refused and any("head dim up to 256" in line for line in refused.reasons)
    rows = kernels.explain(wide, "h100")
    assert rows and all(row.verdict == "refused" for row in rows)


@pytest.mark.parametrize("flag", ["return_row_max", "return_softmax"])
def test_kernels_of_both_launches_are_chosen(flag):
    problem = kernels.Problem(
        varlen=True, page_size=16, seqlen_k=64, max_blocks=4, softcap=True, **{flag: True}
    )
    chosen = {row.id for row in kernels.explain(problem, "h100") if row.verdict == "chosen"}
    launches = kernels.plan(problem, "h100").launches
    assert chosen == {name for name in launches if "_sm" in name} and len(chosen) == 2


def test_a_field_of_another_op_is_named():
    with pytest.raises(ValueError, match="page_size is 16 and op 'bwd'; only fwd and decode take"):
        kernels.plan(kernels.Problem("bwd", page_size=16), "h100")
    with pytest.raises(TypeError, match="call is a str; expected a call of an attention op"):
        kernels.supports("x", "h100")
