"""The random trials: they pass, find what is broken, and repeat from the line that they print."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import shlex
import sys

import pytest
import torch

from flash_cute.cpu import backward, tiles
from flash_cute.testing import fuzz
from flash_cute.testing.cases import LAYOUTS, Case, VarlenCase, unsupported_on_cuda
from flash_cute.testing.trials import Trial, draw

COMMAND = ["python", "-m", "flash_cute.testing.fuzz"]


def drawn(count: int) -> list[Trial]:
    return [draw(random.Random(seed)) for seed in range(count)]


def printed_commands(text: str) -> list[list[str]]:
    """The arguments in the lines that name a failure; what follows # is for the reader."""
    words = [shlex.split(line, comments=True) for line in text.splitlines() if "# " in line]
    assert all(line[:3] == COMMAND for line in words)
    return [line[3:] for line in words]


def test_a_small_run_passes_and_names_its_largest_error(device, capsys):
    assert fuzz.main(["--cases", "25", "--seed", "3", "--device", device]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    found = re.match(r"25 cases, 0 failures, errors up to ([01]\.\d\d) bounds on", first)
    assert found and first.endswith("--seed 3")
    assert fuzz.main(shlex.split(second.removeprefix("largest error: "))[3:]) == 0
    text = capsys.readouterr().out
    assert text.startswith("1 cases, 0 failures")
    assert device == "cuda" or f"errors up to {found[1]} bounds" in text


def seen_one_key_too_many(self, rows, keys):
    diagonal = rows.start - keys.start
    tile = torch.ones(rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool)
    seen = tile.tril_(self.high + diagonal + 1).triu_(self.low + diagonal)
    return seen.logical_not_().repeat(self.group, 1)


BROKEN = {
    "mask": (tiles.Tiles, "_hidden", seen_one_key_too_many),
    "gradient_of_sink": (backward, "dsink_of", lambda options, lse, d: options.sink),
    "raises": (backward, "softmax_d_of", lambda *_: 1 // 0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found_and_repeats(monkeypatch, capsys, name):
    arguments = ["--cases", "20", "--seed", "1", "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(*BROKEN[name])
        assert fuzz.main(arguments) == 1
        failures = printed_commands(capsys.readouterr().out)
        assert failures
        assert fuzz.main(failures[0]) == 1
        assert printed_commands(capsys.readouterr().out) == [failures[0]]
    assert fuzz.main(failures[0]) == 0


def test_equal_seeds_give_equal_trials():
    first, again, other = (list(itertools.islice(fuzz.trials(x, "cpu"), 20)) for x in (5, 5, 6))
    assert first == again and first != other


def test_trials_for_cuda_are_those_that_it_can_do():
    some = list(itertools.islice(fuzz.trials(1, "cuda"), 100))
    assert {unsupported_on_cuda(trial.case) for trial in some} == {None}
    assert set(some) < set(itertools.islice(fuzz.trials(1, "cpu"), 300))


def test_a_line_of_json_holds_all_of_a_trial():
    for trial in drawn(300):
        text = trial.to_json()
        assert "\n" not in text and Trial.from_json(text) == trial


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting"),
        ('{"kind": "sparse"}', '"kind" must be one of dense, varlen'),
        ('{"kind": "dense", "head": 3}', "no such field: head"),
        ('{"kind": "dense", "dtype": "bf16"}', "bf16"),
    ],
)
def test_what_is_no_trial_is_refused(capsys, text, said):
    with pytest.raises(SystemExit):
        fuzz.main(["--case", text])
    assert said in capsys.readouterr().err


def test_trials_are_small_and_have_every_feature():
    trials = drawn(600)
    some = [trial.case for trial in trials]
    assert {case.layout for case in some} == set(LAYOUTS)
    for name, field in (
        (f.name, f) for f in dataclasses.fields(Case) + dataclasses.fields(VarlenCase)
    ):
        assert len({getattr(case, name, field.default) for case in some}) > 1, name
    assert {(x.with_dlse, x.deterministic) for x in trials} == {*itertools.product((0, 1), (0, 1))}
    for case in some:
        pairs = zip(getattr(case, "lengths_q", ()), getattr(case, "lengths_k", ()), strict=True)
        scores = sum(q * k for q, k in pairs)
        if isinstance(case, Case):
            scores = case.batch * case.seqlen_q * case.seqlen_k
        assert case.heads == 1 or case.heads * scores <= 2**21


def test_no_case_begins_after_the_time_is_up(capsys):
    assert fuzz.main(["--seconds", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("0 cases, 0 failures")
    assert fuzz.parse(["--seconds", "5"]).total is None
    assert fuzz.parse(["--seconds", "5", "--cases", "7"]).total == 7


def test_a_lost_device_ends_the_run(monkeypatch, capsys):
    def lost(self, device):
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(Trial, "run", lost)
    assert fuzz.main(["--cases", "5", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "# AcceleratorError: CUDA error: an illegal memory access\n" in text
    assert "takes no more work" in text and "1 cases, 1 failures" in text


def test_a_terminal_gets_a_bar_and_whole_lines(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(Trial, "run", lambda *_: 1 // 0)
    assert fuzz.main(["--cases", "3", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert len(re.findall(r"python -m .* --case .*  # ZeroDivisionError: .*\n", text)) == 3
    assert "━" in text
