"""benchmarks/random.py on the CPU: what is drawn, how rivals are called, what the report says."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from benchmarks import random, random_cases, raw_ops, timing
from benchmarks.random_cases import GROUPS, LENGTHS, LIKELY_DIMS, MODELS, RandomCase, draw
from benchmarks.rivals import OURS, Work

CPU = torch.device("cpu")
SMALL = {
    "dense-forward": "dense-forward h4/2 d72 causal 2x70",
    "dense-backward": "dense-backward h4/4 d64 full 2x70",
    "packed-forward": "packed-forward h4/2 d64 full 1,70,9",
    "packed-backward": "packed-backward h4/4 d64 causal 1,70,9",
    "decode": "decode h4/2 d64 causal 70,99 q4 of 128",
}
DECODE_ONE = "decode h4/2 d64 causal 99,99 q1 of 128"
WINDOWS = ("dense-backward h4/2 d64 window1024 1x1100", "packed-forward h4/2 d64 window1024 1100,5")


@pytest.fixture(scope="module")
def drawn():
    return {group: [draw(group, 20261129, i) for i in range(200)] for group in GROUPS}


def small(name):
    case = RandomCase.parse(name)
    return case, random_cases.make_inputs(case, CPU, seed=3)


def prepared(call, name):
    """Whether a rival that is called so is right, beside ours."""
    works, notes = random.prepare(
        RandomCase.parse(name), {OURS: raw_ops.flash_cute, "rival": call}, CPU, seed=3
    )
    assert OURS in works
    return notes.get("rival", "right")


def test_cases_are_those_of_the_seed_and_their_number(drawn):
    for group, cases in drawn.items():
        assert [draw(group, 20261129, i) for i in (199, 7)] == [cases[199], cases[7]]
        assert {draw(group, 1, i) for i in range(20)}.isdisjoint(cases)
        assert len({*cases}) > 190


def test_cases_keep_to_the_ranges(drawn):
    least, most = LENGTHS
    for group, cases in drawn.items():
        for case in cases:
            assert case.group == group and case.dim in random_cases.DIMS and case.dim % 8 == 0
            shape = (case.heads, case.heads_k, case.dim)
            group_size, rest = divmod(case.heads, case.heads_k)
            is_model = shape in [model[:3] for model in MODELS]
            assert rest == 0 and (is_model or group_size in random_cases.GROUP_SIZES)
            assert case.heads <= random_cases.MOST_HEADS
            assert case.flops <= random_cases.MOST_FLOPS
            assert case.bytes <= random_cases.MOST_BYTES
            if group == "decode":
                assert is_model or 1 <= case.heads_k <= 8
                assert 1 <= case.queries <= random_cases.MOST_QUERIES
                assert least <= min(case.lengths) and max(case.lengths) <= min(case.capacity, most)
            elif group.startswith("packed"):
                assert len(case.lengths) <= random_cases.MOST_DOCUMENTS
                assert least <= sum(case.lengths) <= most and min(case.lengths) >= 1
            else:
                assert len({*case.lengths}) == 1 and least <= case.lengths[0] <= most


def test_cases_cover_what_users_have(drawn):
    for group, cases in drawn.items():
        assert {case.dim for case in cases} > {*LIKELY_DIMS}
        assert sum(case.dim in LIKELY_DIMS for case in cases) > 0.7 * len(cases)
        assert {case.heads // case.heads_k for case in cases} >= {*random_cases.GROUP_SIZES}
        masks = {case.mask for case in cases}
        assert masks == ({"causal"} if group == "decode" else {"full", "causal", "window1024"})
        assert sum(max(case.lengths) % 64 == 0 for case in cases) < 0.2 * len(cases)
        shapes = [(c.heads, c.heads_k, c.dim, c.mask) for c in cases]
        assert group == "decode" or {*shapes} >= {*MODELS}
        tokens = sum if group.startswith("packed") else max
        longest = sorted(tokens(case.lengths) for case in cases)
        assert longest[0] < 128 and longest[-1] > 32768
    assert {case.queries for case in drawn["decode"]} == {*range(1, 17)}
    ragged = [case for case in drawn["decode"] if len({*case.lengths}) > 1]
    assert len(ragged) > 100
    assert {len(case.lengths) for case in drawn["packed-forward"]} == {*range(1, 25)}


def test_a_case_is_parsed_from_its_name(drawn):
    for case in chain.from_iterable(drawn.values()):
        assert RandomCase.parse(str(case)) == case
    for group, name in SMALL.items():
        assert str(RandomCase.parse(name)) == name and RandomCase.parse(name).group == group


@pytest.mark.parametrize(
    "name",
    ["", "dense h1/1 d64 full 1x64", "dense-forward h3/2 d64 full 1x64",
     "dense-forward h1/1 d64 full 64", "packed-forward h1/1 d64 full 2x64",
     "decode h1/1 d64 causal 64", "decode h1/1 d64 causal 64 q1 of 63",
     "decode h1/1 d64 causal 3 q4 of 64", "dense-forward h1/1 d64 full 1x64 q1 of 64",
     "dense-forward h1/0 d64 full 1x64", "dense-forward h1/1 d64 full 0x64",
     "decode h1/1 d64 causal 64 q0 of 64"],
)  # fmt: skip
def test_what_is_no_case_is_refused(name):
    with pytest.raises(ValueError, match="no case"):
        RandomCase.parse(name)


def test_flops_and_bytes_are_those_counted_by_hand():
    packed = RandomCase.parse("packed-backward h4/2 d64 causal 10,30")
    assert packed.flops == 2.5 * 4 * 4 * (10 * 10 / 2 + 30 * 30 / 2) * 64
    assert packed.bytes == 2 * 2 * 2 * 40 * (4 + 2) * 64  # q, k, v, out, and of each a gradient
    decode = RandomCase.parse("decode h4/2 d64 causal 70,99 q4 of 128")
    assert decode.flops == 4 * 4 * (4 * (70 - 2) + 4 * (99 - 2)) * 64
    assert decode.bytes == 2 * 2 * (2 * 4 * 4 + 2 * 128 * 2) * 64


@pytest.mark.parametrize("name", [*SMALL.values(), DECODE_ONE, *WINDOWS])
def test_ours_are_right_in_every_group(name):
    case, x = small(name)
    works, notes = random.prepare(case, {OURS: raw_ops.flash_cute}, CPU, seed=3)
    assert [*works] == [OURS] and notes == {}
    work = works[OURS]
    off = [tensor + 0.05 for tensor in work.results(work.run())]
    assert "relative error" in random.faults(case, x, {OURS: off})[OURS]


def test_large_cases_are_compared_with_the_rivals(monkeypatch):
    case, x = small(SMALL["dense-backward"])
    monkeypatch.setattr(random, "_SCORES_IN_FP64", 0)
    work = raw_ops.flash_cute(case, x)
    right = work.results(work.run())
    wrong = [tensor * math.nan for tensor in right]
    assert random.faults(case, x, {OURS: right}) == {}
    assert random.faults(case, x, {OURS: right, "a": right, "b": wrong}) == {
        "b": "unlike ours, by nan"
    }
    assert [*random.faults(case, x, {OURS: wrong, "a": right, "b": right})] == ["a", "b", OURS]


def ours_as_theirs(q, k, v, options):
    """Our call, from the arguments that FlashAttention-3 and 4 have in common."""
    options = dict(options)
    if "seqused_k" in options:
        options["cache_seqlens"] = options.pop("seqused_k")
        return torch.ops.flash_cute.fwd_kvcache(q, k, v, **options)
    op = torch.ops.flash_cute.varlen_fwd if "cu_seqlens_q" in options else torch.ops.flash_cute.fwd
    return op(q, k, v, **options)


def our_gradients(dout, q, k, v, out, lse, options):
    ops = torch.ops.flash_cute
    op = ops.varlen_bwd if "cu_seqlens_q" in options else ops.bwd
    return op(dout, q, k, v, out, lse, **options)[:3]


@pytest.mark.parametrize("name", [*SMALL.values(), DECODE_ONE, *WINDOWS])
def test_flash_attention_3_is_called_as_its_ops_want(monkeypatch, name):
    def fwd(q, k, v, *, softmax_scale, **options):
        assert softmax_scale == q.shape[-1] ** -0.5
        return (*ours_as_theirs(q, k, v, options), "not", "used")

    def bwd(dout, q, k, v, out, lse, dq, dk, dv, *, softmax_scale, **options):
        found = our_gradients(dout, q, k, v, out, lse, options)
        for grad, filled in zip(found, (dq, dk, dv), strict=True):
            filled.copy_(grad)

    ops = SimpleNamespace(fwd=fwd, bwd=bwd)
    monkeypatch.setattr(torch.ops, "flash_attn_3", ops, raising=False)
    assert prepared(raw_ops.flash_attention_3, name) == "right"


@pytest.mark.parametrize("name", [*SMALL.values(), DECODE_ONE, *WINDOWS])
def test_flash_attention_4_is_called_as_its_functions_want(monkeypatch, name):
    def fwd(q, k, v, *, causal, return_lse, **options):
        return ours_as_theirs(q, k, v, {**options, "is_causal": causal})[:2]

    def bwd(q, k, v, out, dout, lse, *, causal, **options):
        return our_gradients(dout, q, k, v, out, lse, {**options, "is_causal": causal})

    module = SimpleNamespace(_flash_attn_fwd=fwd, _flash_attn_bwd=bwd)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(interface=module))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__path__=[]))
    assert prepared(raw_ops.flash_attention_4, name) == "right"


@pytest.fixture
def cudnn_of_the_cpu():
    """torch's ops for cuDNN, by their schemas, computed by ours."""
    library = torch.library.Library("aten", "IMPL")
    ops = torch.ops.flash_cute
    no_number = torch.empty(0)

    def turned(*tensors):
        return [t.transpose(1, 2) for t in tensors]

    def fwd(q, k, v, bias, with_lse, dropout_p=0.0, is_causal=False, mask=False, *, scale=None):
        assert bias is None and dropout_p == 0 and (not is_causal or q.shape[2] == k.shape[2])
        out, lse, *_ = ops.fwd(*turned(q, k, v), is_causal=is_causal)
        return (*turned(out), lse, *[no_number] * 2, q.shape[2], k.shape[2], *[no_number] * 3)

    def bwd(dout, q, k, v, out, lse, seed, offset, bias, ends_q, ends_k, max_q, max_k, dropout_p,
            is_causal, *, scale=None):  # fmt: skip
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        found = ops.bwd(*turned(dout, q, k, v, out), lse, is_causal=is_causal)
        return tuple(turned(*found[:3]))

    def packed_fwd(q, k, v, bias, ends_q, ends_k, max_q, max_k, with_lse, dropout_p=0.0,
                   is_causal=False, mask=False, *, scale=None):  # fmt: skip
        ends = (ends_q, ends_k, max_q, max_k)
        out, lse, *_ = ops.varlen_fwd(q, k, v, *ends, is_causal=is_causal)
        return out, lse, ends_q.clone(), ends_k.clone(), max_q, max_k, *[no_number] * 3

    def packed_bwd(dout, q, k, v, out, lse, seed, offset, bias, ends_q, ends_k, max_q, max_k,
                   dropout_p, is_causal, *, scale=None):  # fmt: skip
        saved = (dout, q, k, v, out, lse, ends_q, ends_k, max_q, max_k)
        return tuple(ops.varlen_bwd(*saved, is_causal=is_causal)[:3])

    for names, functions in zip(
        (raw_ops._CUDNN[False], raw_ops._CUDNN[True]), ((fwd, bwd), (packed_fwd, packed_bwd)),
        strict=True,
    ):  # fmt: skip
        for name, function in zip(names, functions, strict=True):
            library.impl(name, function, "CPU")
    yield
    library._destroy()


