"""The command line in a terminal of 80 columns, and what it says when something cannot be done."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flash_cute
from flash_cute import kernels
from flash_cute.cli import cards, cpu, tables
from flash_cute.cli.app import app
from flash_cute.cli.profile import Profile
from flash_cute.cpu import plain
from flash_cute.cpu.tiles import Options
from flash_cute.native import library

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = not library.can_use_cuda()
COMMANDS = ("info", "list", "explain", "bench", "profile", "demo", "fuzz", "lab", "tune")
ID = re.compile(r"(?:fwd|bwd|decode)_sm\d+_\S*")
SMALL = ["-b", "1", "--heads", "2", "-d", "16", "--rounds", "1", "--device", "cpu"]


def run(*arguments, status=0):
    result = CliRunner().invoke(app, list(arguments), terminal_width=80)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def narrow(monkeypatch):
    """`narrow(*arguments)`: what a command prints, no line of which is wider than 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def printed(*arguments, status=0):
        text = run(*arguments, status=status)
        assert [line for line in text.splitlines() if len(line) > 80] == []
        return text

    return printed


def test_help_lists_commands_in_whole_sentences(narrow):
    for command in ((), ("lab",)):
        lines = narrow(*command, "--help").partition("Commands:")[2].splitlines()
        listed = [line for line in lines if line.strip()]
        assert listed and all(line.endswith(".") for line in listed)
        assert not any(line.endswith("...") for line in listed)


def ids_in(text):
    return set(ID.findall(text))


@pytest.mark.parametrize(
    "command",
    [(), *((name,) for name in COMMANDS), *(("lab", x) for x in ("list", "check", "progression"))],
    ids=" ".join,
)
def test_help(narrow, command):
    long, short = narrow(*command, "--help"), narrow(*command, "-h")
    assert long == short
    assert f"Usage: {' '.join(('flash-cute', *command))}" in long
    assert "…" not in long and "<bool>" not in long


def test_a_group_without_a_command_is_its_help(narrow):
    assert "progression" in narrow("lab", status=2)
    assert "explain" in narrow(status=2)


def test_version():
    assert run("--version").startswith("flash_cute ")
    assert flash_cute.__version__ in run("--version")


def test_list_has_whole_ids(narrow):
    assert ids_in(narrow("list")) == {kernel.id for kernel in kernels.kernels()}


@pytest.mark.parametrize("op", kernels.OPS)
@pytest.mark.parametrize("gpu", cards.NAMES)
def test_explain_has_the_choice_first_and_last(narrow, op, gpu):
    sizes = {"seqlen_q": random.choice([1, 100, 4096]), "head_dim": random.choice([64, 128, 192])}
    problem = kernels.Problem(op=op, heads=16, seqlen_k=9000, **sizes)
    options = ["--op", op, "--seqlen", str(sizes["seqlen_q"]), "--seqlen-k", "9000"]
    options += ["--head-dim", str(sizes["head_dim"]), "--gpu", gpu]
    card = cards.card(gpu)
    rows = kernels.explain(problem, card)
    planned = kernels.plan(problem, card).kernel.id
    text = narrow("explain", *options)
    lines = text.splitlines()
    (first,) = (line for line in lines[:3] if line.startswith("plan: "))
    assert first.split()[1] == planned and lines[-1] == f"chosen: {planned}"
    known = {row.id for row in rows}
    assert ids_in(text) <= known
    assert ids_in(narrow("explain", *options, "--all")) == known


def test_reasons_stand_once(narrow):
    text = narrow("explain", "--gpu", "h100", "--causal")
    reasons = re.findall(r"^  \d+ kernels: (.*)$", text, re.MULTILINE)
    assert len(reasons) == len(set(reasons)) > 2


