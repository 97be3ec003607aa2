"""examples/train_llama_packed.py: both ways train alike, and documents that mix are noticed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("transformers", minversion="5.20")

from flash_cute.integrations import transformers


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    yield importlib.import_module("train_llama_packed")
    transformers.unregister()


@pytest.fixture
def run(example, tmp_path: Path) -> Callable[[], int]:
    options = f"--steps 20 --batch 4 --width 64 --layers 1 --device cpu --out {tmp_path}"
    return lambda: example.main(options.split())


def test_trains_alike(run, tmp_path, capsys):
    assert run() == 0
    printed = capsys.readouterr()
    assert "apart" in printed.out and "packed, flash_cute: 20 of 20" in printed.err
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_notices_documents_that_see_each_other(run, example, monkeypatch):
    def mixed(pieces):
        inputs = example.packed(pieces)
        inputs.pop("position_ids")
        return inputs

    monkeypatch.setitem(example.WAYS, "packed, flash_cute", ("flash_cute", mixed))
    assert run() == 1