def test_cudnn_is_called_as_its_ops_want(cudnn_of_the_cpu):
    packed_groups = SMALL["packed-forward"].replace("h4/2", "h4/4")
    for name in (SMALL["dense-forward"], SMALL["dense-backward"], SMALL["packed-backward"],
                 packed_groups, DECODE_ONE):  # fmt: skip
        assert prepared(raw_ops.cudnn, name) == "right", name
    assert "groups of heads" in prepared(raw_ops.cudnn, SMALL["packed-forward"])
    assert "ragged caches" in prepared(raw_ops.cudnn, SMALL["decode"])
    assert prepared(raw_ops.cudnn, WINDOWS[0]) == "no windows"


@pytest.mark.parametrize("name", [*SMALL.values(), DECODE_ONE, *WINDOWS])
def test_graphs_of_ours_are_right(cuda, name):
    calls = {OURS: raw_ops.flash_cute}
    works, notes = random.prepare(RandomCase.parse(name), calls, torch.device(cuda), seed=3)
    assert notes == {} and works[OURS].calls == 8


def test_what_cannot_be_captured_is_called_as_it_is(monkeypatch):
    def captured(works, calls):
        raise RuntimeError("it waits for the GPU")

    monkeypatch.setattr(random, "captured", captured)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    work = Work(lambda: None, tuple)
    found = random._replayed([work], RandomCase.parse(DECODE_ONE))
    assert found == (work, "without a CUDA graph: RuntimeError: it waits for the GPU")


