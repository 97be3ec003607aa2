"""The command line, as a user calls it."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import fresh
import pytest
import torch
from typer.testing import CliRunner

from flash_cute import kernels
from flash_cute.cli import info, profile
from flash_cute.cli.app import app
from flash_cute.lab import __main__ as laboratory
from flash_cute.lab.kernel_configs import get_kernels_to_build
from flash_cute.tuning import calls

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def piped(monkeypatch):
    """Output goes to no terminal, so that tables are as wide as they like."""
    monkeypatch.delenv("COLUMNS", raising=False)


def run(*arguments, status=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


def test_the_module_and_its_help():
    command = [sys.executable, "-m", "flash_cute", "--help"]
    helped = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert helped.returncode == 0, helped.stderr
    for name in ("info", "list", "explain", "bench", "profile", "demo", "fuzz", "lab", "tune"):
        assert re.search(rf"\b{name}\b", helped.stdout)
        assert len(run(name, "--help") if name != "fuzz" else name) > 0


def test_the_laboratory_s_progression_has_a_plot():
    help = run("lab", "progression", "--help")
    assert "flash-cute lab progression" in help and "--plot" in help


def test_the_laboratory():
    listed = run("lab", "list").splitlines()
    assert listed == [str(config) for config in get_kernels_to_build()]
    with pytest.raises(SystemExit):  # argparse's
        laboratory.main(["--help"], "flash-cute lab")
    assert "progression" in run("lab", "--help")


WITHOUT_TYPER = """
import sys
from importlib import util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name == "typer" else find(name, *rest)
from flash_cute.cli import main
main()
"""


def test_without_typer_it_says_what_to_install():
    ended = fresh.run(WITHOUT_TYPER)
    assert ended.returncode == 1
    assert ended.stderr == "flash-cute needs typer: pip install 'flash-cute[cli]'\n"


def test_importing_the_package_loads_no_command_line():
    code = "import sys, flash_cute; print([m for m in ('typer', 'rich') if m in sys.modules])"
    ended = fresh.run(code)
    assert ended.stdout == "[]\n"


def test_info():
    found = json.loads(run("info", "--json"))
    assert list(found) == ["flash_cute", "kernels", "torch", "gpus", "tools", "environment"]
    assert found["torch"]["version"] == torch.__version__
    assert found["kernels"]["all"] == len(kernels.kernels())
    text = run("info")
    assert f"version: {torch.__version__}" in text and found["flash_cute"]["library"] in text


def test_info_of_a_broken_machine(monkeypatch):
    def broken():
        raise OSError("no driver")

    monkeypatch.setattr(torch.cuda, "device_count", broken)
    monkeypatch.setattr(info.library, "find", broken)
    found = json.loads(run("info", "--json"))
    assert found["gpus"] == found["flash_cute"] == {"error": "OSError: no driver"}
    assert "OSError: no driver" in run("info")


def test_list():
    rows = json.loads(run("list", "--json"))
    assert rows == [asdict(kernel) for kernel in kernels.kernels()]
    text = run("list", "fwd_sm90_bf16_plain_d64", "--gpu", "h100")
    assert re.search(r"d64x64_m192_n128\S* +192 x 128 +4 +512 +128 +201 KiB +1 +25%", text)
    assert re.search(r"d64x64_m192_n128\S* .* -  +-  ", run("list", "fwd_sm90", "--gpu", "a100"))
    assert "no kernel's id contains" in run("list", "sm75", status=2)


def test_what_an_sm_holds():
    for gpu in kernels.GPUS.values():
        for kernel in kernels.kernels():
            count = kernels.ctas_an_sm(kernel, gpu)
            assert 0 <= count <= kernel.ctas
            room = count * (kernel.smem_bytes + 1024) <= gpu.smem_optin + 1024
            assert room and (count == 0 or kernel.smem_bytes <= gpu.smem_optin)


def test_explain_is_what_kernels_say():
    sizes = ["--batch", "4", "--seqlen", "4096", "--heads-k", "4", "--causal", "--gpu", "h100"]
    problem = kernels.Problem(batch=4, heads=16, heads_k=4, seqlen_q=4096, causal=True)
    found = json.loads(run("explain", *sizes, "--all", "--json"))
    assert found["problem"] == str(problem) and found["notes"] == []
    assert found["plan"] == json.loads(json.dumps(asdict(kernels.plan(problem, "h100"))))
    assert found["kernels"] == [asdict(row) for row in kernels.explain(problem, "h100")]
    (listed,) = json.loads(run("list", found["plan"]["kernel"]["id"], "--json"))
    assert found["plan"]["kernel"] == listed  # whether it is built, too
    text = run("explain", *sizes, "--tile", "32,128")
    plan = kernels.plan(problem, "h100")
    assert f"plan: {plan}" in text and "tile: 192 queries x 80 keys" in text
    near = kernels.nearest(problem, 128, 32, "h100")
    assert f"nearest to Bc=32, Br=128: {near}" in text
    assert "estimated to take" in text and "kernels of other dtypes: --all" in text
    assert "computes in" not in text and "computes in" in run("explain", *sizes, "--all")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "bwd", "--deterministic"], "dq_accumulate=serialized"),
        (["--op", "decode", "--seqlen", "1", "--seqlen-k", "9000", "--page-size", "16"], "decode_"),
        (["--dtype", "e4m3"], "chosen: fwd_sm90_e4m3_plain_d128x128"),
        (
            ["--dtype", "e4m3", "--softcap"],
            "widened to 16 bits, which is exact, and run as a 16-bit",
        ),
        (["--softcap", "--alibi", "--dropout", "--varlen"], "_rich_"),
        (["--window", "100,0", "--dropout", "--gpu", "a100"], "window_size=(100,0)"),
    ],
)
def test_explain_options(arguments, words):
    assert words in run("explain", "--gpu", "h100", *arguments)


def test_explain_fails_if_no_kernel_can_do_it():
    assert "no kernel can do it" in run("explain", "--head-dim", "300", status=1)
    found = json.loads(run("explain", "--head-dim", "300", "--gpu", "h100", "--json", status=1))
    assert found["plan"] is None and all(row["reason"] for row in found["kernels"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "3", "--heads-k", "2"], "expected a multiple of heads_k"),
        (["--dtype", "fp64"], "expected one of bf16"),
        (["--gpu", "v100"], "expected a100"),
        (["--window", "1"], "expected two numbers"),
    ],
)
def test_bad_options(arguments, words):
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", run("explain", *arguments, status=2)).split())
    assert words in text


def test_bench_measures_and_plots(tmp_path):
    plot, results = tmp_path / "mine.png", tmp_path / "mine.json"
    run(
        "bench", "--batch", "1", "--heads", "2", "-s", "32", "-s", "48", "--head-dim", "16",
        "--causal", "--rounds", "1", "--device", "cpu", "--plot", str(plot), "--json", str(results),
    )  # fmt: skip
    found = json.loads(results.read_text())
    cases = [(row["case"], row["direction"]) for row in found["results"]]
    names = [f"bf16 b1 h2/2 q{n} k{n} d16/16 causal" for n in (32, 48)]
    assert cases == [(name, direction) for name in names for direction in ("fwd", "bwd")]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_demo_and_fuzz():
    assert "flash_cute" in run("demo", "--device", "cpu", "--seqlen", "32")
    fuzzed = run("fuzz", "--cases", "2", "--device", "cpu", "--seed", "3")
    assert "2 cases, 0 failures" in fuzzed
    run("fuzz", "--cases", "x", status=2)


RAW = (
    '"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread",'
    '"sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",'
    '"sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",'
    '"lts__t_sectors.avg.pct_of_peak_sustained_elapsed",'
    '"dram__throughput.avg.pct_of_peak_sustained_elapsed",'
    '"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",'
    '"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"\n'
    '"","","ns","register/thread","%","%","%","%","inst","inst"\n'
    '"0","forward","1,234,500","168","71.5","44.25","12","n/a","1.0","3.0"\n'
    '"1","merge","2000","32","n/a","n/a","80","70","0","0"\n'
)
NCU = """#!{python}
import sys
argv = sys.argv[1:]
if "--query-metrics" in argv:
    print("sm__inst_executed_pipe_xu   Counter\\nlts__t_sectors  Counter")
