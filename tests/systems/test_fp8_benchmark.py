"""benchmarks/fp8_linear.py: what it reports, on the CPU."""

from __future__ import annotations

import json

from benchmarks import fp8_linear

TINY = "--device cpu --eager --tokens 64 --widths 32 --rounds 2 --calls 1"


def test_report(tmp_path, capsys):
    path = tmp_path / "fp8.json"
    assert fp8_linear.main([*TINY.split(), "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    ours, bf16 = row["candidates"]["flash_cute"], row["candidates"]["bf16"]
    assert all(entry["median_ms"] > 0 for entry in (ours, bf16))
    assert all(17 < decibels < 45 for decibels in ours["decibels"])
    assert all(decibels > 45 for decibels in bf16["decibels"])
    assert ours["kept_bytes"] <= 0.55 * bf16["kept_bytes"]
    assert "flash_cute" in capsys.readouterr().out
