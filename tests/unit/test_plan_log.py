"""FLASH_CUTE_LOG=plan: what calls say of themselves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import flash_cute
from flash_cute import kernels, plan_log

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
    flash_cute.flash_attn_with_kvcache(q, q.clone(), q.clone())
    assert lines()[0].startswith("decode float32")
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    flash_cute.flash_attn_varlen_func(q[0], q[0], q[0], offsets, offsets, 5, 5)
    assert lines()[0].startswith("fwd float32 q (8, 2, 16)")


def test_nothing_is_said_outside(lines):
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
    assert " varlen: fwd_sm" in lines()[0]
    flash_cute.flash_attn_with_kvcache(q[:, :1], q.clone(), q.clone(), cache_seqlens=17)
    assert ": decode_sm" in lines()[0]
    x = q.transpose(1, 2).contiguous()
    flash_cute.flash_attention_forward(x, x, x)
    assert "the nearest to Tile(rows=32, keys=32)" in lines()[0]


def test_problems_of_packed_tensors():
    q, k = torch.zeros(10, 4, 64, dtype=BF16), torch.zeros(20, 2, 64, dtype=BF16)
    offsets = torch.zeros(3, dtype=torch.int32)
    sequences = (offsets, offsets, 7, 12, None, None, False, None)
    problem = kernels.Problem.of_packed(q, k, k, sequences, causal=True)
    assert str(problem) == "fwd bfloat16 b2 h4/2 q7 k12 d64/64 causal varlen"
    assert (problem.total_q, problem.total_k) == (10, 20)
    pages, table = torch.zeros(6, 16, 2, 64, dtype=BF16), torch.zeros(2, 3, dtype=torch.int32)
    paged = (*sequences[:7], table)
    assert str(kernels.Problem.of_packed(q, pages, pages, paged)) == (
        "decode bfloat16 b2 h4/2 q7 k48 d64/64 varlen lengths page_size=16"
    )
    gathered = kernels.Problem.of_packed(q, pages, pages, paged, dropout=True)
    assert str(gathered) == "fwd bfloat16 b2 h4/2 q7 k12 d64/64 dropout varlen"
    used = torch.zeros(2, dtype=torch.int32)
    of_queries, of_keys = ((*paged[:4], *x, *paged[6:]) for x in ((used, None), (None, used)))
    assert str(kernels.Problem.of_packed(q, pages, pages, of_queries)).startswith("fwd ")
    assert str(kernels.Problem.of_packed(q, pages, pages, of_keys)).startswith("decode ")
    shifted = torch.zeros(6, 16, 2, 72, dtype=BF16)[..., 1:65]
    gathered = kernels.Problem.of_packed(q, shifted, shifted, paged)
    assert str(gathered) == "fwd bfloat16 b2 h4/2 q7 k12 d64/64 varlen unaligned"
    assert kernels.plan(gathered, "h100").kernel.arch == 80


CALL = """
import torch, flash_cute
q = torch.randn(1, 8, 2, 16)
flash_cute.flash_attn_func(q, q, q)
"""


@pytest.mark.parametrize(
    ("value", "said"), [("plan", "fwd float32"), ("", ""), ("x", "ImportError")]
)
def test_the_variable(value, said):
    run = subprocess.run(
        [sys.executable, "-c", CALL],
        env=os.environ | {"FLASH_CUTE_LOG": value},
        capture_output=True,
        text=True,
    )
    assert (run.returncode == 0) == (value != "x")
    assert said in run.stderr if said else run.stderr == ""