def test_calls_over_a_cache_have_caches_of_their_own(monkeypatch):
    made = []

    def call(case, x):
        made.append(x)
        return Work(lambda: None, lambda _: (x.q,))

    monkeypatch.setattr(random, "faults", lambda *_: {})
    random.prepare(RandomCase.parse(DECODE_ONE), {OURS: call}, CPU, seed=3)
    assert len(made) == 8 and all(x.q is made[0].q for x in made)
    assert all(not torch.equal(made[0].k, x.k) for x in made[1:])
    monkeypatch.setattr(random, "_BYTES_OF_CACHES", 1)
    made.clear()
    random.prepare(RandomCase.parse(DECODE_ONE), {OURS: call}, CPU, seed=3)
    assert len(made) == 1


def measured(monkeypatch, *runs):
    """The row of a case whose runs take so many ms: ours, then the rivals a and b."""
    turns = iter(runs)

    def interleave(works, *_):
        ms = zip(works, next(turns), strict=True)
        return {n: timing.Measured(1, [timing.Round(t)]) for n, t in ms}

    monkeypatch.setattr(timing, "interleave", interleave)
    calls = dict.fromkeys((OURS, "a", "b"), raw_ops.flash_cute)
    case = RandomCase.parse(SMALL["dense-forward"])
    row = random.measure(case, calls, CPU, seed=3, rounds=1)
    assert next(turns, None) is None
    return row


