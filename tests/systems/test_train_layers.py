"""examples/train_layers.py: its layers train as torch's do, and it notices those that do not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from flash_cute.core import AttentionLayer

pytest.importorskip("matplotlib")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> Callable[[], int]:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    main = importlib.import_module("train_layers").main
    options = f"--steps 30 --batch 8 --device {device} --out {tmp_path}"
    return lambda: main(options.split())


def test_trains_as_torch_does(example, tmp_path, capsys):
    assert example() == 0
    assert "apart" in capsys.readouterr().out
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_notices_a_mask_that_is_ignored(example, monkeypatch):
    right = AttentionLayer.forward
    monkeypatch.setattr(AttentionLayer, "forward", lambda self, x, mask: right(self, x))
    assert example() == 1
