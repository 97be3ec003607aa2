"""Types of the ops are those of their schemas, and calls of a released version stay possible."""

from __future__ import annotations

import re

import pytest

op_stubs = pytest.importorskip("op_stubs", reason="tools/ of the source tree is not on the path")
signatures = pytest.importorskip("signatures")
CALL = re.compile(r"flash_cute::(\S+)\((.*)\) -> (.*)")
CURRENT = {str(schema).partition("(")[0]: str(schema) for schema in op_stubs.schemas()}
RELEASED = op_stubs.FROZEN.read_text().splitlines()


def parts(schema: str) -> tuple[list[str], list[str], str]:
    """Arguments by place, those by name, and the results."""
    _, arguments, results = CALL.fullmatch(schema).groups()
    by_place, _, by_name = arguments.partition(", *, ")
    return by_place.split(", "), by_name.split(", ") if by_name else [], results


def takes(new: str, old: str) -> bool:
    """Whether calls of the old schema are calls of the new one, with the same results."""
    (first, names, results), (old_first, old_names, old_results) = parts(new), parts(old)
    added = [*first[len(old_first) :], *(x for x in names if x not in old_names)]
    return (
        first[: len(old_first)] == old_first
        and set(old_names) <= set(names)
        and all("=" in argument for argument in added)
        and results == old_results
    )


def test_types_are_those_of_the_schemas():
    assert op_stubs.is_current()


@pytest.mark.parametrize("old", RELEASED, ids=lambda line: line.partition("(")[0])
def test_calls_of_the_release_stay_possible(old):
    assert takes(CURRENT[old.partition("(")[0]], old)


def test_types_of_the_functions_are_of_their_signatures():
    assert signatures.is_current(), "python tools/signatures.py --write"


def test_changes_of_a_schema_are_classified():
    old = "flash_cute::f(Tensor q, int n=1, *, Tensor? out=None) -> Tensor"
    assert takes(old, old)
    assert takes(old.replace("n=1", "n=1, bool b=False"), old)
    assert takes(old.replace("out=None", "out=None, int m=2"), old)
    for change in (("n=1", "n=2"), ("int n=1, ", ""), ("n=1", "n=1, bool b"), ("-> T", "-> T?")):
        assert not takes(old.replace(*change), old)


def test_typed_ops_are_the_ops():
    import torch

    from flash_cute.ops.typed import OPS

    q = torch.randn(1, 5, 2, 8)
    out, softmax_lse, row_max, softmax = OPS.fwd(q, q, q, is_causal=True)
    assert out.shape == q.shape and softmax_lse.shape == (1, 2, 5)
    assert row_max is softmax is None
