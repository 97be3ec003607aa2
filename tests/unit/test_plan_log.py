"""FLASH_CUTE_LOG=plan: what each call logs."""

from __future__ import annotations

import os
import re

import fresh
import pytest
import torch

import flash_cute
from flash_cute import kernels
from flash_cute.kernels import plan_log
from flash_cute.ops.typed import FwdKvcacheCall, VarlenFwdCall

BF16 = torch.bfloat16


@pytest.fixture
def lines(caplog):
    """`lines()`: what was logged since the last time."""

    def logged():
        found = [record.getMessage() for record in caplog.records if record.name == "flash_cute"]
        caplog.clear()
        return found

    with plan_log.switched():
        yield logged


def test_calls_on_the_cpu(lines):
    q = torch.randn(1, 8, 2, 16)
    flash_cute.flash_attn_func(q, q, q)
    (line,) = lines()
    assert line.startswith("fwd float32 q (1, 8, 2, 16)") and line.endswith("keys a tile")
    flash_cute.flash_attn_func(q, q, q.clone().requires_grad_())
    assert [line.split()[0] for line in lines()] == ["fwd", "bwd"]
    sparse = flash_cute.Sparse.from_block_map(torch.ones(1, 1, 1, 1, dtype=torch.bool))
    flash_cute.flash_attn_func(q, q, q, sparse=sparse)
    assert lines()[0].endswith("that its lists name")
    flash_cute.flash_attn_with_kvcache(q, q.clone(), q.clone())
    assert lines()[0].startswith("decode float32")
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    flash_cute.flash_attn_varlen_func(q[0], q[0], q[0], offsets, offsets, 5, 5)
    assert lines()[0].startswith("fwd float32 q (8, 2, 16)")


def test_nothing_is_logged_while_switched_off(lines):
    q = torch.randn(1, 8, 2, 16)
    with plan_log.switched(False):
        flash_cute.flash_attn_func(q, q, q)
    assert lines() == []


def test_calls_on_cuda(cuda, lines):
    q = torch.randn(1, 300, 2, 64, device=cuda, dtype=BF16)
    flash_cute.flash_attn_func(q, q, q, causal=True)
    plan = kernels.plan(kernels.Problem.of(q, q, q, causal=True))
    assert lines() == [f"fwd bfloat16 b1 h2/2 q300 k300 d64/64 causal: {plan}"]
    flash_cute.flash_attn_func(q, q, q.clone().requires_grad_(), softcap=3.0)
    forward, backward = lines()
    assert " softcap: fwd_sm" in forward and "_rich_" in forward and ": bwd_sm" in backward
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device=cuda)
    flash_cute.flash_attn_varlen_func(q[0], q[0], q[0], offsets, offsets, 200, 200)
    assert re.search(" varlen: (zero_fill > fwd_sm80|fwd_sm90)", lines()[0])
    flash_cute.flash_attn_with_kvcache(q[:, :1], q.clone(), q.clone(), cache_seqlens=17)
    assert ": decode_sm" in lines()[0]
    x = q.transpose(1, 2).contiguous()
    flash_cute.flash_attention_forward(x, x, x)
    assert "the nearest to Tile(rows=32, keys=32)" in lines()[0]


def test_problems_of_packed_tensors():
    q, k = torch.zeros(10, 4, 64, dtype=BF16), torch.zeros(20, 2, 64, dtype=BF16)
    offsets, used = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    call = VarlenFwdCall(q, k, k, offsets, offsets, 7, 12, is_causal=True)
    problem = kernels.Problem.of_call(call)
    assert str(problem) == "fwd bfloat16 b2 h4/2 q7 k12 d64/64 causal varlen"
    assert (problem.total_q, problem.total_k) == (10, 20)
    assert str(kernels.Problem.of_call(call, "bwd")).startswith("bwd bfloat16 b2 h4/2 q7 k12")
    pages, table = torch.zeros(6, 16, 2, 64, dtype=BF16), torch.zeros(2, 3, dtype=torch.int32)
    paged = call._replace(k=pages, v=pages, block_table=table, is_causal=False)
    cases = {
        "varlen page_size=16": paged,
        "dropout varlen page_size=16": paged._replace(dropout_p=0.5),
        "varlen seqused_q page_size=16": paged._replace(seqused_q=used),
        "varlen return_softmax page_size=16": paged._replace(return_softmax=True),
    }
    launches = {}
    for words, paged_call in cases.items():
        problem = kernels.Problem.of_call(paged_call)
        assert str(problem) == f"fwd bfloat16 b2 h4/2 q7 k12 d64/64 {words}"
        launches[words] = [x.split("_bf16")[0] for x in kernels.plan(problem, "a100").launches]
    begin, fill, decode, forward = "count_paged_keys", "zero_fill", "decode_sm80", "fwd_sm80"
    assert launches == {
        "varlen page_size=16": [begin, fill, decode],
        "dropout varlen page_size=16": [begin, "gather_pages", fill, forward],
        "varlen seqused_q page_size=16": [begin, "gather_pages", fill, forward],
        "varlen return_softmax page_size=16": [
            begin, fill, decode, "gather_pages", fill, forward, "probabilities",
        ],
    }  # fmt: skip
    shifted = torch.zeros(6, 16, 2, 72, dtype=BF16)[..., 1:65]
    gathered = kernels.Problem.of_call(paged._replace(k=shifted, v=shifted))
    assert str(gathered) == "fwd bfloat16 b2 h4/2 q7 k12 d64/64 varlen unaligned page_size=16"
    assert "gather_pages" in kernels.plan(gathered, "h100").launches


def test_problems_of_caches():
    q, cache = torch.zeros(2, 1, 4, 64, dtype=BF16), torch.zeros(3, 32, 2, 64, dtype=BF16)
    index, new = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, 2, 64, dtype=BF16)
    call = FwdKvcacheCall(q, cache, cache, new, new, cache_seqlens=index, cache_batch_idx=index)
    problem = kernels.Problem.of_call(call)
    words = "decode bfloat16 b2 h4/2 q1 k32 d64/64 lengths append cache_batch_idx"
    assert str(problem) == words
    first, kernel = kernels.plan(problem, "h100").launches
    assert first == "append_keys" and kernel.startswith("decode_sm")
    few = cache[..., :60]
    odd = kernels.Problem.of_call(call._replace(q=q[..., :60], k_cache=few, v_cache=few))
    names = kernels.plan(odd, "h100").launches
    assert names[:2] == ("append_keys", "gather_pages") and names[2].startswith("fwd_sm80")


CALL = """
import torch, flash_cute
q = torch.randn(1, 8, 2, 16)
flash_cute.flash_attn_func(q, q, q)
"""


@pytest.mark.parametrize(
    ("value", "said"), [("plan", "fwd float32"), ("", ""), ("x", "ImportError")]
)
def test_the_variable(value, said):
    run = fresh.run(CALL, env=os.environ | {"FLASH_CUTE_LOG": value})
    assert (run.returncode == 0) == (value != "x")
    assert said in run.stderr if said else run.stderr == ""