@pytest.mark.parametrize("seed", range(200))
def test_the_path_of_a_cpu_is_the_one_that_calls_take(seed):
    draw = random.Random(f"path {seed} {random.random()}")
    heads_k, rows = draw.choice([1, 2]), draw.choice([0, 1, 7])
    problem = kernels.Problem(
        batch=draw.choice([0, 1, 2]), heads=2 * heads_k, heads_k=heads_k, seqlen_q=rows,
        seqlen_k=draw.choice([rows, rows, 0, 3, 9]), head_dim=draw.choice([8, 1024, 1025]),
        head_dim_v=draw.choice([None, None, 8]), causal=draw.random() < 0.5,
        window_size=draw.choice([(-1, -1), (-1, -1), (2, 0), (50, 50), (-1, 2)]),
        **{name: draw.random() < 0.2 for name in ("softcap", "alibi", "dropout")},
    )  # fmt: skip
    shapes = (problem.heads, problem.head_dim), (heads_k, problem.head_dim)
    dims = (*shapes, (heads_k, problem.head_dim_v or problem.head_dim))
    lengths = (rows, problem.seqlen_k, problem.seqlen_k)
    q, k, v = (
        torch.empty(problem.batch, length, *dim, device="meta")
        for length, dim in zip(lengths, dims, strict=True)
    )
    slopes = torch.empty(1, problem.heads) if problem.alibi else None
    asked = Options(
        scale=0.1, window=cpu.window(problem), softcap=float(problem.softcap), slopes=slopes,
        sink=None, dropout_p=0.1 * problem.dropout, rng=None,
    )  # fmt: skip
    is_plain = plain.causal_of(q, k, v, asked) is not None
    assert (cpu.reasons(problem) == []) == is_plain == (cpu.path(problem) == cpu.PLAIN)


def test_explain_on_a_cpu(narrow):
    text = narrow("explain", "--gpu", "cpu", "--window", "100,0", "--softcap")
    assert "path: tiles of 128 queries x 512 keys" in text
    assert "why: softcap, a window of 100 keys before each query's own" in text
    found = json.loads(run("explain", "--gpu", "cpu", "--json"))
    assert found["path"] == cpu.PLAIN and found["reasons"] == []
    narrow("explain", "--gpu", "cpu", "--op", "decode", "--dtype", "e4m3")
    assert "path: the tiles of 128 queries x 128 keys" in narrow(
        "explain", "--gpu", "cpu", "--sparse"
    )


def test_explain_of_a_sparse_call(narrow):
    assert "_list" in narrow("explain", "--sparse", "--causal", "--gpu", "h100").split("also")[0]


@pytest.mark.parametrize("words", [("--sparse", "--op", "decode"), ("--deterministic",)])
@pytest.mark.parametrize("gpu", ["cpu", "h100"])
def test_options_of_another_op_are_told_in_a_line(words, gpu):
    found = CliRunner().invoke(app, ["explain", "--gpu", gpu, *words])
    assert found.exit_code == 2 and "; only " in found.output


def test_info_has_the_facts_of_a_bug_report(narrow):
    text = narrow("info")
    built = sum(kernel.built for kernel in kernels.kernels())
    assert f"built: {built} of {len(kernels.kernels())}" in text
    for name in ("system", "libc", "cpu", "cores", "threads", "transformers", "flash-attn", "c++"):
        assert re.search(rf"^  {re.escape(name)}: \S", text, re.MULTILINE), name


def test_profiles_where_a_table_has_no_room(narrow, capsys, monkeypatch):
    name = "void flash_cute::sm90::forward<flash_cute::KernelConfig{(Op)0, (Arch)90}>"
    found = Profile(name, 12.5, 168, {"DRAM": 40.0, "L2": None}, {"wait": 0.5})
    monkeypatch.setattr(tables, "ROOFS", ["DRAM", "L2"])
    tables.of_profiles([found]).show()
    text = capsys.readouterr().out
    assert "12.5 us, 168 registers; DRAM 40 %, L2 -; warps wait for wait 50%" in text
    assert all(len(line) <= 80 for line in text.splitlines()) and "forward<" in text


def test_bench_in_a_terminal(narrow, monkeypatch):
    monkeypatch.setattr("benchmarks.report._is_terminal", lambda: True)
    text = narrow("bench", *SMALL, "-s", "32", "-s", "48", "--causal")
    assert "sdpa" in text and " ms" in text and "TFLOP" not in text
    assert "bf16 b1 h2/2 d16/16 causal, in ms" in text


