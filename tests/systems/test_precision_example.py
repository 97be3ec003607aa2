"""examples/compress_model.py: fewer bytes, more loss, and one-bit layers gain over uniform bits."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

TINY = "--steps 12 --layers 2 --width 64 --heads 2 --context 32 --batch 4 --targets 0.6 0.75"


def test_it_writes_losses_over_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    main = importlib.import_module("compress_model").main
    assert main([*TINY.split(), "--one-bit", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "loss_over_bytes.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    points = {(p["strategy"], p["target"]): p for p in results["points"]}
    assert len(points) == 10
    assert all(p["savings"] >= p["target"] for p in points.values())
    assert all(abs(p["loss"] - results["loss"]) < 0.5 for p in points.values())
    off = {key: abs(p["loss"] - results["loss"]) for key, p in points.items()}
    assert off["entropy_based", 0.75] < off["uniform", 0.75]
    assert "entropy_based" in capsys.readouterr().out
