"""The benchmark of the CPU runs, and the page that quotes it says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import cpu
from benchmarks.rivals import OURS

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_run(tmp_path, capsys):
    options = ["--longest", "16", "--rounds", "2", "--target-ms", "1", "--dtypes", "fp32,bf16"]
    path = tmp_path / "cpu.json"
    assert cpu.main([*options, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["mode"]) for row in rows] == [
        (str(case), mode) for case in cpu.cases(("fp32", "bf16"), 16) for mode in cpu.MODES
    ]
    assert all(len(row["ratios"]) == 2 and row["speed"] > 0 for row in rows)
    assert "| fp32 b1 h8/8 q16 k16 d64/64 causal |" in capsys.readouterr().out


@pytest.mark.parametrize("causal", [0, 1])
def test_both_compute_the_same(causal):
    case = [x for x in cpu.cases(["fp32"], 128) if x.causal == bool(causal)][-1]
    for mode in cpu.MODES:
        works = cpu.works(case, mode)
        ours, theirs = works[OURS].run(), works[cpu.RIVAL].run()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_unknown_dtypes_are_refused():
    with pytest.raises(SystemExit):
        cpu.main(["--dtypes", "fp8"])


def test_the_table_is_what_was_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())["rows"]
    assert "\n".join(cpu.table(rows)) in (ROOT / "docs" / "pytorch.md").read_text()