def test_demo_lab_and_tune(narrow, tmp_path, monkeypatch):
    narrow("demo", "--device", "cpu", "--seqlen", "16")
    narrow("lab", "list")
    file = tmp_path / "calibration.json"
    file.write_text("{")
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    assert "not used:" in narrow("tune", "--show", "--path", str(file))
    assert json.loads(run("tune", "--show", "--json", "--path", str(file)))["kernels"] == {}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["bench", "--dtype", "fp32"], "--dtype fp32: expected one of bf16, fp16, e4m3"),
        (["bench", "--direction", "x"], "expected one of fwd, bwd, fwd,bwd"),
        (["bench", "--rivals", "x", "--device", "cpu"], "unknown rivals ['x']"),
        (["bench", "-b", "0"], "Invalid value for '--batch'"),
        (["bench", "--heads", "3", "--heads-k", "2", "--device", "cpu"], "is no multiple of"),
        (["bench", "--device", "tpu"], "expected cuda, cuda:N or cpu"),
        (["demo", "--device", "mps"], "expected cuda, cuda:N or cpu"),
        (["demo", "-s", "0"], "Invalid value for '--seqlen'"),
        (["fuzz", "--device", "mps"], "expected cuda, cuda:N or cpu"),
        (["fuzz", "--case", "{"], "--case {:"),
        (["lab", "progression", "--dtype", "fp32"], "expected bf16 or fp16"),
        (["lab", "progression", "--d-head", "96"], "expected 64 or 128"),
        (["explain", "--softcap", "30"], "unexpected extra argument"),
        (["explain", "--gpu", "v100"], "expected a100"),
        (["lst"], "Did you mean 'list'?"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_makes_no_sense_is_one_error(command, words):
    text = run(*command, status=2)
    assert words in text and "Traceback" not in text
    assert len(re.findall("Error", text)) == 1


@pytest.mark.skipif(not NO_GPU, reason="needs a machine without a GPU that can be used")
@pytest.mark.parametrize(
    "command",
    [
        ["demo", "--device", "cuda"],
        ["bench", "--device", "cuda"],
        ["fuzz", "--device", "cuda:0"],
        ["lab", "check"],
        ["lab", "progression"],
        ["tune", "fwd bf16 b1 h1 q64 d64"],
    ],
    ids=" ".join,
)
def test_without_a_gpu_it_is_one_line(command):
    text = run(*command, status=1)
    assert len(text.splitlines()) == 1 and re.search(
        "GPU.*there is none here|there is no GPU here", text
    )


def test_tune_shows_no_file_that_is_missing(tmp_path):
    text = run("tune", "--show", "--path", str(tmp_path / "none.json"), status=1)
    assert text == f"no file {tmp_path / 'none.json'}; `flash-cute tune SHAPES` writes one\n"


def test_cards_are_known_to_the_library():
    assert tuple(kernels.GPUS) == cards.KNOWN
    for name, arch in ((name, cards.ARCHS[name]) for name in cards.ARCHS):
        assert f"sm_{cards.card(name).capability}" == name and cards.card(arch) == cards.card(name)
    problem = kernels.Problem(heads=8, seqlen_q=512, head_dim=64)
    for name in cards.NAMES:
        assert kernels.plan(problem, cards.card(name)).kernel.arch <= cards.card(name).capability
    renamed = replace(kernels.GPUS["h100"], name="x")
    assert kernels.plan(problem, renamed) == kernels.plan(problem, "h100")


HELP = """
import sys
from flash_cute_command import main
sys.argv = ["flash-cute", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code
assert not {"torch", "rich"} & set(sys.modules), "help waits for an import"
"""


def test_help_does_not_import_torch():
    ended = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert "explain" in ended.stdout


def test_the_script_runs_commands():
    code = (
        "import sys; from flash_cute_command import main; sys.argv[1:] = ['list', 'sm75']; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 2 and "no kernel's id contains 'sm75'" in ended.stderr
