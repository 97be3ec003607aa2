"""benchmarks/plans.py without a GPU: whose plans it measures, and what it says of the picks."""

import pytest
import torch

from benchmarks import plans
from benchmarks.random_cases import RandomCase
from flash_cute import kernels

CASES = {
    "dense": "dense-forward h16/2 d128 causal 2x2048",
    "packed": "packed-forward h24/2 d256 causal 300,17,900",
    "window": "dense-forward h16/8 d256 window1024 1x3000",
    "decode": "decode h20/4 d128 causal 9000,21800 q8 of 24000",
}


@pytest.mark.parametrize("name", CASES)
def test_other_plans_are_those_of_a_call_under_limits(name):
    problem = plans.problem_of(RandomCase.parse(CASES[name]))
    taken = kernels.plan(problem, "h200")
    others = plans.others(problem, "h200")
    assert others
    for choice, other in others.items():
        assert other == plans.plan_of(choice, problem, "h200")
        assert other.kernel.id == choice.kernel
        assert choice.num_splits in (None, other.num_splits)
        assert (other.kernel, other.num_splits) != (taken.kernel, taken.num_splits)


def test_problems_are_what_the_host_knows_of_a_case():
    decode = plans.problem_of(RandomCase.parse(CASES["decode"]))
    assert (decode.op, decode.batch, decode.seqlen_q, decode.seqlen_k) == ("decode", 2, 8, 24000)
    assert decode.lengths and decode.causal
    packed = plans.problem_of(RandomCase.parse(CASES["packed"]))
    assert (packed.seqlen_q, packed.total_q, packed.varlen) == (900, 1217, True)
    window = plans.problem_of(RandomCase.parse(CASES["window"]))
    assert window.window_size == (1024, -1) and window.causal and not window.varlen


def test_picks_are_good_within_five_per_cent():
    rows = [{"group": "decode", "ratio": ratio} for ratio in (1.0, 1.05, 1.21, None)]
    assert plans.summary(rows) == {
        "decode": {
            "cases": 3,
            "near": 2 / 3,
            "geomean": pytest.approx(1.27050 ** (1 / 3)),
            "most": 1.21,
        }
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert plans.main([]) == 2
    assert "whose times these are" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--cases=0", "--rounds=0"])
def test_a_run_of_nothing_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        plans.main([option])
    assert "a round and a case are the least" in capsys.readouterr().err


def test_a_plan_that_fails_is_no_time(monkeypatch):
    """A case on the CPU, whose library has no kernels: the pick alone runs, then nothing."""
    case = RandomCase.parse("dense-forward h4/2 d64 causal 2x70")
    monkeypatch.setattr(plans.kernels, "plan", lambda problem, gpu: "the pick")
    monkeypatch.setattr(plans, "others", lambda problem, gpu: {})
    row = plans.measure(case, torch.device("cpu"), 1)
    assert (row["ratio"], row["best"]) == (1, plans.OURS)
    assert row["plans"] == {plans.OURS: "the pick"}
    monkeypatch.setattr(plans, "timed", lambda works, device, rounds, notes: {})
    assert plans.measure(case, torch.device("cpu"), 1)["ratio"] is None


def test_an_error_ends_a_case_and_not_the_run(monkeypatch):
    """Of the second run, too: the first one's ratio does not stay."""
    case = RandomCase.parse("dense-forward h4/2 d64 causal 2x70")
    monkeypatch.setattr(plans.kernels, "plan", lambda problem, gpu: "the pick")
    monkeypatch.setattr(plans, "others", lambda problem, gpu: {})
    found = iter([{plans.OURS: 2.0, "another plan": 1.0}])
    monkeypatch.setattr(plans, "timed", lambda *_: next(found))
    row = plans.measure(case, torch.device("cpu"), 1)
    assert (row["ratio"], row["us"]) == (None, {})
    assert "could not be measured: StopIteration" in row["notes"][plans.OURS]
