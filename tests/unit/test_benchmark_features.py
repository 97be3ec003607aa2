"""Benchmarks of features on the CPU: cases, truths, speeds with and without, paths in reports."""

import json
from typing import Any

import pytest
import torch

from benchmarks import attention, rivals, suites, timing, truth
from benchmarks.suites import FEATURES, SUITES, Case

CPU = torch.device("cpu")
SMALL = "bf16 b2 h4/2 q70 k70 d64/64 causal"
CHUNK = "bf16 b2 h4/2 q20 k64 d64/64 causal"


class Careless(rivals.FlashCute):
    """Ours, as if it forgot the feature."""

    def op(self, case, x):
        return super().op(case, suites.Inputs(x.q, x.k, x.v, x.dout))


@pytest.fixture
def narrow(monkeypatch):
    """A window and a cap that the small cases reach."""
    monkeypatch.setitem(FEATURES, "window1024", {"window_size_left": 16})
    monkeypatch.setitem(FEATURES, "softcap30", {"softcap": 3.0})


def entries(candidate, name):
    """A candidate's entry in each direction of a case."""
    case = Case.parse(name)
    x = suites.make_inputs(case, CPU, seed=2)
    truths = truth.reference(case, x, backward=True, seed=2)
    return [attention.prepare(candidate, case, x, way, truths)[0] for way in case.directions]


def test_suite_has_each_feature_at_both_head_dims():
    found = {(case.dim, case.feature) for case in SUITES["features"]}
    assert found == {(dim, feature) for dim in (64, 128) for feature in ("", *FEATURES)}
    assert {case.causal for case in SUITES["features"] if case.window} == {True}
    assert Case.parse(f"{SMALL} +deterministic").directions == ("bwd",)


@pytest.mark.parametrize("name", [f"{SMALL} +", f"{SMALL} +sparse", f"{SMALL}+alibi",
                                  "bf16 b1 h1/1 q8 k8 d64/64 full +window1024"])  # fmt: skip
def test_what_is_no_feature_is_refused(name):
    with pytest.raises(ValueError, match=r"no case|a window needs a causal case"):
        Case.parse(name)


@pytest.mark.parametrize("name", [f"{SMALL} +pages16", f"{CHUNK} +append", f"{CHUNK} +lengths",
                                  f"{CHUNK} +softcap30"])  # fmt: skip
def test_a_feature_that_does_not_suit_the_lengths_is_refused(name):
    with pytest.raises(ValueError, match=r"needs (one query|as many queries as keys)"):
        Case.parse(name)


@pytest.mark.parametrize(("feature", "beside"),
                         [("append", " +lengths"), ("lengths", ""), ("pages16", "")])  # fmt: skip
def test_a_token_that_joins_is_measured_beside_lengths_and_all_are_right(feature, beside):
    decode = "bf16 b2 h4/2 q1 k64 d64/64 full"
    assert str(Case.parse(f"{decode} +{feature}").beside) == decode + beside
    (found,) = entries(rivals.FlashCute(), f"{decode} +{feature}")
    assert found["status"] == "ok" and found["error"]


@pytest.mark.parametrize("name", [CHUNK, f"{CHUNK} +pages16"])
def test_chunks_of_prompts_are_right_and_others_refuse_them(name):
    assert Case.parse(name).directions == ("fwd",)
    assert Case.parse(name).flops("fwd") == 2 * 2 * 4 * (20 * 64 - 20**2 / 2) * (64 + 64)
    (found,) = entries(rivals.FlashCute(), name)
    assert found["status"] == "ok" and found["error"]
    (refused,) = entries(rivals.LOADERS["math"](CPU), name)
    assert refused["status"] == "unsupported"


def test_a_mask_at_the_wrong_end_of_a_chunk_is_wrong():
    class First(rivals.FlashCute):
        """Ours, as if the queries were those of the first keys."""

        def forward(self, case, x):
            k, v = (t[:, : case.seqlen_q].contiguous() for t in (x.k, x.v))
            return super().forward(case, suites.Inputs(x.q, k, v, x.dout))

    (found,) = entries(First(), CHUNK)
    assert found["status"] == "wrong"


def test_suite_of_determinism_has_each_head_dim_with_and_without_a_mask():
    found = {(case.dim, case.dim_v, case.causal) for case in SUITES["deterministic"]}
    dims = [(64, 64), (128, 128), (192, 192), (192, 128), (256, 256)]
    assert found == {(*dim, causal) for dim in dims for causal in (False, True)}
    assert {case.directions for case in SUITES["deterministic"]} == {("bwd",)}


def test_a_window_counts_the_pairs_that_it_leaves():
    name = "bf16 b4 h16/16 q4096 k4096 d128/128 causal"
    pairs = 4096 * 1024 - 1024**2 / 2
    assert Case.parse(f"{name} +window1024").flops("fwd") == 4 * 4 * 16 * pairs * 128
    assert Case.parse(f"{SMALL} +window1024").flops("bwd") == Case.parse(SMALL).flops("bwd")


@pytest.mark.parametrize("feature", FEATURES)
def test_ours_is_right_with_every_feature(narrow, feature):
    found = entries(rivals.FlashCute(), f"{SMALL} +{feature}")
    assert {entry["status"] for entry in found} == {"ok"}
    assert all(entry["error"] for entry in found)


