"""How fwd cuts its work on Hopper where queries are few: keys in parts, heads that share tiles."""

from __future__ import annotations

import itertools
import math

import checks
import pytest
import torch
from planned import plan

from flash_cute import kernels
from flash_cute.testing import bounds, memory
from flash_cute.testing.cases import Case, Inputs, VarlenCase, make_inputs

NAN, INF = math.nan, math.inf
BF16 = torch.bfloat16

PARTED = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (2000, 0)},
    "sink": {"sink": True, "dtype": torch.float16},
    "rules": {"softcap": 5.0, "alibi": "batch", "sink": True, "is_causal": True},
    "dropout": {"dropout_p": 0.3, "is_causal": True},
    "sharp": {"spread": 30.0},
}


@pytest.mark.parametrize("feature", PARTED)
@pytest.mark.parametrize(
    "dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
def test_parts_of_keys(cuda, dims, feature):
    """So few tiles of queries that a GPU would be idle: keys are cut into parts, and merged."""
    sizes = {"batch": 1, "heads": 6, "heads_k": 2, "seqlen_q": 130, "seqlen_k": 3000}
    assert plan("fwd", 1, 6, 130, 3000, dims[0]).num_splits > 1
    case = Case(**sizes, dim=dims[0], dim_v=dims[1], **({"dtype": BF16} | PARTED[feature]))
    inputs = make_inputs(case, cuda)
    results = checks.forward(inputs)
    for got, expected in zip(inputs.forward()[:2], results, strict=True):
        bounds.check_same_bits("of a second call, out or softmax_lse", got, expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_splits_of_packed_keys(cuda, is_causal):
    """Sequences without queries, without keys, and with fewer keys than parts have tiles."""
    lengths = {"lengths_q": (130, 0, 1, 64, 7), "lengths_k": (6000, 300, 2900, 0, 100)}
    rows = {"rows_before": 3, "rows_after": 5, "used_q": (130, 0, 1, 50, 7)}
    assert plan("fwd", 5, 4, 40, 1860, 128, varlen=True).num_splits > 1
    case = VarlenCase(heads=4, dim=128, is_causal=is_causal, dtype=BF16, **lengths, **rows)
    checks.forward(make_inputs(case, cuda))


def test_splits_write_only_the_outputs(cuda):
    case = Case(batch=1, heads=3, seqlen_q=70, seqlen_k=4000, dim=72, dtype=BF16)
    check_outputs_only(make_inputs(case, cuda))


def check_outputs_only(inputs: Inputs) -> None:
    """The results are right, and what lies around them in memory is untouched."""
    device, (batch, seqlen_q, heads, _) = inputs.q.device, inputs.q.shape
    out = memory.GuardedTensor(inputs.q.shape, BF16, device, 8)
    lse = memory.GuardedTensor((batch, heads, seqlen_q), torch.float32, device)
    arguments = (inputs.q, inputs.k, inputs.v)
    results = {"out": out.tensor, "softmax_lse": lse.tensor}
    torch.ops.flash_cute.fwd.out(*arguments, **inputs.options, **results)
    bounds.check_forward(out.tensor, lse.tensor, bounds.forward_oracle(inputs))
    out.check("out")
    lse.check("softmax_lse")


SHARED = [(4, 2, 64), (12, 2, 33), (8, 2, 32), (16, 2, 16), (16, 1, 5), (32, 1, 1), (16, 2, 17)]


@pytest.mark.parametrize("feature", PARTED)
@pytest.mark.parametrize(("heads", "heads_k", "seqlen_q"), SHARED)
def test_heads_that_share_tiles(cuda, heads, heads_k, seqlen_q, feature):
    """So few queries that a tile of them holds several heads of a group."""
    for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        sizes = {"heads": heads, "heads_k": heads_k, "seqlen_q": seqlen_q, "seqlen_k": 700}
        case = Case(
            **sizes, dim=dims[0], dim_v=dims[1], **({"dtype": BF16} | PARTED[feature]), batch=3
        )
        checks.forward(make_inputs(case, cuda))


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_that_share_tiles_of_sequences_end_to_end(cuda, is_causal):
    lengths = {"lengths_q": (17, 0, 32, 1, 9), "lengths_k": (6000, 300, 5, 0, 100)}
    rows = {"rows_before": 3, "rows_after": 5, "used_q": (17, 0, 30, 1, 9)}
    heads = {"heads": 16, "heads_k": 4}
    case = VarlenCase(**heads, dim=128, is_causal=is_causal, dtype=BF16, **lengths, **rows)
    checks.forward(make_inputs(case, cuda))


@pytest.mark.parametrize("seqlen_q", [9, 32])
def test_heads_that_share_tiles_write_the_outputs_only(cuda, seqlen_q):
    case = Case(batch=2, heads=8, heads_k=2, seqlen_q=seqlen_q, seqlen_k=9_000, dim=128, dtype=BF16)
    check_outputs_only(make_inputs(case, cuda))


GIVEN = {
    "one query": Case(batch=1, heads=16, heads_k=2, seqlen_q=1, seqlen_k=1000, dim=128, dtype=BF16),
    "few queries": Case(heads=8, seqlen_q=17, seqlen_k=900, heads_k=2, dtype=BF16, is_causal=True),
    "a tile": Case(heads=4, heads_k=2, seqlen_q=64, seqlen_k=2000, dim=96, dtype=torch.float16),
    "two tiles": Case(batch=1, heads=6, seqlen_q=130, seqlen_k=777, dim=192, dim_v=128, dtype=BF16),
    "window": Case(
        heads=8, heads_k=1, seqlen_q=15, seqlen_k=1500, dim=256, dtype=BF16, window=(700, 0)
    ),
    "rules": Case(
        heads=16, heads_k=4, seqlen_q=9, seqlen_k=800, dtype=BF16, softcap=5.0, alibi="batch",
        sink=True, is_causal=True,
    ),
    "sequences": VarlenCase(
        heads=8, heads_k=2, lengths_q=(17, 0, 32, 1, 9), lengths_k=(3000, 300, 5, 0, 100), dim=128,
        dtype=BF16, is_causal=True,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("name", GIVEN)
def test_num_splits_and_pack_gqa_that_are_given(cuda, name):
    """All numbers that a kernel for Hopper can have, also those that are never estimated."""
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("not a Hopper GPU")
    case = GIVEN[name]
    inputs = make_inputs(case, cuda)
    oracle = bounds.forward_oracle(inputs)
    options = {
        "causal": case.is_causal, "window_size": case.window,
        "softcap": case.softcap > 0, "alibi": bool(case.alibi),
    }  # fmt: skip
    if inputs.lengths:
        options |= {"varlen": True, "total_q": len(inputs.q), "total_k": len(inputs.k)}
        options |= {"seqlen_q": max(case.lengths_q), "seqlen_k": max(case.lengths_k)}
        options |= {"batch": len(case.lengths_q)}
    else:
        options |= {"seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k, "batch": case.batch}
    problem = kernels.Problem(
        "fwd", case.dtype, heads=case.heads, heads_k=case.heads_k, head_dim=case.dim,
        head_dim_v=case.dim_v, **options,
    )  # fmt: skip
    verdicts = kernels.explain(problem)
    seen = set()
    for kernel in [x.id for x in verdicts if x.verdict != "refused" and "_sm90_" in x.id]:
        for num_splits, pack_gqa in itertools.product((1, 2, 3, 5, 8, 13, 64), (1, 2, 4, 8)):
            with kernels.only(kernel, num_splits=num_splits, pack_gqa=pack_gqa):
                try:
                    planned = kernels.plan(problem)
                except RuntimeError:  # it cannot have these
                    with pytest.raises(RuntimeError, match="; it supports"):
                        inputs.forward()
                    continue
                assert planned.kernel.id == kernel
                assert (planned.num_splits, planned.pack_gqa) == (num_splits, pack_gqa)
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                out, lse, _, _ = inputs.forward()
                peak = torch.cuda.max_memory_allocated() - before
                again = inputs.forward()
            bounds.check_forward(out, lse, oracle)
            bounds.check_same_bits("out of a second call", again[0], out)
            bounds.check_same_bits("softmax_lse of a second call", again[1], lse)
            assert peak >= planned.workspace_bytes
            seen.add((num_splits, pack_gqa))
    assert {1, 2, 3} <= {num_splits for num_splits, _ in seen}
    grouped = case.heads_k is not None and name != "two tiles"
    assert ({1, 2} if grouped else {1}) <= {pack_gqa for _, pack_gqa in seen}


@pytest.mark.parametrize("is_causal", [False, True])
def test_special_values_in_splits(cuda, is_causal):
    case = Case(batch=1, seqlen_q=70, seqlen_k=4000, dtype=BF16, is_causal=is_causal)
    inputs = make_inputs(case, cuda)
    before = inputs.forward()[0]
    inputs.q[0, 3, 0, 5], inputs.q[0, 9, 0, 0], inputs.k[0, 3975, 1, 1] = NAN, INF, NAN
    out, _ = checks.forward(inputs)
    finite = bounds.forward_oracle(inputs).out.isfinite()
    bounds.check_same_bits("out", out[finite], before[finite])
