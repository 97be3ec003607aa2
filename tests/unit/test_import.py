"""What ``import flash_cute`` loads in addition to torch: next to nothing."""

from __future__ import annotations

import importlib

import fresh
import pytest

import flash_cute

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
    result = fresh.run(code)
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


@pytest.mark.parametrize(
    ("path", "names"),
    {
        "fp8": ("DTYPES", "OUT_DTYPES", "WIDE_DTYPES"),
        "functional": ("flash_attn_func", "flash_attn_varlen_func"),
        "functional_packed": ("flash_attn_kvpacked_func", "flash_attn_varlen_qkvpacked_func"),
        "kernels": ("GPUS", "Problem", "explain", "only", "plan", "supports", "use_calibration"),
        "kvcache": ("flash_attn_combine", "flash_attn_with_kvcache", "kvcache_status"),
        "library": ("can_use_cuda", "find", "has_cuda_kernels", "kernels", "lab_kernels", "only"),
        "mha": ("mha_bwd", "mha_fwd", "mha_varlen_bwd", "mha_varlen_fwd"),
        "plan_log": ("is_on", "switched"),
        "reference": ("attention",),
        "rng": ("rng_state",),
        "tiled": ("FlashAttention", "flash_attention_forward", "kernel_of"),
        "tiled_sizes": ("estimate_memory_usage", "get_optimal_block_sizes"),
    }.items(),
)
def test_documented_paths_hold_what_they_are_for(path, names):
    """As modules, and as attributes of a package that was imported alone; the package's functions
    are the same objects."""
    run(f"import flash_cute\n{[f'flash_cute.{path}.{name}' for name in names]}".replace("'", ""))
    module = importlib.import_module(f"flash_cute.{path}")
    for name in names:
        found = getattr(module, name)
        assert name not in flash_cute.__all__ or getattr(flash_cute, name) is found


def test_the_counter_of_flops_may_be_imported_later():
    assert int(run(COUNTED)) == 2 * 4 * 4 * (8 + 8)
