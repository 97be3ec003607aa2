"""The benchmark of an unchanged model runs, and a candidate that is wrong is not timed."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

pytest.importorskip("transformers", minversion="5.20")

from benchmarks import hf_attention

TINY = ["--device", "cpu", "--layers", "1", "--width", "512", "--tokens", "64", "--rounds", "2"]


@pytest.fixture(autouse=True)
def unregistered():
    yield
    hf_attention.transformers.unregister()


def test_a_short_run(tmp_path, capsys):
    path = tmp_path / "hf.json"
    options = [*TINY, "--target-ms", "1", "--seqlens", "32", "--json", str(path)]
    assert hf_attention.main(options) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == [f"{kind}, 2 x 32" for kind in hf_attention.KINDS]
    for row in rows:
        assert set(row["ms"]) == {"sdpa", "sdpa.activate()", "flash_cute"}
        assert row["speed"]["sdpa"] == 1
        assert row["failures"].keys() == {"sdpa, cuDNN"}  # there is none on a CPU
    printed = capsys.readouterr().out
    assert "| padded prompt, 2 x 32 |" in printed and "n/a, sdpa, cuDNN: " in printed


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
