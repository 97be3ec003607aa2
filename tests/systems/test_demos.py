"""demos/: each script runs on the CPU, prints its table, and notices what is wrong."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DEMOS = Path(__file__).resolve().parents[2] / "demos"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMOS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hardware(capsys: pytest.CaptureFixture[str]):
    demo = load("hardware")
    assert demo.main(["--device", "cpu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "cpu: cpu" in printed and any(line.startswith("cuda: ") for line in printed)
    rows = {name: line for name in demo.MODELS for line in printed if line.startswith(name)}
    assert len(rows) == len(demo.MODELS)
    batches = [int(line.split()[-1]) for line in rows.values()]
    assert batches[0] > batches[1] > batches[2] > 0


def test_attention(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    demo = load("attention")
    monkeypatch.setattr(demo, "CALLS", 1)
    assert demo.main(["--device", "cpu", "--seqlen", "80"]) == 0
    printed = capsys.readouterr().out
    assert all(case in printed for case in demo.CASES)
    monkeypatch.setattr(demo, "written_out", lambda q, k, v, **_: v)
    assert demo.main(["--device", "cpu", "--seqlen", "8"]) == 1


def test_validation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    demo = load("validation")
    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert "twice too large" in printed and "gradients" in printed
    monkeypatch.setattr(demo.Broken, "forward", lambda self, x: self.attention(x, x, x)[0])
    assert demo.main() == 1


def test_every_demo_is_tested_and_runs_as_a_script():
    assert sorted(path.stem for path in DEMOS.glob("*.py")) == [
        "attention",
        "hardware",
        "validation",
    ]
    command = [sys.executable, str(DEMOS / "validation.py")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "nn.MultiheadAttention" in run.stdout


@pytest.mark.parametrize("page", ["hardware", "validation"])
def test_examples_of_the_pages_run(page: str):
    text = (DEMOS.parent / "docs" / f"{page}.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(example, {})
