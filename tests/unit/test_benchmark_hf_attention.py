"""The benchmark of an unchanged model runs, and a candidate that is wrong is not timed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.20")

from benchmarks import hf_attention, report

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--device", "cpu", "--layers", "1", "--width", "512", "--tokens", "64", "--rounds", "2"]


@pytest.fixture(autouse=True)
def unregistered():
    yield
    hf_attention.transformers.unregister()


def test_a_short_run(tmp_path, capsys):
    path = tmp_path / "hf.json"
    options = [*TINY, "--target-ms", "1", "--seqlens", "32", "--json", str(path)]
    assert hf_attention.main(options) == 0
    result = json.loads(path.read_text())
    rows = [row for row in result["rows"] if row["part"] == "model"]
    assert [row["case"] for row in rows] == [f"{kind}, 2 x 32" for kind in hf_attention.KINDS]
    of_masks = result["rows"][len(rows) :]
    assert len(of_masks) == 2 * len(hf_attention.MASKS)
    for row in result["rows"]:
        names = {"sdpa", "sdpa.activate()"}
        assert set(row["ms"]) == names | ({"flash_cute", "eager"} if row in rows else set())
        assert row["speed"]["sdpa"] == 1
        assert row["failures"].keys() == {"sdpa, cuDNN"}  # there is none on a CPU
    printed = capsys.readouterr().out
    assert "| padded prompt, 2 x 32 |" in printed and "n/a, sdpa, cuDNN: " in printed
    page = tmp_path / "page.md"
    page.write_text(f"a\n{hf_attention.BEGIN}\nold\n{hf_attention.END}\nb")
    assert hf_attention.main(["--json", str(path), "--page", str(page)]) == 0
    made = page.read_text()
    assert made.startswith("a\n") and made.endswith("\nb") and "old" not in made
    assert all(hf_attention.cells(row) in made for row in result["rows"])


def test_the_page_holds_what_was_measured():
    """Before it was measured the page has no figure."""
    page = (ROOT / "docs" / "unchanged_models.md").read_text()
    results = ROOT / "benchmarks" / "results" / "hf_attention_h200.json"
    if results.exists():
        assert hf_attention.with_tables(page, report.load(results)) == page
    else:
        _, _, rest = page.partition(hf_attention.BEGIN)
        assert rest.partition(hf_attention.END)[0].strip() == "Not measured yet."


def test_eager_attention_is_left_out_of_long_rows():
    parts = hf_attention.rows_of(
        torch.device("cpu"),
        argparse.Namespace(
            layers=1, width=512, tokens=32, seqlens="32", rounds=1, eager_up_to=31,
            target_ms={"model": 1.0, "sdpa": 1.0},
        ),
    )  # fmt: skip
    assert "eager" not in next(parts)["ms"]


def test_each_candidate_runs_its_own_attention():
    model = hf_attention.stack(1, 512, torch.device("cpu"), torch.float32)
    given = hf_attention.inputs("padded prompt", 3, 16, torch.device("cpu"))
    lengths = given["attention_mask"].sum(1)
    assert lengths[0] == 16 and len(set(lengths.tolist())) > 1
    chosen = {}
    for name in hf_attention.CANDIDATES:
        with hf_attention.work(model, name, "prompt", given).scope():
            chosen[name] = model.config._attn_implementation
            assert not torch.is_grad_enabled()
    assert chosen["flash_cute"] == "flash_cute" and chosen["sdpa, cuDNN"] == "sdpa"


def test_wrong_candidates_are_found():
    model = hf_attention.stack(1, 512, torch.device("cpu"), torch.float32)
    given = hf_attention.inputs("prompt", 2, 16, torch.device("cpu"))
    names = ("sdpa", "flash_cute")
    works = {name: hf_attention.work(model, name, "prompt", given) for name in names}
    assert hf_attention.wrong(works) == {}
    larger = dataclasses.replace(
        works["flash_cute"], results=lambda out: (1.1 * out.flatten(0, 1),)
    )
    works["flash_cute"] = larger
    assert hf_attention.wrong(works).keys() == {"flash_cute"}
