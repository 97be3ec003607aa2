"""The compiled library: found, loaded, stable in its ABI, and checked by tools that can fail."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flash_cute import library

ROOT = Path(__file__).resolve().parent.parent
PTXAS = """
ptxas info    : Compiling entry function '_ZN10flash_cute4sm807forwardIXtl12KernelConfigLNS_2OpE0\
ELNS_4ArchE80ELNS_5DTypeE1ELi64ELi128ELi64ELi1ELi4ELi2EEEEEvNS_10FwdProblemE' for 'sm_90'
ptxas info    : Function properties for it
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 249 registers, used 1 barriers
ptxas info    : Compiling entry function '_ZN10flash_cute12_GLOBAL__N_14fillENS_7GapFillE' for \
'sm_80'
ptxas info    : Function properties for it
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
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


def test_unstable_symbols_are_recognised():
    unstable = tool("check_library").UNSTABLE
    assert unstable.match("_ZN3c106detail14torchCheckFailEPKcS2_jS2_")
    assert unstable.match("_ZN2at4_ops5empty")
    assert unstable.match("PyObject_Call")
    assert not unstable.match("aoti_torch_get_sizes")
    assert not unstable.match("_ZNSt13runtime_errorC1EPKc")


def test_kernels_of_this_build_are_rows_of_the_table():
    ids = tool("check_library").config_ids((ROOT / "csrc" / "configs.def").read_text())
    assert len(ids) == (ROOT / "csrc" / "configs.def").read_text().count("\nKERNEL(")
    assert set(library.kernels()) <= ids


def test_missing_kernels_are_reported(tmp_path, monkeypatch):
    checker = tool("check_library")
    table = tmp_path / "configs.def"
    table.write_text("\nKERNEL(Fwd, Sm80, BF16, 7, 16, 16, 1, 1, 1)\n")
    monkeypatch.setattr(checker, "CONFIGS", table)
    (problem,) = checker.problems(library.find(), all_kernels=True)
    assert "fwd_sm80_bf16_d7_m16_n16_s1_w1_c1" in problem


def test_spills_are_reported():
    regs = tool("regs")
    usage, pass_usage = regs.parse(PTXAS)
    assert (usage.kernel, usage.gpu, usage.registers, usage.spill_bytes) == (
        "forward",
        "sm_90",
        249,
        12,
    )
    assert "head_dim 64, block_m 128, block_n 64" in usage.config
    assert pass_usage == ("fill", "", "sm_80", 32, 0)
    assert regs.excess([usage, pass_usage]) == [usage]
    assert regs.excess([usage._replace(spill_bytes=0)]) == []


def test_a_missing_library_says_what_to_do(tmp_path):
    code = "import flash_cute"
    environment = {"FLASH_CUTE_LIBRARY": str(tmp_path / "none.so"), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "FLASH_CUTE_LIBRARY names" in result.stderr


@pytest.mark.parametrize("name", ["cmake", "ninja"])
def test_importing_needs_no_build_tools(name):
    code = f"import sys; import flash_cute; assert {name!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
