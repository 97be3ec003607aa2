"""benchmarks/sparse.py measures what its columns say."""

from __future__ import annotations

import json

import pytest

from benchmarks import sparse
from flash_cute.sparse import SparsePattern


def test_rows_of_all_patterns(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "found.json", tmp_path / "found.png"
    arguments = "--device cpu --seqlen 2048 --heads 1 --dim 16 --ratios 0.5 0.9 --calls 1 --causal"
    assert sparse.main([*arguments.split(), "--json", str(file), "--plot", str(plot)]) == 0
    found = json.loads(file.read_text())
    assert [row["pattern"] for row in found["rows"][::2]] == [x.value for x in SparsePattern]
    for row in found["rows"]:
        assert abs(row["realised"] - row["asked"]) < 0.06
        assert row["with_choice"] == pytest.approx(row["choose"] + row["forward"])
        assert row["backward"] > 0 and row["forward"] > 0
    assert min(found["dense_ms"]) > 0 and plot.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("\n") == 1 + 2 + len(found["rows"])
