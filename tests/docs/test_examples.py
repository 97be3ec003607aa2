"""The examples run, each as its docstring says."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "notebook_benchmark": (["--batch", "1", "--seqlen", "64"], r"fwd +full +[\d.]+ ms"),
    "choose_tiles": (["--seqlen", "70"], r"Bc=100 +Br=7 +differs by"),
    "fp8_inputs": (["--seqlen", "100"], r"each head: error 0\.0"),
    "pack_sequences": (["--longest", "40"], r"rows in place of"),
}


@pytest.mark.parametrize("name", SHORT)
def test_short_examples(device, name, capsys):
    arguments, words = SHORT[name]
    if name == "notebook_benchmark" and device == "cuda":
        pytest.importorskip("triton")
    example = importlib.import_module(f"examples.{name}")
    assert example.main(["--device", device, *arguments]) == 0
    assert re.search(words, capsys.readouterr().out)


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_explain_a_call(gpu, capsys):
    assert importlib.import_module("examples.explain_a_call").main(["--gpu", gpu]) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"runs (fwd|bwd|decode)_sm", text)) == 3 and "not fwd_sm" in text


def test_as_a_script():
    script = ROOT / "examples" / "explain_a_call.py"
    assert subprocess.run([sys.executable, script], capture_output=True).returncode == 0


def test_notebook_shapes_by_default():
    example = importlib.import_module("examples.notebook_benchmark")
    assert (example.HEADS, example.DIM, example.SCALE) == (16, 64, 1.3)


def test_every_example_is_run_by_a_test():
    texts = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = [path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "gpt"]
    assert len(names) >= 6
    assert [name for name in names if name not in texts] == []


def test_progress_is_said_at_the_first_step_every_seconds_and_the_last(capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    progress = importlib.import_module("progress")
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    step = progress.Progress("step", 9)
    for second in (0, 1, 2, 6, 7, 8, 9, 10, 10):
        now[0] = float(second)
        step(loss=second / 2)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "step: 1 of 9, loss 0.000",
        "step: 4 of 9, loss 3.000",
        "step: 9 of 9, loss 5.000",
    ]


@pytest.mark.parametrize("name", ["generate", "compress_model", "train_fp8", "train_layers"])
def test_examples_that_take_minutes_say_where_they_are(name):
    assert "Progress(" in (ROOT / "examples" / f"{name}.py").read_text()


def test_sparse_document(device, capsys):
    example = importlib.import_module("examples.sparse_document")
    assert example.main(["--device", device, "--tokens", "4096", "--sparsity", "0.8"]) == 0
    assert re.search(r"sparse: [\d.]+ ms, 0\.(79|80)\d left out", capsys.readouterr().out)


def test_sparse_gpt(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("sparse_gpt")
    arguments = "--steps 3 --gate-steps 2 --context 256 --width 64 --layers 1 --tolerance 9"
    monkeypatch.setattr(example, "RATIOS", (0.5,))
    assert example.main([*arguments.split(), "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found) == 7 and all(found[name]["0.5"] > 1 for name in found if name != "dense")
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert "dynamic_threshold  0.5: " in capsys.readouterr().out
    assert example.main([*arguments.split(), "--out", str(tmp_path), "--tolerance", "-0.5"]) == 1
