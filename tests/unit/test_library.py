"""The compiled library: found, loaded, stable in its ABI, and checked by tools that can fail."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import fresh
import pytest
import torch

import flash_cute
from flash_cute.kernels import KernelConfig
from flash_cute.native import library

ROOT = Path(__file__).resolve().parents[2]
PTXAS = """
ptxas info    : Compiling entry function '_ZN10flash_cute4sm807forwardIXtl12KernelConfigLNS_2OpE0\
ELNS_4ArchE80ELNS_5DTypeE1ELNS_4TierE0ELi64ELi64ELi128ELi64ELi2ELi4ELi2EEEEEvNS_10FwdProblemE' \
for 'sm_90'
ptxas info    : Function properties for it
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 249 registers, used 1 barriers
ptxas info    : Compiling entry function '_ZN10flash_cute12_GLOBAL__N_14fillENS_7GapFillE' for \
'sm_80'
ptxas info    : Function properties for it
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


PRINT_CONFIGS = """
#include <cstdio>
#include "core/config.h"
using namespace flash_cute;
static void print(const KernelConfig& c) {
  std::puts(c.id().c_str());
}
#define KERNEL(op, arch, dtype, tier, ...) \\
  print({Op::op, Arch::arch, DType::dtype, Tier::tier, __VA_ARGS__});
int main() {
#include "rows.def"
}
"""


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_library_in_use_is_stable():
    assert tool("check_library").problems(library.find(), all_kernels=False) == []


def test_what_older_systems_lack_is_inside():
    names = ["nm", "-DC", "--undefined-only", library.find()]
    needed = subprocess.run(names, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"::basic_o?stringstream\(\)|::str\(\)|_single_threaded", needed) == []


RAISE = """
import torch
torch.ops.load_library({path!r})
for problem in ("abc", "", "[1]"):
    try:
        torch.ops.flash_cute.plan(problem)
    except RuntimeError as error:
        print(error)
"""


def test_an_error_of_cpp_is_a_runtime_error():
    with pytest.raises(RuntimeError, match="expected"):
        torch.ops.flash_cute.plan("abc")


