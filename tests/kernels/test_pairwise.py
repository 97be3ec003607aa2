"""Every pair of features together, forward and backward, against the fp64 oracle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flash_cute.call import validate
from flash_cute.testing.cases import LAYOUTS, Case, VarlenCase
from flash_cute.testing.pairwise import pairwise
from flash_cute.testing.verify import verify_families

INT_MAX = 2**31 - 1
DIMS = {str(dim): (dim, dim) for dim in (32, 40, 64, 96, 128, 192, 256)}
DIMS |= {"192v128": (192, 128), "64v128": (64, 128)}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (30, 20)},
    "causal_window": {"is_causal": True, "window": (40, 10)},
    "left_0": {"window": (0, -1)},
    "right_0": {"window": (-1, 0)},
    "diagonal": {"window": (0, 0)},
    "left_max": {"window": (INT_MAX, 5)},
    "right_max": {"window": (5, INT_MAX)},
    "max": {"window": (INT_MAX, INT_MAX)},
}
LENGTHS = {"fewer": (70, 150), "equal": (129, 129), "more": (150, 70), "tile": (64, 128),
           "below_tile": (127, 63), "above_tile": (65, 129), "no_query": (0, 70),
           "no_key": (70, 0), "one_query": (1, 130), "one_key": (130, 1)}  # fmt: skip
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}
FACTORS: dict[str, list[Any]] = {
    "layout": list(LAYOUTS),
    "lengths": list(LENGTHS),
    "mask": list(MASKS),
    "dims": list(DIMS),
    "batch": ["dense", "varlen", "gaps", "used"],
    "heads": list(HEADS),
    "dtype": list(validate.CUDA_DTYPES),
    "alibi": ["", "heads", "batch"],
    "sink": [None, torch.float32, "as q"],
    "dropout_p": [0.0, 0.17, 0.5],
    "softmax_scale": [None, 0.2, -0.1],
    "softcap": [0.0, 4.0],
    "deterministic": [False, True],
    "with_dlse": [False, True],
    "sparse": ["", "whole", "halves", "pairs"],
    "list_heads": ["one", "keys", "queries"],
}


def impossible(pair: dict[str, Any]) -> bool:
    """Packed tensors share their lengths and dims, packed queries also the heads.

    Equal rows, which expanded_batch would make of a packed batch, make the unfused chain exact.
    """
    layout, others = pair.get("layout"), set(pair.values())
    different_dims = bool(others & {"192v128", "64v128"})
    if layout == "qkvpacked":
        return different_dims or bool(others & (LENGTHS.keys() - {"equal"} | {"gqa", "mqa"}))
    if layout == "expanded_batch":
        return bool(others & {"varlen", "gaps", "used"})
    return layout == "kvpacked" and different_dims


ROWS = pairwise(FACTORS, impossible)


def case_of(row: dict[str, Any]) -> Case | VarlenCase:
    (heads, heads_k), (dim, dim_v) = HEADS[row["heads"]], DIMS[row["dims"]]
    problem: dict[str, Any] = {
        "heads": heads, "heads_k": heads_k, "dim": dim, "dim_v": dim_v, **MASKS[row["mask"]],
        "sink": row["sink"] is not None,
        "sink_dtype": row["dtype"] if row["sink"] == "as q" else torch.float32,
    }  # fmt: skip
    same = (
        "layout", "dtype", "alibi", "dropout_p", "softmax_scale", "softcap", "sparse", "list_heads",
    )  # fmt: skip
    problem |= {name: row[name] for name in same}
    seqlen_q, seqlen_k = LENGTHS[row["lengths"]]
    if row["batch"] == "dense":
        batch = 1 if row["layout"] == "wild_unit_strides" else 2
        return Case(**problem, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    others = ((0, 0), (33, 33), (1, 1)) if row["lengths"] == "equal" else ((0, 20), (33, 0), (1, 7))
    lengths_q, lengths_k = zip((seqlen_q, seqlen_k), *others, strict=True)
    if row["batch"] != "varlen":
        problem |= {"rows_before": 3, "rows_after": 5}
    if row["batch"] == "used":
        used_q, used_k = (tuple(n - n // 4 for n in lengths) for lengths in (lengths_q, lengths_k))
        problem |= {"used_q": used_q, "used_k": used_k}
    return VarlenCase(**problem, lengths_q=lengths_q, lengths_k=lengths_k)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_pairs_of_features(make, row):
    verify_families(make(case_of(row)), row["with_dlse"], row["deterministic"])


def test_pairwise_holds_every_pair_that_is_possible():
    for a, b in itertools.combinations(FACTORS, 2):
        pairs = [{a: x, b: y} for x in FACTORS[a] for y in FACTORS[b]]
        found = [{a: row[a], b: row[b]} for row in ROWS]
        assert all((pair in found) != impossible(pair) for pair in pairs)


def test_pairwise_needs_few_rows_and_repeats_them():
    factors = {name: range(4) for name in "abcdefghij"}
    rows = pairwise(factors)
    assert rows == pairwise(factors)
    assert 16 <= len(rows) <= 40  # all combinations: 4^10
    assert len(pairwise({"a": "xy", "b": "xyz"})) == 6
    assert pairwise({"a": "xy"}) == [] and pairwise({"a": "xy", "b": ""}) == []


def test_pairwise_names_values_that_exclude_each_other():
    with pytest.raises(ValueError, match="c: every value is excluded by"):
        pairwise({"a": "x", "b": "y", "c": "z"}, lambda pair: "z" in pair.values())