def test_a_miss_is_measured_again_and_the_second_run_counts(monkeypatch):
    row = measured(monkeypatch, (0.1, 0.098, 0.2))
    assert row["ratio"] == pytest.approx(0.98) and row["rival"] == "a" and len(row["runs"]) == 1
    row = measured(monkeypatch, (0.1, 0.2, 0.09), (0.1, 0.11, 0.12))
    assert row["ratio"] == pytest.approx(1.1) and row["rival"] == "a" and len(row["runs"]) == 2
    row = measured(monkeypatch, (0.1, 0.2, 0.09), (0.1, 0.2, 0.08))
    assert row["ratio"] == pytest.approx(0.8) and row["rival_us"] == pytest.approx(80)
    row = measured(monkeypatch, (0.1, 0.2, 0.09))  # the second run raises
    assert row["ratio"] is None and row["runs"] == [] and "StopIteration" in row["notes"][OURS]


def test_what_fails_is_said_and_not_timed():
    def failing(case, x):
        raise RuntimeError("no kernel for head dim 72\nmore")

    case = RandomCase.parse(SMALL["dense-forward"])
    row = random.measure(case, {OURS: raw_ops.flash_cute, "a": failing}, CPU, 3, 1)
    assert row["ratio"] is None and [*row["runs"][0]] == [OURS]
    assert row["notes"] == {"a": "RuntimeError: no kernel for head dim 72"}
    row = random.measure(case, {OURS: failing, "a": raw_ops.flash_cute}, CPU, 3, 1)
    assert row["ratio"] is None and row["runs"] == [] and [*row["notes"]] == [OURS]


def made_up(group, dim, rival_us, ratio, number=0):
    case = replace(draw(group, 5, number), dim=dim)
    return {
        "case": str(case), "group": group, "dim": dim, "ratio": ratio, "rival": "fa3",
        "rival_us": rival_us, "us": rival_us / ratio, "runs": [{}], "notes": {},
    }  # fmt: skip