def test_an_error_of_cuda_code_is_a_runtime_error(cuda):
    q = torch.zeros(2, 8, 4, 32, device=cuda, dtype=torch.float16)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="batch sizes differ: q has 2, k 1"):
            torch.ops.flash_cute.fwd(q, q[:1], q)
        with pytest.raises(RuntimeError, match="batch sizes differ: q has 2, k 1"):
            torch.ops.flash_cute.bwd(q, q, q[:1], q, q, torch.zeros(2, 4, 8, device=cuda))


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_errors_pass_a_statically_linked_cpp_runtime(tmp_path):
    """As compilers with a prefix of their own link it, which have no shared one on the path."""
    torch_path = Path(torch.__file__).parent
    listed = (ROOT / "CMakeLists.txt").read_text().split("add_library(", 1)[1].split(")")[0]
    names = [*re.findall(r"csrc/\S+\.cpp", listed), "csrc/core/no_kernels.cpp"]
    names += [x for x in (ROOT / "csrc" / "kernels").rglob("*.cpp") if x.parent.name != "lab"]
    built, whole = tmp_path / "libstatic.so", tmp_path / "whole.cpp"
    whole.write_text("".join(f'#include "{ROOT / name}"\n' for name in names))
    subprocess.run(
        ["c++", "-std=c++20", "-shared", "-fPIC", "-O0", "-fvisibility=hidden",
         "-static-libstdc++", "-static-libgcc", "-DFLASH_CUTE_NAMESPACE=flash_cute",
         "-DTORCH_TARGET_VERSION=0x020a000000000000", "-I", ROOT / "csrc",
         "-isystem", torch_path / "include", "-L", torch_path / "lib",
         f"-Wl,--version-script={ROOT / 'cmake' / 'exports.map'}",
         whole, "-Wl,--no-as-needed", "-ltorch", "-o", built],
        check=True,
    )  # fmt: skip
    assert tool("check_library").problems(built, all_kernels=False) == []
    run = subprocess.run(
        [sys.executable, "-c", RAISE.format(path=str(built))], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("expected") == 3


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_what_a_library_exports_is_reported(tmp_path):
    source, built = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text("#include <string>\nint by_accident(std::string s) { return s.size(); }\n")
    subprocess.run(["c++", "-shared", "-fPIC", "-O0", "-o", built, source], check=True)
    (problem,) = tool("check_library").problems(built, all_kernels=False)
    assert problem.startswith("exports T by_accident(std::")


def test_unstable_symbols_are_recognised():
    unstable = tool("check_library").UNSTABLE
    assert unstable.match("_ZN3c106detail14torchCheckFailEPKcS2_jS2_")
    assert unstable.match("_ZN2at4_ops5empty")
    assert unstable.match("PyObject_Call")
    assert not unstable.match("aoti_torch_get_sizes")
    assert not unstable.match("_ZNSt13runtime_errorC1EPKc")


def test_kernels_of_this_build_are_rows_of_the_table():
    rows = "".join(table.read_text() for table in (ROOT / "csrc").rglob("rows.def"))
    ids = tool("check_library").config_ids(rows)
    assert len(ids) == rows.count("\nKERNEL(") > 100
    assert set(library.kernels()) <= ids


ROWS = """
KERNEL(Fwd, Sm80, BF16, Plain,  64,  64, 128,  64, 2, 4, 2, 1)
KERNEL(Fwd, Sm80, FP16, Plain,  64,  64, 128,  64, 2, 4, 2, 1)
KERNEL(Fwd, Sm80, BF16, Plain, 192, 128, 128,  64, 1, 8, 1, 1)
KERNEL(Fwd, Sm80, BF16, Rich,   64,  64, 128,  64, 2, 4, 2, 1)
KERNEL(Fwd, Sm80, FP16, Rich,   64,  64, 128,  64, 2, 4, 2, 1)
KERNEL(Bwd, Sm90, FP16, Rich,   64, 128,  64,  96, 2, 4, 2, 1)
KERNEL(Fwd, Sm90, BF16, Plain, 128, 128, 128, 128, 2, 8, 1, 1)
KERNEL(Fwd, Sm90, BF16, Plain, 128, 128, 128, 144, 2, 8, 1, 2)
KERNEL(Fwd, Sm90, BF16, Plain, 256, 256, 128,  80, 2, 8, 1, 1)
KERNEL(Fwd, Sm90, BF16, Rich,  128, 128, 128, 128, 2, 8, 1, 1)
KERNEL(Fwd, Sm90, BF16, Rich,  128, 128, 192,  80, 2, 12, 1, 1)
KERNEL(Fwd, Sm90, BF16, Rich,  256, 256, 128,  80, 2, 8, 1, 1)
KERNEL(Bwd, Sm90, BF16, Plain, 192, 192,  64,  64, 3, 12, 1, 2)
KERNEL(Bwd, Sm80, BF16, Rich,   64,  64,  64, 128, 2, 4, 1, 1)
KERNEL(Fwd, Sm80, TF32, Rich,   64,  64, 128,  64, 1, 4, 2, 1)
KERNEL(Bwd, Sm80, TF32x3, Rich, 64, 64,  32,  64, 2, 4, 2, 1)
KERNEL(Fwd, Sm90, BF16, Plain, 128, 128, 128, 128, 2, 8, 1, 1, TileKind::List)
KERNEL(Decode, Sm90, BF16, Rich, 128, 128, 16, 256, 3, 8, 1, 8, TileKind::Interval, DType::E4M3)
KERNEL(Decode, Sm80, FP16, Rich, 128, 128, 16, 256, 3, 8, 1, 1, TileKind::Interval, DType::INT8)
"""


def test_ids_are_those_of_the_compiled_configs(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "rows.def").write_text(ROWS)
    (tmp_path / "print.cpp").write_text(PRINT_CONFIGS)
    program = tmp_path / "print"
    include = ["-I", ROOT / "csrc", "-I", tmp_path]
    subprocess.run(
        [compiler, "-std=c++20", *include, tmp_path / "print.cpp", "-o", program], check=True
    )
    ids = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert set(ids) == tool("check_library").config_ids(ROWS)


def test_the_list_of_kernels_merges_dtypes_and_tiers():
    row = KernelConfig(
        "id", "fwd", 80, "bf16", "plain", 64, 64, 128, 64, 2, 4, 128, 2, 1, smem_bytes=48 << 10
    )
    rows = [
        replace(row, tier=tier, dtype=d) for tier in ("plain", "rich") for d in ("bf16", "fp16")
    ]
    rows.insert(2, replace(row, head_dim=192, head_dim_v=128, smem_bytes=88 << 10))
    rows.append(replace(row, op="bwd", arch=90, tier="rich", smem_bytes=138 << 10))
    rows.append(replace(row, tier="rich", smem_bytes=47 << 10))  # other shared memory: apart
    _, _, *lines = tool("support_matrix").kernel_table(rows).splitlines()
    sm80, tile = "sm_80 and newer", "128 x 64 | 2 | 4 | 2 | 1"
    assert lines == [
        f"| forward | {sm80} | bf16, fp16 | plain, rich | 64 | {tile} | 48 KiB |",
        f"| forward | {sm80} | bf16 | plain | 192, of v 128 | {tile} | 88 KiB |",
        f"| backward | sm_90a | bf16 | rich | 64 | {tile} | 138 KiB |",
        f"| forward | {sm80} | bf16 | rich | 64 | {tile} | 47 KiB |",
    ]


def test_missing_kernels_are_reported(tmp_path, monkeypatch):
    checker = tool("check_library")
    table = tmp_path / "rows.def"
    table.write_text("\nKERNEL(Fwd, Sm80, BF16, Rich, 7, 9, 16, 16, 1, 1, 1, 1)\n")
    monkeypatch.setattr(checker, "KERNELS", tmp_path)
    (problem,) = checker.problems(library.find(), all_kernels=True)
    assert "fwd_sm80_bf16_rich_d7x9_m16_n16_s1_w1_c1" in problem


def test_spills_are_reported():
    regs = tool("regs")
    usage, pass_usage = regs.parse(PTXAS)
    assert (usage.kernel, usage.gpu, usage.registers, usage.spill_bytes) == (
        "forward",
        "sm_90",
        249,
        12,
    )
    assert "head_dim 64, head_dim_v 64, block_m 128, block_n 64" in usage.config
    assert pass_usage == ("fill", "", "sm_80", 32, 0)
    assert regs.excess([usage, pass_usage]) == [usage]
    assert regs.excess([usage._replace(spill_bytes=0)]) == []
    params = "flash_cute::Params<(flash_cute::Op)1>"
    name = f"void flash_cute::sm80::backward<KernelConfig{{(flash_cute::Op)1}}>({params})"
    assert regs._kernel_and_config(name)[0] == "backward"


def test_a_missing_library_says_what_to_do(tmp_path):
    code = "import flash_cute"
    environment = {"FLASH_CUTE_LIBRARY": str(tmp_path / "none.so"), "PYTHONPATH": str(ROOT)}
    result = fresh.run(code, env=environment)
    assert result.returncode != 0
    assert "FLASH_CUTE_LIBRARY names" in result.stderr


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Where a library may lie, first choice first, for an editable installation of a checkout."""
    monkeypatch.delenv("FLASH_CUTE_LIBRARY", raising=False)
    checkout = tmp_path / "checkout"
    folders = [tmp_path / "site-packages" / "flash_cute", checkout / "flash_cute"]
    monkeypatch.setattr(flash_cute, "__path__", [str(folder) for folder in folders])
    monkeypatch.setattr(library, "__file__", str(checkout / "flash_cute" / "native" / "library.py"))
    folders += [checkout / "build" / "make", checkout / "build" / "dev"]
    for folder in folders:
        folder.mkdir(parents=True)
    return [folder / "libflash_cute.so" for folder in folders]


def test_the_library_is_that_of_the_package(places, monkeypatch):
    *searched, other = places
    for age, path in enumerate(reversed(places)):  # the last choice is the newest
        path.touch()
        os.utime(path, times=(10**9 - age, 10**9 - age))
    for path in searched:
        assert library.find() == path
        path.unlink()
    monkeypatch.setenv("FLASH_CUTE_LIBRARY", str(other))
    assert library.find() == other


def test_other_builds_are_not_picked(places):
    *searched, other = places
    other.touch()
    with pytest.raises(ImportError, match="make build") as caught:
        library.find()
    assert all(str(path) in str(caught.value) for path in searched)
    assert str(other) not in str(caught.value)


@pytest.mark.parametrize("name", ["cmake", "ninja"])
def test_importing_needs_no_build_tools(name):
    code = f"import sys; import flash_cute; assert {name!r} not in sys.modules"
    fresh.run(code, check=True, cwd=ROOT)
