"""Rivals of the benchmarks: how they are loaded and called, and what is said of missing ones."""

import json
import sys

import torch
from torch_sdpa import sdpa

from benchmarks import attention, report, rivals, suites, timing, truth
from benchmarks.rivals import Work
from benchmarks.suites import SUITES
from flash_cute.native import library

CPU = torch.device("cpu")


def _right(candidate: rivals.Candidate) -> bool:
    """Whether both directions of a candidate pass the check of the smoke case."""
    case = SUITES["smoke"][0]
    x = suites.make_inputs(case, CPU, seed=11)
    truths = truth.reference(case, x, backward=True, seed=11)
    entries = [attention.prepare(candidate, case, x, d, truths)[0] for d in ("fwd", "bwd")]
    return [entry["status"] for entry in entries] == ["ok", "ok"]


def test_missing_rivals_are_reported_with_a_reason(monkeypatch, tmp_path):
    found, missing = rivals.load(["cudnn", "fa2", "fa3", "fa3fp8", "fa4", "math"], CPU)
    assert list(found) == ["math"]
    assert set(missing.values()) == {"needs a CUDA device, the run is on cpu"}
    monkeypatch.delenv("FLASH_CUTE_RIVALS", raising=False)
    _, missing = rivals.load(["fa3", "fa4"], torch.device("cuda"))
    assert set(missing.values()) == {"FLASH_CUTE_RIVALS names no folder"}
    monkeypatch.setenv("FLASH_CUTE_RIVALS", str(tmp_path))
    _, missing = rivals.load(["fa3", "fa3fp8", "fa4"], torch.device("cuda"))
    assert missing["fa3"] == "fa3.so does not exist"
    assert missing["fa4"] == "fa4 does not exist"
    (tmp_path / "fa3fp8").mkdir()
    _, missing = rivals.load(["fa3fp8"], torch.device("cuda"))
    assert missing["fa3fp8"].startswith("ModuleNotFoundError: No module named 'fa3_fwd_interface'")


def test_missing_features_are_told_from_errors():
    class Lacking:
        version = "1"

        def forward(self, case, x):
            raise NotImplementedError("head dim 64 is not supported")

        def backward(self, case, x):
            raise RuntimeError("CUDA error: misaligned address\nmore lines")

    class Shifted:
        version = "1"

        def forward(self, case, x):
            return rivals.Work(lambda: (x.q + 1,), tuple)

        backward = forward

    case = SUITES["smoke"][0]
    x = suites.make_inputs(case, CPU, seed=1)
    truths = truth.reference(case, x, backward=True, seed=1)
    session = attention.Session(
        {"a": Lacking(), "b": Shifted()}, CPU, timing.Monitor(CPU), rounds=1, round_ms=1.0
    )
    forward, backward = (attention.measure(session, case, x, d, truths) for d in ("fwd", "bwd"))
    lacking = {"status": "unsupported", "message": "head dim 64 is not supported"}
    assert forward["candidates"]["a"] == lacking
    assert forward["candidates"]["b"]["status"] == "wrong"
    assert "rate" not in forward["candidates"]["b"] and forward["ratio"] is None
    assert backward["candidates"]["a"]["status"] == "failed"
    assert backward["candidates"]["a"]["message"] == "RuntimeError: CUDA error: misaligned address"


def test_unknown_kernels_are_reported_missing():
    candidates, missing = rivals.load([rivals.OURS, "flash_cute:sm75"], CPU, kernels="fwd_sm70")
    assert not candidates
    assert "no kernel's id contains any of ('fwd_sm70',)" in missing[rivals.OURS]
    assert "no kernel's id contains any of ('sm75',)" in missing["flash_cute:sm75"]


def test_another_build_is_measured_by_its_ops(tmp_path):
    names = [f"before={tmp_path / 'libflash_cute.so'}", f"after={library.find()}"]
    candidates, missing = rivals.load(names, CPU)
    assert not candidates
    assert missing["before"] == "libflash_cute.so does not exist"
    assert missing["after"] == "libflash_cute.so has no torch.ops.after"
    build = rivals.Build(torch.ops.flash_cute, "the one that is loaded")
    assert _right(build)
    for feature in ("", *suites.CACHE_FEATURES):
        case = suites.Case("bf16", 2, 4, 2, 1, 48, 64, 64, causal=False, feature=feature)
        assert case.cached
        x = suites.make_inputs(case, CPU, seed=11)
        truths = truth.reference(case, x, backward=False, seed=11)
        assert attention.prepare(build, case, x, "fwd", truths)[0]["status"] == "ok"


