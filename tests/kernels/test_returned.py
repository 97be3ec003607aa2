"""out and softmax_lse have the same bits whatever else a call returns, in every family."""

from __future__ import annotations

import itertools

import pytest
import torch

from flash_cute.native import library
from flash_cute.testing import bounds
from flash_cute.testing.cases import Case, Inputs, VarlenCase
from flash_cute.testing.kernels import forward_families

BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = {"lengths_q": (32, 192, 255, 32), "lengths_k": (32, 1, 255, 300)}
CASES = {
    "plain": Case(seqlen_q=298, seqlen_k=298, dim=128, dtype=BF16),
    "few_queries": Case(batch=1, seqlen_q=9, seqlen_k=2000, dim=128, dtype=FP16),
    "softcap": Case(seqlen_q=298, seqlen_k=298, dim=128, softcap=30.0, dtype=FP16),
    "softcap_parts": Case(
        batch=1, heads=2, seqlen_q=20, seqlen_k=3000, dim=64, softcap=30.0, dtype=BF16
    ),
    "small_cap": Case(
        heads=3, heads_k=3, dim=56, is_causal=True, softcap=5.0, spread=0.1,
        seqlen_q=192, seqlen_k=256, dtype=FP16,
    ),
    "softcap_dropout": Case(
        heads=6, heads_k=3, dim=192, softcap=30.0, dropout_p=1e-6, seqlen_q=298, seqlen_k=298,
        dtype=FP16,
    ),
    "softcap_alibi": Case(
        seqlen_q=200, seqlen_k=300, softcap=30.0, alibi="batch", sink=True, dtype=BF16
    ),
    "alibi": Case(seqlen_q=200, seqlen_k=300, alibi="heads", dim=64, dtype=FP16),
    "dropout": Case(seqlen_q=200, seqlen_k=300, dropout_p=0.3, dim=64, dtype=BF16),
    "fp32": Case(seqlen_q=100, seqlen_k=100, softcap=30.0, dtype=torch.float32),
    "varlen": VarlenCase(
        **LENGTHS, heads=12, heads_k=3, dim=96, is_causal=True, softcap=30.0, dtype=BF16
    ),
    "pages": VarlenCase(**LENGTHS, dim=64, softcap=30.0, page_size=16, dtype=BF16),
    "pages_dropout": VarlenCase(
        **LENGTHS, dim=64, softcap=30.0, dropout_p=0.3, page_size=16, dtype=BF16
    ),
}  # fmt: skip


def check(inputs: Inputs) -> None:
    expected = inputs.forward()[:2]
    for row_max, softmax in itertools.product((False, True), repeat=2):
        got = inputs.forward(return_row_max=row_max, return_softmax=softmax)[:2]
        for name, x, y in zip(("out", "softmax_lse"), got, expected, strict=True):
            bounds.check_same_bits(name, x, y)


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_others(make, name):
    inputs = make(CASES[name])
    check(inputs)
    for family in forward_families(inputs.q.device)[:-1] if inputs.q.is_cuda else ():
        with library.only(family, "decode_"):
            check(inputs)


@pytest.mark.parametrize("name", ["softcap", "varlen", "pages"])
def test_out_overloads_write_each_result_alone(make, name):
    """Of every set of buffers, those that are given have the bits of the functional call."""
    inputs = make(CASES[name])
    kind = "varlen_fwd" if inputs.lengths else "fwd"
    op = getattr(torch.ops.flash_cute, kind)
    given = inputs.lengths | inputs.options
    names = ("out", "softmax_lse", "row_max", "softmax")
    expected = dict(
        zip(names, inputs.forward(return_row_max=True, return_softmax=True), strict=True)
    )
    for size in range(1, 4):
        for others in itertools.combinations(names[1:], size - 1):
            buffers = {x: torch.full_like(expected[x], torch.nan) for x in ("out", *others)}
            op.out(inputs.q, inputs.k, inputs.v, **given, **buffers)
            for x, buffer in buffers.items():
                bounds.check_same_bits(x, buffer, expected[x])


@pytest.mark.parametrize("case", [CASES["alibi"], CASES["varlen"]], ids=["dense", "varlen"])
def test_each_gradient_alone(make, case):
    inputs = make(case)
    out, lse, _, _ = inputs.forward()
    kind = "varlen_bwd" if inputs.lengths else "bwd"
    op = getattr(torch.ops.flash_cute, kind)
    lengths = {name: x for name, x in inputs.lengths.items() if name != "block_table"}
    given = lengths | inputs.options | {"deterministic": True}
    saved = (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse)
    results = dict(zip(("dq", "dk", "dv", "dsink", "softmax_d"), op(*saved, **given), strict=True))
    for x in ("dq", "dk", "dv", "softmax_d"):
        buffer = torch.full_like(results[x], torch.nan)
        op.out(*saved, **given, **{x: buffer})
        bounds.check_same_bits(x, buffer, results[x])
