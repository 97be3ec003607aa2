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
    for limit in others:
        other = limit.plan(problem, "h200")
        assert other.kernel.id == limit.id
        assert limit.num_splits in (None, other.num_splits)
        assert (other.kernel, other.num_splits) != (taken.kernel, taken.num_splits)


def test_problems_are_what_the_host_knows_of_a_case():
    decode = plans.problem_of(RandomCase.parse(CASES["decode"]))
    assert (decode.op, decode.batch, decode.seqlen_q, decode.seqlen_k) == ("decode", 2, 8, 24000)
    assert decode.lengths and decode.causal
    packed = plans.problem_of(RandomCase.parse(CASES["packed"]))
    assert (packed.seqlen_q, packed.total_q, packed.varlen) == (900, 1217, True)
    window = plans.problem_of(RandomCase.parse(CASES["window"]))
    assert window.window_size == (1024, 0) and not window.varlen


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
