"""The random trials: they pass, find what is broken, and repeat from the line that they print."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import shlex
import sys
from typing import Any

import pytest
import torch

from flash_cute.cpu import backward, tiles
from flash_cute.cpu import fp8 as cpu_fp8
from flash_cute.cpu import quantized_kvcache as cpu_cache
from flash_cute.ops import has_fp8_attention
from flash_cute.ops import quantize as ops_quantize
from flash_cute.testing import eight_bit_trials, fuzz
from flash_cute.testing.cases import LAYOUTS, Case, VarlenCase, unsupported_on_cuda
from flash_cute.testing.eight_bit_trials import CacheTrial, Fp8Trial, QuantizeTrial
from flash_cute.testing.kvcache import CacheCase
from flash_cute.testing.trials import Trial, draw

CUDA = torch.device("cuda")
COMMAND = ["python", "-m", "flash_cute.testing.fuzz"]


def drawn(count: int) -> list[Trial]:
    return [draw(random.Random(seed)) for seed in range(count)]


def drawn_of_8_bits(count: int) -> list[Any]:
    return [eight_bit_trials.draw(random.Random(seed)) for seed in range(count)]


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
    of_16_bits = [trial for trial in some if isinstance(trial, Trial)]
    assert {unsupported_on_cuda(trial.case) for trial in of_16_bits} == {None}
    assert all(trial.is_supported("cuda") for trial in some) and len(of_16_bits) > 50
    assert any(isinstance(trial, Fp8Trial) for trial in some) == has_fp8_attention(CUDA)
    assert set(some) < set(itertools.islice(fuzz.trials(1, "cpu"), 300))


def test_a_line_of_json_holds_all_of_a_trial():
    for trial in drawn(300):
        text = trial.to_json()
        assert "\n" not in text and Trial.from_json(text) == trial
        assert eight_bit_trials.from_json(text) == trial
    for trial in drawn_of_8_bits(300):
        text = trial.to_json()
        assert "\n" not in text and eight_bit_trials.from_json(text) == trial


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting"),
        ('{"kind": "sparse"}', '"kind" must be one of dense, varlen'),
        ('{"kind": "dense", "head": 3}', "no such field: head"),
        ('{"kind": "dense", "dtype": "bf16"}', "bf16"),
        ('{"kind": "fp8_dense", "softness": 3}', "no such field: softness"),
        ('{"kind": "quantize", "heads": 3}', "no such field: heads"),
        ('{"kind": "cache", "cache_dtype": "e4m3"}', "e4m3, which is no dtype"),
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


def test_trials_of_8_bits_are_small_and_have_every_feature():
    trials = drawn_of_8_bits(800)
    assert {type(trial) for trial in trials} == {Fp8Trial, CacheTrial, QuantizeTrial}
    fp8, caches = ([x for x in trials if type(x) is kind] for kind in (Fp8Trial, CacheTrial))
    used = {"softcap", "alibi", "dropout_p", "sparse", "list_heads", "sink_dtype", "dtype"}
    cached = {"packed_cache", "capacity", "seqlens_new", "rotary", "rotary_dim", "rotary_seqlens",
              "layout", "spread", "sparse", "list_heads", "dropout_p", "sink_dtype"}  # fmt: skip
    for some, kinds, without in ((fp8, (Case, VarlenCase), used), (caches, (CacheCase,), cached)):
        for field in (
            *itertools.chain(*map(dataclasses.fields, kinds)),
            *dataclasses.fields(some[0]),
        ):
            found = {
                getattr(x.case, field.name, getattr(x, field.name, field.default)) for x in some
            }
            assert (len(found) > 1) == (field.name not in without), field.name
    assert {trial.case.layout for trial in fp8} == set(LAYOUTS)
    for case in (trial.case for trial in fp8):
        pairs = zip(getattr(case, "lengths_q", ()), getattr(case, "lengths_k", ()), strict=True)
        scores = sum(q * k for q, k in pairs)
        if isinstance(case, Case):
            scores = case.batch * case.seqlen_q * case.seqlen_k
        assert case.heads * scores * max(case.dim, case.dim_v or 0) <= 2**27


class WithoutDescales(cpu_cache.Dequantized):
    def __init__(self, codes, descale, dtype):
        super().__init__(codes, None, dtype)


BROKEN_OF_8_BITS = {
    "mask": (Fp8Trial, tiles.Tiles, "_hidden", seen_one_key_too_many),
    "descales of v": (Fp8Trial, cpu_fp8, "_value_factors", lambda tiles, _: torch.ones(())),
    "descales of caches": (CacheTrial, cpu_cache, "Dequantized", WithoutDescales),
    "largest number": (QuantizeTrial, ops_quantize, "LARGEST", 440.0),
}


@pytest.mark.parametrize("name", BROKEN_OF_8_BITS)
def test_what_is_broken_of_8_bits_is_found_and_repeats(monkeypatch, capsys, name):
    kind, *what = BROKEN_OF_8_BITS[name]
    trials = [trial for trial in drawn_of_8_bits(80) if type(trial) is kind][:12]
    with monkeypatch.context() as patch:
        patch.setattr(*what)
        found = fuzz.fuzz(trials, "cpu", 60.0, fuzz.Progress()).failures
        (words, *_) = printed_commands(found[0])
        assert fuzz.main(words) == 1
        assert printed_commands(capsys.readouterr().out)[-1] == words
    assert fuzz.main(words) == 0


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
