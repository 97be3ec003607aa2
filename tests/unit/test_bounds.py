"""The comparisons that all tests rely on: they pass what is rounded, and find what is wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_cute.testing import bounds
from flash_cute.testing.cases import Case, make_inputs

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def test_compare_tells_the_largest_share_of_a_bound():
    expected, bound = torch.tensor([1.0, 2.0, INF, NAN]), torch.full((4,), 0.5)
    assert bounds.compare("x", expected.clone(), expected, bound) == 0
    assert bounds.compare("x", torch.tensor([1.0, 2.25, INF, NAN]), expected, bound) == 0.5
    assert bounds.compare("x", torch.empty(0), torch.empty(0), torch.empty(0)) == 0


@pytest.mark.parametrize(
    ("got", "said"),
    [
        ([1.0, 3.0, INF, NAN], r"x\[1\]: got 3, expected 2, bound 0.5, error 2 times that; 1 of 4"),
        ([1.0, NAN, INF, NAN], r"x\[1\]: got nan"),
        ([1.0, 2.0, -INF, NAN], r"x\[2\]: got -inf"),
        ([1.0, 2.0, INF, 0.0], r"x\[3\]: got 0, expected nan"),
        ([1.0, 2.0, INF], "shape"),
    ],
)
def test_compare_names_the_worst_element(got, said):
    expected, bound = torch.tensor([1.0, 2.0, INF, NAN]), torch.full((4,), 0.5)
    with pytest.raises(AssertionError, match=said):
        bounds.compare("x", torch.tensor(got), expected, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rounded_forward_passes_and_a_wrong_one_does_not(dtype):
    case = Case(seqlen_q=20, seqlen_k=33, is_causal=True, dropout_p=0.3, dtype=dtype)
    oracle = bounds.forward_oracle(make_inputs(case, "cpu"))
    statistic = torch.promote_types(dtype, torch.float32)
    out, lse = oracle.out.to(dtype), oracle.softmax_lse.to(statistic)
    softmax = oracle.softmax.to(dtype)
    assert bounds.check_forward(out, lse, oracle) <= 1
    assert bounds.check_softmax(softmax, oracle) <= 1
    shifted = out.roll(1, -1)
    with pytest.raises(AssertionError, match="out"):
        bounds.check_forward(shifted, lse, oracle)
    with pytest.raises(AssertionError, match="softmax_lse"):
        bounds.check_forward(out, lse + 1e-3, oracle)
    for place, value in {(0, 0, 5, 3): -softmax[0, 0, 5, 3], (1, 1, 2, 30): 1e-3}.items():
        wrong = softmax.clone()  # dropout forgotten, or a key weighed that is hidden
        wrong[place] = value
        with pytest.raises(AssertionError, match=r"softmax\[" + str(list(place))[1:-1]):
            bounds.check_softmax(wrong, oracle)


def test_numbers_that_fp16_rounds_to_0_are_no_errors():
    case = Case(seqlen_q=4, seqlen_k=33, dropout_p=0.5, spread=30.0, dtype=torch.float16)
    oracle = bounds.forward_oracle(make_inputs(case, "cpu"))
    softmax = oracle.softmax.half()
    gone = (softmax == 0) & (oracle.softmax != 0)
    assert gone.any() and bounds.check_softmax(softmax, oracle) <= 1
    with pytest.raises(AssertionError, match="softmax"):
        bounds.check_softmax(-softmax, oracle)


def test_an_exact_backward_of_a_rounded_lse_passes():
    """ALiBi of far keys makes softmax_lse large, and fp32 is what backward gets it in."""
    case = Case(
        batch=1, seqlen_q=3000, seqlen_k=8, dim=32, alibi="heads", softmax_scale=1e-3,
        dtype=torch.float32,
    )  # fmt: skip
    inputs = make_inputs(case, "cpu")
    inputs.options["alibi_slopes"] = torch.full((2,), 0.5)
    exact = {name: getattr(inputs, name).double() for name in ("q", "k", "v", "dout", "dlse")}
    wide = dataclasses.replace(inputs, **exact)
    out, lse, _, _ = wide.forward()
    grads = {name: x.float() for name, x in wide.backward(out, lse.float().double()).items()}
    assert 0.1 < bounds.check_gradients(grads, inputs, out.float(), with_dlse=False) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_a_single_keys_gradient_may_be_rounded_twice(seed):
    """Exact but for dS and dQ, which every kernel rounds to bf16; the chain may be luckier."""
    case = Case(
        heads=8, heads_k=1, seqlen_q=400, seqlen_k=1, dim=85, dim_v=32, softcap=30.0,
        alibi="heads", dtype=torch.bfloat16,
    )  # fmt: skip
    inputs = make_inputs(case, "cpu", seed)
    exact = {name: getattr(inputs, name).double() for name in ("q", "k", "v", "dout", "dlse")}
    wide = dataclasses.replace(inputs, **exact)
    grads = wide.backward(*wide.forward()[:2], wide.dlse)
    k = wide.k * case.dim**-0.5
    ds = (grads["q"] * k).sum(-1, keepdim=True) / (k * k).sum(-1, keepdim=True)
    grads = {name: x.bfloat16() for name, x in grads.items()}
    grads["q"] = (ds.bfloat16().double() * k).bfloat16()
    assert 0.4 < bounds.check_gradients(grads, inputs, inputs.forward()[0], with_dlse=True) <= 1


def test_large_logits_that_alibi_cancels():
    """softmax_lse is small, and what fp32 loses of its summands is not."""
    case = Case(
        heads=8, heads_k=1, dim=256, alibi="batch", softmax_scale=0.3, spread=3.0, seqlen_q=147,
        seqlen_k=35, dtype=torch.bfloat16,
    )  # fmt: skip
    oracle = bounds.forward_oracle(make_inputs(case, "cpu"))
    error = 0.5 * bounds.ROUNDING_UNIT[torch.float32] * oracle.logit_size
    got = (oracle.softmax_lse + error).float()
    assert bounds.check_lse("softmax_lse", got, oracle.softmax_lse, oracle.logit_size) <= 1
    with pytest.raises(AssertionError, match="softmax_lse"):
        bounds.check_lse("softmax_lse", got + 8 * error, oracle.softmax_lse, oracle.logit_size)


@pytest.mark.parametrize("name", ["q", "k", "v", "sink"])
def test_a_wrong_gradient_is_named(name):
    inputs = make_inputs(Case(seqlen_q=20, seqlen_k=33, sink=True, dtype=torch.bfloat16), "cpu")
    out, lse, _, _ = inputs.forward()
    grads = inputs.backward(out, lse, inputs.dlse)
    assert bounds.check_gradients(grads, inputs, out, with_dlse=True) <= 1
    with pytest.raises(AssertionError, match=f"d{name}.*times what is allowed"):
        bounds.check_gradients({**grads, name: grads[name] * 1.1}, inputs, out, with_dlse=True)
    with pytest.raises(AssertionError, match=f"d{name}"):
        bounds.check_gradients({**grads, name: grads[name] * NAN}, inputs, out, with_dlse=True)


def test_where_the_chain_overflows_the_floor_alone_is_allowed():
    """Dropout of nearly everything has a factor that fp16 does not hold."""
    case = Case(seqlen_q=65, seqlen_k=70, dropout_p=1 - 2.0**-18, dtype=torch.float16)
    inputs = make_inputs(case, "cpu")
    out, lse, _, _ = inputs.forward()
    grads = inputs.backward(out, lse)
    assert grads["q"].any() and bounds.check_gradients(grads, inputs, out) < 0.1
    with pytest.raises(AssertionError, match=r"dq.*times what is allowed"):
        bounds.check_gradients({**grads, "q": grads["q"] * 1.1}, inputs, out)
