"""The random cases of systems: they pass, find what is broken, repeat, and end in time."""

from __future__ import annotations

import json
import random
import shlex
import time
from dataclasses import replace

import pytest
import torch

from flash_cute.core.gelu import FusedGELU
from flash_cute.core.padding import Packing
from flash_cute.precision import fp8_linear
from flash_cute.testing import fuzz, systems
from flash_cute.testing.ranks import Raised
from flash_cute.testing.systems import cases, core, disagreement, fusion, layers, oracle, runner
from flash_cute.testing.systems.findings import Findings, compare

LOCAL = tuple(name for name in systems.NAMES if name not in cases.OF_RANKS)


def drawn(name: str, count: int) -> list[systems.SystemTrial]:
    return [systems.draw(random.Random(f"{name}/{i}"), (name,)) for i in range(count)]


@pytest.mark.parametrize("name", LOCAL)
def test_a_small_run_finds_nothing(name):
    found = {x.to_json(): x.run("cpu").failures for x in drawn(name, 10)}
    assert {text: failures for text, failures in found.items() if failures} == {}


@pytest.mark.parametrize("name", systems.NAMES)
def test_a_line_of_json_holds_all_of_a_case(name):
    for trial in drawn(name, 100):
        text = trial.to_json()
        assert "\n" not in text and systems.SystemTrial.from_json(text) == trial


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"system": "sparse"}', '"system" must be one of functions, layers'),
        ('{"system": "layers", "head": 3}', "no such field: head"),
    ],
)
def test_what_is_no_case_is_refused(capsys, text, said):
    with pytest.raises(SystemExit):
        fuzz.main(["--case", text, "--device", "cpu"])
    assert said in capsys.readouterr().err


def test_equal_seeds_give_equal_cases_of_all_systems():
    names, ranks = systems.NAMES, (1, 2)
    first, again, other = (
        [next(fuzz.system_trials(seed, names, ranks, "cpu")) for _ in range(1)]
        for seed in (5, 5, 6)
    )
    assert first == again and first != other
    some = [systems.draw(random.Random(i), names, ranks) for i in range(400)]
    assert {x.system for x in some} == set(names)
    assert {x.ranks for x in some if x.system in cases.OF_RANKS} == {1, 2}
    on_cuda = [systems.draw(random.Random(i), names, ranks, "cuda") for i in range(400)]
    assert "float64" not in {x.case.dtype for x in on_cuda}


# --- what is broken is found ---------------------------------------------------------------------


def failures_of(name: str, count: int = 60) -> list[str]:
    return [failure for x in drawn(name, count) for failure in x.run("cpu").failures]


def test_a_mask_that_lets_others_in_is_found(monkeypatch):
    def leaking(self, x):
        rows = x.flatten(0, 1)
        return torch.zeros_like(rows).index_copy(0, self.place, rows)

    monkeypatch.setattr(Packing, "pack", leaking)
    assert any("off by inf" in failure for failure in failures_of("layers"))


def test_another_activation_is_found(monkeypatch):
    monkeypatch.setattr(FusedGELU, "forward", lambda self, x: torch.nn.functional.silu(x))
    assert any(failure.startswith("out is off by") for failure in failures_of("core", 20))


def test_a_scale_that_is_not_undone_is_found(monkeypatch):
    round_to_fp8 = fp8_linear.round_to_fp8

    def larger(*args, **kwargs):
        rounded = round_to_fp8(*args, **kwargs)
        return rounded._replace(inverse_scale=rounded.inverse_scale * 1.01)

    monkeypatch.setattr(fp8_linear, "round_to_fp8", larger)
    assert any(failure.startswith("out is off by") for failure in failures_of("fp8"))


def test_what_is_taken_in_place_of_an_error_is_found():
    find = Findings()
    find.refused(lambda: None, "head_groups=-1", "head_groups")
    find.refused(lambda: int("x"), "block='x'", "block")
    find.refused(lambda: [][1], "size=2", "size")
    assert [x.split(":")[0] for x in find.failures] == [
        "head_groups=-1 was taken", "block='x'", "size=2 raised IndexError",
    ]  # fmt: skip


def test_a_leak_is_found(monkeypatch):
    kept = []
    forward = FusedGELU.forward

    def leaking(self, x):
        kept.append(forward(self, x))
        return kept[-1]

    monkeypatch.setattr(FusedGELU, "forward", leaking)
    case = core.Case(kind="gelu", also="leak", shape=(2, 3))
    (failure,) = core.check(case, "cpu").failures
    assert "tensors of" in failure and "alive" in failure


