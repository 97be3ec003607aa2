"""What ``import flash_cute`` loads beside torch: next to nothing."""

from __future__ import annotations

import subprocess
import sys

NEW_MODULES = """
import sys
import torch
before = set(sys.modules)
import flash_cute
print(*(name for name in set(sys.modules) - before if name.split(".")[0] != "flash_cute"))
"""
COUNTED = """
import flash_cute, torch
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 4, 1, 8)
with FlopCounterMode(display=False) as counter:
    flash_cute.flash_attn_func(q, q, q)
print(counter.get_total_flops())
"""


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_nothing_but_flash_cute():
    """Not torch._dynamo or sympy, a second or more, nor triton, which torch's counter loads."""
    assert run(NEW_MODULES).split() == []


def test_systems_are_loaded_by_their_own_path():
    loaded = run("import sys, flash_cute; print(*sys.modules)").split()
    packages = tuple(
        f"flash_cute.{x}" for x in ("hardware", "utils", "integrations", "compat", "attention")
    )
    assert [name for name in loaded if name.startswith(packages)] == []


def test_packages_are_there_by_their_name():
    run("import flash_cute\nassert flash_cute.lab.forward and flash_cute.attention.FlashAttention3")


def test_documented_import_lines_work():
    run(
        "from flash_cute.hardware import HardwareAbstractionLayer, detect_available_devices\n"
        "from flash_cute.utils.validation_framework import ComponentValidator\n"
        "from flash_cute.utils.compiler_optimization_assistant import "
        "benchmark_attention_performance"
    )


def test_the_counter_of_flops_may_be_imported_later():
    assert int(run(COUNTED)) == 2 * 4 * 4 * (8 + 8)