elif "--import" in argv:
    sys.stdout.write({raw!r})
else:
    metrics = argv[argv.index("--metrics") + 1].split(",")
    assert [m.split(".")[0] for m in metrics] == [
        "sm__inst_executed_pipe_xu", "lts__t_sectors", "gpu__time_duration"], metrics
    assert argv[argv.index("--nvtx-include") + 1] == "flash_cute/"
    if {fault!r}:
        sys.exit({fault!r})
    open(argv[argv.index("--export") + 1], "w").close()
"""


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """`fake_ncu(fault="")` puts a program on the PATH that answers as ncu does, or fails."""

    def put(fault=""):
        program = tmp_path / "ncu"
        program.write_text(NCU.format(python=sys.executable, raw=RAW, fault=fault))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr("flash_cute.cli.app.can_use_cuda", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    return put


def test_profile(fake_ncu, tmp_path):
    fake_ncu()
    report = tmp_path / "reports" / "mine.ncu-rep"
    found = json.loads(run("profile", "--report", str(report), "--json"))
    assert report.is_file()
    forward, merge = found
    assert (forward["kernel"], forward["microseconds"], forward["registers"]) == (
        "forward", 1234.5, 168
    )  # fmt: skip
    assert forward["roofs"] == {
        "tensor pipe": 71.5, "exponentials": 44.25, "shared memory": None, "L2": 12.0, "DRAM": None
    }  # fmt: skip
    assert forward["stalls"] == {"long_scoreboard": 0.75, "barrier": 0.25}
    assert merge["stalls"] == {} and merge["roofs"]["DRAM"] == 70.0
    text = run("profile", "--report", str(report))
    assert re.search(r"forward +1234.5 +168 +72 % +44 % +- +12 % +- +long_scoreboard 75%", text)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("==ERROR== ERR_NVGPUCTRPERM - no", "NVreg_RestrictProfilingToAdminUsers=0"),
     ("==ERROR== a fault", "ended with 1:")],
)  # fmt: skip
def test_profile_says_why_not(fake_ncu, tmp_path, fault, words):
    fake_ncu(fault)
    assert words in run("profile", "--report", str(tmp_path / "r"), status=1)


def test_profile_without_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ncu, of Nsight Compute, is not on the PATH" in run("profile", status=1)


def test_reports_without_kernels():
    for text in ("", "==PROF== x\n", RAW[: RAW.index('"0","forward"')]):
        with pytest.raises(profile.ProfileError, match="no kernel"):
            profile.parse(text)


@pytest.mark.parametrize("op", kernels.OPS)
def test_the_call_that_is_profiled(device, op):
    sizes = {"batch": 1, "heads": 4, "heads_k": 2, "seqlen_q": 8, "seqlen_k": 8}
    call = calls.call_of(
        op, "bfloat16", **sizes, head_dim=16, head_dim_v=16, causal=True, device=device
    )
    result = call()
    first = result[0] if isinstance(result, tuple) else result
    assert first.shape == (1, 8, 4, 16)