def test_statistics_of_made_up_times():
    rows = [
        made_up("dense-forward", 64, 99.9, 0.5),
        made_up("dense-forward", 64, 100, 2.0),
        made_up("dense-forward", 64, 400, 0.97),
        made_up("dense-forward", 64, 500, 0.96),
        made_up("dense-forward", 96, 300, 1.5),
        made_up("decode", 128, 20, 1.1),
        {**made_up("decode", 128, 20, 1.1), "ratio": None},
    ]
    found = random.summary(rows)
    classes = found["classes"]["dense-forward"]
    assert classes["under 100 us"] == {"cases": 1, "geomean": 0.5, "least": 0.5, "share": 0.0}
    assert classes["100-300 us"]["cases"] == 1
    longest = classes["over 300 us"]
    assert (longest["cases"], longest["least"]) == (3, 0.96)
    assert longest["geomean"] == pytest.approx((0.97 * 0.96 * 1.5) ** (1 / 3))
    assert longest["share"] == pytest.approx(2 / 3)
    assert found["classes"]["decode"]["under 100 us"]["cases"] == 1
    assert [*found["classes"]] == ["dense-forward", "decode"]
    assert found["dims"][64]["dense-forward"]["share"] == 0.5
    assert found["dims"][96] == {"dense-forward": random.statistics(rows[4:5]), "decode": None}
    assert [row["ratio"] for row in found["worst"]] == [0.5, 0.96, 0.97, 1.1, 1.5, 2.0]


def test_a_report_names_the_worst_cases_and_the_reasons():
    rows = [made_up("packed-backward", 192, 400, 0.5 + i / 100, i) for i in range(30)]
    rows[3]["notes"] = {"fa4": "no packed backward"}
    rows[4]["notes"] = {"fa4": "no packed backward"}
    result = {
        "command": "python -m benchmarks.random", "machine": {"device": "NVIDIA H200"},
        "versions": {"torch": "2.11.0"}, "settings": {"seed": 5}, "rows": rows,
        "summary": random.summary(rows),
    }  # fmt: skip
    text = random.markdown(result)
    assert "| best rival | under 100 us | 100-300 us | over 300 us |" in text
    assert "| packed-backward | - | - | 0.64, least 0.50, 0% of 30 |" in text
    assert "| 192 | 0.64, least 0.50, 0% of 30 |" in text
    assert text.count("--case") == random.WORST
    assert f'0.50, 800.0 us, fa3 400.0: --case "{rows[0]["case"]}"' in text
    assert f"fa4: no packed backward (2 cases, first {rows[3]['case']})" in text


def test_a_dry_run_names_the_cases():
    command = [sys.executable, "-m", "benchmarks.random", "--seed", "7", "--dry-run"]
    more = ["--cases", "5", "--groups", "decode,dense-forward"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
    first, *names = done.stdout.splitlines()
    assert first == "seed 7:"
    cases = [RandomCase.parse(name) for name in names]
    assert (
        cases == [draw(group, 7, i) for i in range(3) for group in ("decode", "dense-forward")][:5]
    )


def test_without_a_gpu_one_line_says_what_is_needed(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert random.main(["--cases", "1"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "no CUDA device here" in said.err


def test_missing_rivals_are_named_once_and_one_case_is_run(tmp_path, capsys):
    file = tmp_path / "found.json"
    arguments = ["--device", "cpu", "--case", SMALL["decode"], "--json", str(file)]
    assert random.main(arguments) == 0
    said = capsys.readouterr().out
    for name in ("fa3", "fa4", "cudnn"):
        assert said.count(f"{name} is missing") == 1
    found = json.loads(file.read_text())
    (row,) = found["rows"]
    assert row["case"] == SMALL["decode"] and row["ratio"] is None and row["runs"][0][OURS] > 0
    assert [*found["missing"]] == ["fa3", "fa4", "cudnn"] and found["summary"]["worst"] == []


def test_no_case_begins_after_the_time(monkeypatch, capsys):
    row = made_up("decode", 64, 90, 0.9)
    monkeypatch.setattr(random, "measure", lambda *_: row)
    now = iter(range(0, 1000, 25))
    monkeypatch.setattr(random.time, "monotonic", lambda: next(now))
    arguments = ["--device", "cpu", "--cases", "9", "--minutes", "1", "--seed", "1"]
    monkeypatch.setitem(row, "runs", [{OURS: 100.0, "fa3": 90.0}])
    assert random.main(arguments) == 0
    said = capsys.readouterr().out
    assert "The worst of 2 cases:" in said and "| decode | 0.90, least 0.90, 0% of 2 |" in said


@pytest.mark.parametrize(
    "arguments",
    [["--groups", "sparse"], ["--groups", ""], ["--rivals", "fa5"], ["--rounds", "0"],
     ["--cases", "0"], ["--case", "dense"]],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        random.main([*arguments, "--dry-run"])
    assert "error: " in capsys.readouterr().err
