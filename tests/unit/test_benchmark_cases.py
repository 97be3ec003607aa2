"""Cases of the benchmarks: names, FLOPs, and the reference that results are held to."""

import math

import pytest
import torch
from torch_sdpa import sdpa

from benchmarks import rivals, suites, truth
from benchmarks.suites import SUITES, Case

CPU = torch.device("cpu")


def test_every_case_is_parsed_from_its_name_and_no_suite_repeats_one():
    for cases in SUITES.values():
        assert [Case.parse(str(case)) for case in cases] == cases
        assert len(set(cases)) == len(cases)
    assert {name: len(cases) for name, cases in SUITES.items()} == {
        "smoke": 1, "quick": 9, "train": 30, "short": 12, "few": 18, "grouped": 18,
        "decode": 35, "decode_short": 10, "chunks": 46, "deterministic": 24,
        "features": 18, "fp8": 12,
    }  # fmt: skip


def test_suites_hold_the_shapes_that_give_them_their_name():
    train = {str(case) for case in SUITES["train"]}
    assert "bf16 b16 h32/32 q1024 k1024 d64/64 full" in train
    assert "bf16 b1 h8/8 q16384 k16384 d256/256 causal" in train
    assert "fp16 b4 h16/16 q4096 k4096 d128/128 causal" in train
    assert {case.dtype for case in SUITES["fp8"]} == {"e4m3"}
    assert all(case.heads > case.heads_k for case in SUITES["grouped"])
    assert sum(case.window == 1024 for case in SUITES["grouped"]) == 6
    assert not any(case.brief for case in SUITES["train"] + SUITES["short"])
    decode = SUITES["decode"] + SUITES["decode_short"]
    assert all(case.brief and case.seqlen_q == 1 for case in decode)
    h200_l2 = 50e6
    assert all((case.kv_bytes() > h200_l2) == (case in SUITES["decode"]) for case in decode)
    assert all(case.directions == ("fwd",) for case in SUITES["fp8"] + decode)


@pytest.mark.parametrize(
    "name",
    ["", "bf16 b1 h1/1 q8 k8 d64 full", "fp32 b1 h1/1 q8 k8 d64/64 full",
     "bf16 b1 h3/2 q8 k8 d64/64 full", "bf16 b1 h1/1 q9 k8 d64/64 causal"],
)  # fmt: skip
def test_what_is_no_case_is_refused(name):
    with pytest.raises(ValueError, match=r"no case|no multiple|a key for each query"):
        Case.parse(name)


def test_flops_bytes_and_rates_are_those_counted_by_hand():
    full = Case.parse("bf16 b2 h4/2 q10 k30 d64/32 full")
    assert full.flops("fwd") == 2 * 2 * 4 * 10 * 30 * (64 + 32) == 460_800
    assert full.flops("bwd") == 1_152_000
    causal = Case.parse("bf16 b1 h16/16 q16384 k16384 d128/128 causal")
    assert causal.flops("fwd") == 4 * 16 * 16384**2 * 128 / 2
    assert causal.rate("fwd", ms=2.0) == pytest.approx(1.099511627776 / 2 * 1000)
    decode = Case.parse("bf16 b1 h32/8 q1 k32768 d128/128 full")
    assert decode.kv_bytes() == 32768 * 8 * 128 * 2 * 2 == 134_217_728
    assert (decode.metric, decode.rate("fwd", ms=0.04)) == ("GB/s", pytest.approx(3355.4432))
    assert Case.parse("e4m3 b1 h1/1 q8 k8 d64/64 full").kv_bytes() == 8 * 128


@pytest.mark.parametrize("name", ["bf16 b2 h4/2 q50 k50 d32/32 causal",
                                  "fp16 b1 h2/2 q20 k70 d16/48 full"])  # fmt: skip
def test_the_reference_is_autograd_in_fp64_whatever_the_chunk(name, monkeypatch):
    case = Case.parse(name)
    x = suites.make_inputs(case, CPU, seed=1)
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    out = sdpa(*leaves, case.causal)
    grads = torch.autograd.grad(out, leaves, x.dout.double())
    exact = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    monkeypatch.setattr(truth, "_SCORES_AT_ONCE", 7 * case.seqlen_k)
    truths = truth.reference(case, x, backward=True, seed=3)
    assert len(truths) == case.batch * case.heads_k  # few enough here to compare all
    for pair in truths:
        for key, value in pair.values.items():
            expected = truth._pair(case, exact[key], pair.batch, pair.head_k)
            torch.testing.assert_close(value, expected.reshape(value.shape), rtol=0, atol=1e-12)


def test_a_wrong_row_and_a_nan_are_found():
    case = Case.parse("bf16 b4 h4/4 q512 k512 d64/64 full")
    x = suites.make_inputs(case, CPU, seed=5)
    truths = truth.reference(case, x, backward=False, seed=5)
    out = sdpa(x.q, x.k, x.v, causal=False)
    errors, fault = truth.check(case, {"out": out}, truths)
    assert fault == "" and 0 < errors["out"]["relative"] < 5e-3
    shifted = out.clone()
    shifted[0, 100, 0] = shifted[0, 101, 0]
    assert "worst row" in truth.check(case, {"out": shifted}, truths)[1]
    broken = out.clone()
    broken[-1, -1, -1, -1] = math.nan
    errors, fault = truth.check(case, {"out": broken}, truths)
    assert fault and errors["out"] == {"relative": None, "worst_row": None}
    errors, fault = truth.check(case, {"out": broken}, truths[:1])
    assert fault == "out: not finite outside the compared rows"


def test_gradients_that_are_summed_up_in_16_bits_are_rounded_more_often():
    """Those of torch's kernel for the CPU, whose limit grows with the length; gradients that are
    moved, or 2 % too large, are found."""
    case = Case.parse("bf16 b1 h1/1 q4096 k4096 d64/64 causal")
    x = suites.make_inputs(case, CPU, seed=5)
    truths = truth.reference(case, x, backward=True, seed=5)
    work = rivals.Sdpa(None, "").backward(case, x)
    named = dict(zip(("dq", "dk", "dv"), work.results(work.run()), strict=True))
    errors, fault = truth.check(case, named, truths, work.slack)
    assert fault == "" and errors["dk"]["relative"] < 4e-3 * work.slack
    assert 2 < work.slack < 3 and work.slack > rivals.Sdpa(None, "").forward(case, x).slack == 1
    shifted = named["dk"].roll(1, 1)
    assert truth.check(case, {"dk": shifted}, truths, work.slack)[1].startswith("dk: relative")
    assert "dk" in truth.check(case, {"dk": named["dk"] * 1.02}, truths, work.slack)[1]
