"""examples/train_gpt.py: its outputs, and that it notices a wrong attention."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flash_cute

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

STEPS = 30
TINY = f"--device cpu --steps {STEPS} --layers 2 --width 64 --heads 2 --context 64 --batch 4"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs the demo on a tiny model, writes to tmp_path, and returns the exit status."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    main = importlib.import_module("train_gpt").main
    return lambda *options: main([*TINY.split(), "--out", str(tmp_path), *options])


def test_writes_table_plot_and_numbers(
    demo: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo() == 0
    printed = capsys.readouterr().out
    assert all(row in printed for row in ("final train loss", "held-out loss", "tokens/s"))
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["agree"]
    for run in results["runs"].values():
        assert len(run["losses"]) == len(run["step_times"]) == STEPS
        assert run["losses"][-1] < run["losses"][0] - 1


# Heads have 32 dims, so the right scale is 0.177.
@pytest.mark.parametrize(
    "wrong", [{"causal": False}, {"causal": True, "softmax_scale": 0.35}], ids=str
)
def test_fails_if_attention_is_wrong(
    demo: Callable[..., int],
    wrong: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = flash_cute.flash_attn_func
    monkeypatch.setattr(flash_cute, "flash_attn_func", lambda *qkv, **_: right(*qkv, **wrong))
    assert demo() == 1
    assert "FAILED" in capsys.readouterr().out


def test_grouped_heads(demo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--heads-k", "1") == 0
    assert "heads_k=1" in capsys.readouterr().out


def test_refuses_heads_that_are_no_groups(demo: Callable[..., int]) -> None:
    with pytest.raises(ValueError, match="multiple of heads_k = 3, not 2"):
        demo("--heads-k", "3")


def test_refuses_a_short_text(demo: Callable[..., int], tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too little to learn from")
    with pytest.raises(SystemExit, match="too short: 24 bytes"):
        demo("--text", str(text))