def test_calls_of_a_graph_have_caches_of_their_own(monkeypatch):
    case = suites.Case.parse("bf16 b2 h4/2 q1 k64 d64/64 full")
    x = suites.make_inputs(case, CPU, seed=5)

    def others(case: suites.Case, caches: int) -> list[suites.Inputs]:
        session = attention.Session({}, CPU, timing.Monitor(CPU), 1, 1.0, caches)
        return attention._other_caches(session, case, x, seed=5)

    made = others(case, 4)
    assert len(made) == 3 and others(case, 1) == []
    assert len(others(case, 99)) == case.calls_a_graph - 1
    assert all(other.q is x.q and other.options is x.options for other in made)
    keys = [x.k, x.v, *(t for other in made for t in (other.k, other.v))]
    assert all(not torch.equal(a, b) for i, a in enumerate(keys) for b in keys[:i])
    monkeypatch.setattr(attention, "_BYTES_OF_CACHES", 1)
    assert len(others(case, 4)) == 1  # one more cache at the least
    assert others(SUITES["smoke"][0], 4) == []  # no cache


def test_a_graph_runs_works_by_turns_and_has_the_results_of_the_first(cuda):
    seen = torch.zeros(3, device=cuda)
    results = [torch.zeros(1, device=cuda) for _ in range(3)]

    def work(i: int) -> rivals.Work:
        def run() -> tuple[torch.Tensor]:
            seen[i] += 1
            return (results[i].copy_(seen[i]),)

        return rivals.Work(run, tuple)

    graph = rivals.captured([work(i) for i in range(3)], 8)
    assert results[0].isnan() and seen.tolist() == [1, 1, 1]
    assert graph.run()[0] is results[0] and graph.calls == 8
    assert seen.tolist() == [4, 4, 3] and results[0].item() == 4


def test_a_library_with_a_python_function_is_loaded_from_its_folder(monkeypatch, tmp_path):
    folder = tmp_path / "fa3fp8"
    folder.mkdir()
    source = "from torch_sdpa import sdpa\n"
    source += "def flash_attn_func(q, k, v, causal=False): return sdpa(q, k, v, causal), None\n"
    (folder / "fa3_fwd_interface.py").write_text(source)
    monkeypatch.setenv("FLASH_CUTE_RIVALS", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    found, missing = rivals.load(["fa3fp8"], torch.device("cuda"))
    monkeypatch.delitem(sys.modules, "fa3_fwd_interface")
    assert not missing and _right(found["fa3fp8"])


def test_flash_attention_3_is_called_with_gradients_to_fill():
    class Ops:
        @staticmethod
        def fwd(q, k, v, *, softmax_scale, is_causal):
            assert softmax_scale == q.shape[-1] ** -0.5
            return sdpa(q, k, v, is_causal), "lse", None, None

        @staticmethod
        def bwd(dout, q, k, v, out, lse, dq, dk, dv, *, softmax_scale, is_causal):
            assert lse == "lse" and softmax_scale == q.shape[-1] ** -0.5
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            grads = torch.autograd.grad(sdpa(*leaves, is_causal), leaves, dout)
            for grad, filled in zip(grads, (dq, dk, dv), strict=True):
                filled.copy_(grad)

    candidate = object.__new__(rivals.FlashAttention3)
    candidate._ops = Ops
    assert _right(candidate)


def test_a_rival_that_needs_too_much_memory_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "available_memory", lambda device: 100_000)
    case = "bf16 b1 h2/2 q64 k64 d16/16 causal"  # 8192 scores
    file = tmp_path / "f.json"
    arguments = ["--device", "cpu", "--case", case, "--rounds", "1", "--json", str(file)]
    assert attention.main(arguments) == 0
    result = json.loads(file.read_text())
    for row, needed in zip(result["results"], (8192 * 4 * 3, 8192 * 4 * 4), strict=True):
        entries = row["candidates"]
        assert list(entries) == ["flash_cute", "sdpa", "math"]
        said = f"needs {needed / 1e9:.1f} GB for its scores, and gets 0.0 GB here"
        assert entries["math"] == {"status": "left out", "message": said}
        assert entries["flash_cute"]["status"] == entries["sdpa"]["status"] == "ok"
        assert row["best_rival"] == "sdpa"
    assert "left out" in report.markdown(result)


def test_one_run_is_enough_of_what_is_slow_on_a_cpu(monkeypatch):
    runs = []

    def slow(work, calls, device):
        runs.append(calls)
        return 1000.0 * calls

    monkeypatch.setattr(timing, "elapsed_ms", slow)
    work = Work(lambda: None, tuple)
    assert timing.calls_for(work, 50.0, torch.device("cpu")) == 1 and runs == [1]
    assert timing.calls_for(work, 50.0, torch.device("cuda")) == 3


def test_words_that_cases_share_stand_once():
    names = [f"bf16 b1 h2/2 q{n} k{n} d16/16 causal" for n in (32, 48)]
    assert report.shared_words(names) == ("bf16 b1 h2/2 d16/16 causal", ["q32 k32", "q48 k48"])
    assert report.shared_words(names[:1]) == ("", names[:1])
    assert report.shared_words([names[0]] * 2) == ("", [names[0]] * 2)
    with_feature = report.shared_words([names[0], names[0] + " +alibi"])
    assert with_feature == (names[0], ["", "+alibi"])
