"""Plans and explanations of fp8: of kernels of e4m3 inputs, or of what a call is widened to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_cute import flash_attn_func
from flash_cute import kernels as k
from flash_cute.fp8 import why_widened
from flash_cute.ops import has_fp8_attention
from flash_cute.ops.typed import FwdCall

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
IN_FP8 = k.Problem(batch=4, heads=16, heads_k=4, seqlen_q=4096, dtype=E4M3)


def chosen(problem, gpu):
    (id,) = [row.id for row in k.explain(problem, gpu) if row.verdict == "chosen"]
    return id


@pytest.mark.parametrize(
    ("change", "tile", "passes"),
    [
        ({}, 128, []),
        ({"head_dim": 64, "softmax_scale": -1.0}, 64, []),
        ({"head_dim": 40, "head_dim_v": 24}, 64, ["pad_rows", "pad_rows"]),
        ({"head_dim": 13, "head_dim_v": 7, "causal": True}, 64, ["pad_rows", "pad_rows"]),
        ({"head_dim": 64, "head_dim_v": 256}, 256, ["pad_rows", "pad_rows"]),
        ({"head_dim": 192, "head_dim_v": 128}, 256, []),
        ({"unaligned": True}, 128, ["pad_rows", "pad_rows"]),
        ({"window_size": (30, 5), "varlen": True}, 128, []),
        ({"varlen": True, "page_size": 16}, 128, ["count_paged_keys", "zero_fill"]),
        ({"varlen": True, "page_size": 1}, 128, ["count_paged_keys", "gather_pages"]),
        ({"varlen": True, "page_size": 100}, 128, ["count_paged_keys", "gather_pages"]),
        ({"varlen": True, "page_size": 100, "max_blocks": 1}, 128,
         ["count_paged_keys", "zero_fill"]),
        ({"seqlen_k": 0}, 128, []),
        ({"seqlen_q": 0, "seqlen_k": 9}, 128, []),
        ({"batch": 0}, 128, []),
    ],
)  # fmt: skip
def test_e4m3_is_planned_by_its_kernels(change, tile, passes):
    problem = replace(IN_FP8, **change)
    for gpu in ("h100", "h200"):
        plan = k.plan(problem, gpu)
        assert k.why_widened(problem, gpu) == ()
        assert plan.kernel.id.startswith(f"fwd_sm90_e4m3_plain_d{tile}x{tile}_")
        assert plan.launches == (*passes, "transpose_values", plan.kernel.id)
        assert chosen(problem, gpu) == plan.kernel.id
    of_16_bits = [row.reason for row in k.explain(problem, "h100") if "_bf16_" in row.id]
    assert all("computes in bf16, the call in e4m3" in why for why in of_16_bits)


def test_memory_of_e4m3_is_that_of_its_copies():
    """V is transposed in whole tiles of keys; q and k are copied where their rows are padded."""
    problem = k.Problem(dtype=E4M3, batch=3, heads=6, heads_k=2, seqlen_q=70, seqlen_k=200)
    values = 3 * 2 * 256
    assert k.plan(problem, "h100").workspace_bytes == values * 128
    signed = replace(problem, softmax_scale=-1.0)  # a factor of each key has the sign
    assert k.plan(signed, "h100").workspace_bytes == values * (128 + 4)
    padded = k.plan(replace(problem, head_dim=40, head_dim_v=7), "h100").workspace_bytes
    assert padded == values * 7 + 48 * (3 * 70 * 6 + 3 * 200 * 2)


@pytest.mark.parametrize(
    ("change", "gpu", "why"),
    [
        ({"softcap": True}, "h100", "softcap is given"),
        ({"dropout": True}, "h200", "dropout_p is given"),
        ({"alibi": True}, "h100", "alibi_slopes is given"),
        ({"lists": True}, "h100", "sparse is given"),
        ({"return_softmax": True}, "h100", "return_attn_probs is given"),
        ({"return_row_max": True}, "h100", "return_max_logits is given"),
        ({"dtype": E5M2}, "h100", "q has dtype torch.float8_e5m2"),
        ({"op": "bwd"}, "h100", "op is bwd"),
        ({"op": "decode", "seqlen_q": 1}, "h100", "op is decode"),
        ({}, "a100", "there are no kernels of e4m3 inputs for sm_80"),
        ({"head_dim": 40}, "l40s", "there are no kernels of e4m3 inputs for sm_89"),
    ],
)
def test_fp8_that_is_widened_has_the_plan_of_16_bits(change, gpu, why):
    problem = replace(IN_FP8, **change)
    assert k.why_widened(problem, gpu) == (why,)
    wide = replace(problem, dtype=torch.bfloat16)
    assert k.plan(problem, gpu) == k.plan(wide, gpu) and k.why_widened(wide, gpu) == ()
    rows = {row.id: row for row in k.explain(problem, gpu)}
    assert chosen(problem, gpu) == k.plan(wide, gpu).kernel.id
    if problem.op == "fwd":
        words = f"the call is widened: {why}; computes in e4m3, the call in bf16"
        refused = [x for x in rows.values() if "_e4m3_" in x.id and x.verdict == "refused"]
        assert len(refused) == 3 and all(x.reason.startswith(words) for x in refused)


def test_a_calibration_has_the_problem_of_the_kernel():
    """With the columns that rows are copied to."""
    problem = replace(IN_FP8, head_dim=40, head_dim_v=24)
    bucket = k.bucket(problem, "h200")
    assert " fwd e4m3 d48/24 " in bucket and " fwd bf16 d40/24 " in k.bucket(problem, "a100")
    kernel = "fwd_sm90_e4m3_plain_d256x256_m128_n128_s2_w8_c1_x1"
    assert k.plan(problem, "h200").kernel.id != kernel
    before = torch.ops.flash_cute.set_calibration(f"{bucket} = {kernel}")
    try:
        rows = {row.id: row.reason for row in k.explain(problem, "h200")}
    finally:
        torch.ops.flash_cute.set_calibration(before)
    assert "the calibration in use names this kernel, but it cannot run" in rows[kernel]


def test_fp8_that_has_no_kernel_is_refused_as_16_bits():
    problem = replace(IN_FP8, head_dim=320, head_dim_v=64)
    assert k.why_widened(problem, "h100") == ("q's head dim is 320, above 256",)
    assert not k.supports(problem, "h100")


CALLS = {
    "plain": ({}, E4M3),
    "softcap": ({"softcap": 5.0}, E4M3),
    "dropout": ({"dropout_p": 0.1}, E4M3),
    "slopes": ({"alibi_slopes": torch.ones(4)}, E4M3),
    "probabilities": ({"return_softmax": True, "softcap": 1.0}, E4M3),
    "maxima": ({"return_row_max": True}, E4M3),
    "window": ({"window_size_left": 3, "softmax_scale": -2.0, "sink": torch.zeros(4)}, E4M3),
    "q of e5m2": ({"q": torch.zeros(2, 20, 4, 40).to(E5M2)}, torch.bfloat16),
    "v of fp16": ({"v": torch.zeros(2, 33, 2, 40, dtype=torch.float16)}, torch.float16),
    "v of bf16": ({"v": torch.zeros(2, 33, 2, 40, dtype=torch.bfloat16)}, torch.bfloat16),
    "a gradient": ({"sink": torch.zeros(4, requires_grad=True)}, torch.bfloat16),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_planned_as_they_run(name):
    """In fp8 if nothing widens them, else as aligned tensors of 16 bits."""
    change, dtype = CALLS[name]
    q, key, v = (torch.randn(2, n, h, 40).to(E4M3) for n, h in ((20, 4), (33, 2), (33, 2)))
    call = FwdCall(q, key, v)._replace(**change)
    problem, reasons = k.Problem.of_call(call), why_widened(call)
    assert problem.dtype == dtype
    plan = k.plan(problem, "h100")
    if not reasons:
        assert plan.kernel.dtype == "e4m3"
        return
    assert dtype != E4M3 or set(problem.reasons_to_widen) == set(reasons)
    wide = [x if x.dtype == torch.float16 else x.bfloat16() for x in call[:3]]
    if dtype == torch.float16:
        wide = [x.half() for x in wide]
    in_16_bits = k.Problem.of_call(FwdCall(*wide, *call[3:]))
    assert plan == k.plan(in_16_bits, "h100")


def test_where_v_lies_does_not_matter():
    """A pass reads it in bytes; rows of q and k are copied if they are not aligned."""
    q, key, v = (torch.zeros(2, 20, 2, 40).to(E4M3) for _ in "qkv")
    call = FwdCall(q[..., :32], key[..., :32].contiguous(), v[..., :7])
    assert k.Problem.of_call(call).unaligned
    assert not k.Problem.of_call(call._replace(q=call.q.contiguous())).unaligned


def test_the_plan_of_an_e4m3_call_is_the_one_that_runs(cuda):
    q = torch.randn(2, 300, 4, 64, device=cuda).to(E4M3)
    problem = k.Problem.of(q, q, q)
    if not has_fp8_attention(q.device):
        assert k.plan(problem) == k.plan(replace(problem, dtype=torch.bfloat16))
        return
    with k.only(k.plan(problem).kernel.id):
        alone = flash_attn_func(q, q, q)
    assert torch.equal(alone, flash_attn_func(q, q, q))