def test_an_error_of_a_part_in_a_thousand_is_beyond_the_bounds():
    """In fp64 one of 10^9, in fp32 one of 10^5."""
    torch.manual_seed(0)
    for dtype, error in ((torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        x, gradient = torch.randn(5, 7).to(dtype), torch.randn(5, 7)
        for factor, expected in ((1.0, 0), (1 + error, 1)):
            find = Findings()
            compare(find, {"out": x.tanh() * factor}, torch.tanh, {"input": x}, gradient, dtype)
            assert len(find.failures) == expected, (dtype, factor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_number_that_is_right_by_luck_is_no_bound(dtype):
    """One sum, whose error in one order is at times 0 and in another order as large as ever."""

    def added(rows):
        return sum(rows, torch.zeros((), dtype=x.dtype))[None]

    torch.manual_seed(0)
    failures = {0.0: 0, 20.0: 0}
    for wrong in failures:
        for _ in range(100):
            x = torch.randn(50).to(dtype)
            find = Findings()
            got = {"out": added(reversed(x)) + wrong}
            compare(find, got, lambda x: added(x), {"x": x}, torch.ones(1), dtype)
            failures[wrong] += len(find.failures)
    assert failures == {0.0: 0, 20.0: 100}


def test_one_hidden_unit_may_be_as_wrong_as_torch_s():
    case = fusion.Case(
        seed=1472175056, dtype="float16", layers=2, heads=(1, 1), hidden=1, activation="gelu",
        norm_first=(False, False), eps=1e-3, batch=1, seqlen=36, strategy="FFN_ONLY",
        saves_memory=False,
    )  # fmt: skip
    assert fusion.check(case, "cpu").failures == []


# --- processes -----------------------------------------------------------------------------------


def hang(trial, device):
    time.sleep(100)


def test_a_case_that_hangs_is_reported_and_the_next_one_runs(monkeypatch):
    with runner.Runner("cpu", 2.0) as processes:
        trial = systems.SystemTrial("core", core.Case(seed=1))
        assert processes.run(trial).failures == []
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_check", hang)
            began = time.monotonic()
            assert processes.run(trial).failures == ["hangs: no answer in 2 s"]
            assert time.monotonic() - began < 20
        processes.seconds = 60.0
        assert processes.run(trial).failures == []


def test_ranks_run_a_case_and_a_disagreement_in_one_group():
    with runner.Runner("cpu", 60.0) as processes:
        case = disagreement.Case(seed=3, differ="softcap", ranks=2)
        for trial in (
            systems.SystemTrial("ranks", cases.module_of("ranks").Case(seed=2)),
            systems.SystemTrial("disagreement", case),
            systems.SystemTrial("members", cases.module_of("members").Case(seed=4, sizes=(3, 5))),
        ):
            assert processes.run(trial).failures == []
        assert list(processes._pools) == [2]


def test_answers_of_ranks_are_put_together():
    one, other = Findings(["a"], 0.5, ["ValueError: x"]), Findings([], 0.7, ["ValueError: x"])
    found = runner.together([one, other], 9.0)
    assert found.failures == ["rank 0: a"] and found.worst == 0.7 and not found.spent
    other.notes = ["ValueError: y"]
    assert "ranks differ in what they raise" in runner.together([one, other], 9.0).failures[1]
    lost = runner.together([one, Raised("EOFError", "the process has ended", "")], 9.0)
    assert lost.spent and lost.failures[1] == "rank 1: EOFError: the process has ended"


def test_the_command_prints_a_line_that_repeats_a_failure(capsys):
    bad = systems.SystemTrial("layers", layers.Case(argument="window_size", also="refusal"))
    broken = json.dumps(json.loads(bad.to_json()) | {"value": "no such value"})
    assert fuzz.main(["--device", "cpu", "--case", broken]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    words = shlex.split(line, comments=True)
    assert words[:3] == ["python", "-m", "flash_cute.testing.fuzz"] and "KeyError" in line
    assert systems.SystemTrial.from_json(words[-1]) == systems.SystemTrial(
        "layers", replace(bad.case, value="no such value")
    )
    good = systems.SystemTrial("core", core.Case(seed=5)).to_json()
    assert fuzz.main(["--device", "cpu", "--case", good]) == 0


# --- the oracle itself ---------------------------------------------------------------------------


def test_the_oracle_rounds_to_fp8_as_torch_does():
    x = torch.cat((torch.randn(4000) * torch.logspace(-6, 5, 4000), torch.tensor([0.0, -0.0])))
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        most = torch.finfo(dtype).max
        assert torch.equal(oracle.fp8(x, name), x.clamp(-most, most).to(dtype).double())


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1), (0, 0)])
def test_the_oracle_attends_as_torch_does(window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 4, 8, dtype=torch.float64) for n in (5, 9, 9))
    out, lse = oracle.attention(q, k, v, window=window)
    seen = oracle.band(5, 9, window, q.device)
    given = (x.transpose(0, 1) for x in (q, k, v))
    true = torch.nn.functional.scaled_dot_product_attention(*given, seen)
    torch.testing.assert_close(out, true.transpose(0, 1))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