@pytest.mark.parametrize("feature", ["dropout0.1", "alibi", "window1024", "softcap30"])
def test_a_feature_that_is_forgotten_is_wrong(narrow, feature):
    found = entries(Careless(), f"{SMALL} +{feature}")
    assert [entry["status"] for entry in found] == ["wrong", "wrong"]


def test_random_numbers_of_another_library_cannot_be_compared():
    case = Case.parse(f"{SMALL} +dropout0.1")
    results = {"out": torch.zeros(2, 70, 4, 64)}
    assert truth.check(case, results, None) == ({}, "")
    results["out"][1, 2, 3, 4] = torch.nan
    assert truth.check(case, results, None) == ({}, "out: not finite")
    found = entries(rivals.LOADERS["math"](CPU), str(case))
    assert [(entry["status"], entry["error"]) for entry in found] == [("ok", {})] * 2
    (refused, _) = entries(rivals.LOADERS["math"](CPU), f"{SMALL} +alibi")
    assert refused == {"status": "unsupported", "message": "alibi is not measured here"}


def test_speed_is_a_multiple_of_that_without_the_feature(monkeypatch):
    class Slow:
        version = "1"

        def forward(self, case, x):
            assert bool(case.feature) == bool(x.options)
            ms = 8.0 if case.feature else 2.0
            return rivals.Work(lambda: ms, lambda _: (x.q,), comparable=False)

    monkeypatch.setattr(timing, "elapsed_ms", lambda work, calls, device: work.run() * calls)
    case = Case.parse(f"{SMALL} +softcap30")
    x = suites.make_inputs(case, CPU, seed=1)
    session = attention.Session({"slow": Slow()}, CPU, timing.Monitor(CPU), rounds=3, round_ms=30.0)
    row = attention.measure(session, case, x, "fwd", [])
    assert list(row["candidates"]) == ["slow"]
    entry = row["candidates"]["slow"]
    assert (entry["median_ms"], entry["feature_speed"]) == (8.0, 0.25)


def test_a_run_whose_results_are_wrong_or_missing_says_so(narrow, monkeypatch):
    monkeypatch.setitem(SUITES, "features", [Case.parse(f"{SMALL} +alibi")])
    arguments = ["--suite", "features", "--device", "cpu", "--rivals", "math", "--rounds", "1"]
    assert attention.main(arguments) == 0
    monkeypatch.setattr(rivals, "FlashCute", Careless)
    assert attention.main(arguments) == 1

    def missing(*_: Any) -> None:
        raise RuntimeError("no library")

    monkeypatch.setattr(rivals, "FlashCute", missing)
    assert attention.main(arguments) == 1


def test_a_case_has_its_inputs_whatever_else_is_measured(monkeypatch):
    names = [f"{SMALL} +alibi", SMALL]
    seeds = {}
    monkeypatch.setattr(
        attention, "make_inputs", lambda case, _, seed: seeds.setdefault(str(case), []).append(seed)
    )
    for cases in (names, names[1:]):
        monkeypatch.setitem(SUITES, "features", [Case.parse(name) for name in cases])
        attention.main(["--suite", "features", "--device", "cpu", "--rivals", "math", "--seed=5"])
    first, second = seeds[SMALL][0], seeds[SMALL][-1]
    assert first == second and first != seeds[names[0]][0]


def test_a_run_over_features_from_end_to_end(narrow, tmp_path, monkeypatch, capsys):
    cases = [Case.parse(f"{SMALL}{feature}") for feature in ("", " +dropout0.1", " +deterministic")]
    monkeypatch.setitem(SUITES, "features", cases)
    path = tmp_path / "folder" / "f.json"
    arguments = ["--suite", "features", "--device", "cpu", "--rivals", "math,fa3", "--rounds", "1"]
    assert attention.main([*arguments, f"--json={path}", "--match", "h4/2"]) == 0
    text = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["command"].endswith("--rounds 1 --json=f.json --match h4/2")
    assert str(tmp_path) not in path.read_text()
    rows = {(row["case"], row["direction"]): row["candidates"] for row in result["results"]}
    assert "feature_speed" not in rows[SMALL, "fwd"]["flash_cute"]
    for way in ("fwd", "bwd"):
        assert all(x["feature_speed"] > 0 for x in rows[f"{SMALL} +dropout0.1", way].values())
    last = rows[f"{SMALL} +deterministic", "bwd"]
    assert last["flash_cute"]["feature_speed"] > 0 and last["math"]["status"] == "unsupported"
    assert f"({last['flash_cute']['feature_speed']:.2f}x) | n/a |" in text


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("/opt/rivals/fa3.so: cannot open it", "fa3.so: cannot open it"),
        ("in '/home/a/c.py', line 3", "in 'c.py', line 3"),
        ("No module named 'x' (/usr/lib/y.py)", "No module named 'x' (y.py)"),
        ("/tmp does not exist", "tmp does not exist"),
        ("h32/8 and TFLOP/s / 2", "h32/8 and TFLOP/s / 2"),
    ],
)
def test_messages_keep_the_last_part_of_a_path(message, said):
    assert rivals.describe(OSError(message)) == f"OSError: {said}"


def test_paths_of_output_files_are_names_however_they_are_given():
    spelled = ["--json", "out/a.json", "--plot=./out/b.png", "--device", "cpu", "--match", "d64"]
    options = attention.parse(spelled)
    words = attention._without_folders(options)
    assert words == "--json a.json --plot=b.png --device cpu --match d64"
