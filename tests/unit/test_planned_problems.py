"""Plans of thousands of random problems are those that were recorded, on every GPU."""

from __future__ import annotations

import json

import planned_problems
from planned_problems import KINDS


def test_plans_are_those_that_were_recorded():
    found = planned_problems.differences()
    assert not found, "\n".join([f"{len(found)} plans differ; the first:", *found[:5]])


def test_the_record_has_every_kind_of_call_and_mostly_plans():
    rows = [line.split("\t") for line in planned_problems.recorded()]
    assert len(rows) == planned_problems.COUNT
    problems, plans = ([json.loads(row[i]) for row in rows] for i in (1, 2))
    counts = {
        "dense": sum(p["op"] == "fwd" and "varlen" not in p for p in problems),
        "packed": sum(p["op"] == "fwd" and "varlen" in p for p in problems),
        "backward": sum(p["op"] == "bwd" for p in problems),
        "cached": sum(p["op"] == "decode" and "page_size" not in p for p in problems),
        "paged": sum("page_size" in p for p in problems),
    }
    assert set(counts) == set(KINDS) and min(counts.values()) > 800
    assert sum("error" in plan for plan in plans) < planned_problems.COUNT // 5
    kernels = [plan["kernel"] for plan in plans if "kernel" in plan]
    assert len(set(kernels)) > 120  # of 170 or so
