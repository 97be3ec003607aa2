"""The laboratory's configs: what they say of themselves, and that the build has the same ones."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kernel_hash
import pytest
import regs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_cute import lab
from flash_cute.lab import kernel_configs
from flash_cute.lab.kernel_configs import (
    PROGRESSION_STEPS,
    DType,
    FlashForwardKernelConfig,
    get_autotuning_kernel_configs,
    get_kernel_configs,
    get_kernel_progression_configs,
    get_kernels_to_build,
)
from flash_cute.native import library

ROOT = Path(__file__).resolve().parents[2]
FIELDS = (
    "dtype", "d_head", "B_r", "B_c", "n_warps", "async_copy", "eager_load_blocks", "swizzled",
    "Q_mma_load_K_tiles", "K_mma_load_K_tiles", "V_mma_load_K_tiles", "mma_double_buffer_loads",
    "optimized_softmax",
)  # fmt: skip
FAST = get_kernel_progression_configs()[-2]  # 64 x 64, Q whole, K and V in tiles
EVERY = get_kernels_to_build("all")


@pytest.fixture(autouse=True)
def no_sets_named(monkeypatch):
    monkeypatch.delenv("KERNELS", raising=False)
    monkeypatch.delenv("FLASH_CUTE_LAB", raising=False)


def test_fields_are_the_documented_ones():
    assert tuple(field.name for field in dataclasses.fields(FlashForwardKernelConfig)) == FIELDS
    config = FlashForwardKernelConfig(
        DType.FP16, 128, 64, 64, 4, True, True, True, 0, 1, 1, True, True
    )
    assert config == dataclasses.replace(FAST, dtype=DType.FP16)
    assert len({config, dataclasses.replace(config), FAST}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.B_r = 128


def test_dtypes_are_read_in_all_their_spellings():
    for dtype in DType:
        spellings = (dtype.name, dtype.value, str(dtype), dtype.to_cpp_str())
        assert {DType.from_string(x) for x in spellings} == {dtype}
        assert DType.from_string(str(dtype.to_torch_dtype())) is dtype
    for wrong in (None, torch.float16):
        with pytest.raises(TypeError, match="expected a string"):
            DType.from_string(wrong)


@pytest.mark.parametrize(
    "field", [{"dtype": "bf16"}, {"B_r": True}, {"B_c": 64.0}, {"swizzled": 1}]
)
def test_fields_of_another_type_are_refused(field):
    with pytest.raises(TypeError, match=f"{next(iter(field))} is "):
        dataclasses.replace(get_kernel_progression_configs()[0], **field)


@pytest.mark.parametrize("field", [{"n_warps": 16}, {"B_c": 48}, {"V_mma_load_K_tiles": 3}, {}])
def test_what_is_not_built_names_what_is(field):
    config = dataclasses.replace(get_kernel_progression_configs()[-1], **field)
    name = kernel_configs.get_kernels_to_build.__name__
    with FakeTensorMode(), pytest.raises(ValueError, match=rf"kernel_cfg .*{name}\(\)"):
        q = torch.empty(1, 384, 2, 128, device="cuda", dtype=torch.bfloat16)
        lab.forward(config if field else dataclasses.replace(config, B_r=384), q, q, q)
    with FakeTensorMode(), pytest.raises(ValueError, match="B_r is 0; expected at least 1"):
        lab.forward(dataclasses.replace(config, B_r=0), q, q, q)


def test_dtypes():
    assert [d.to_torch_dtype() for d in DType] == [torch.float16, torch.bfloat16]
    assert DType.BF16.to_cpp_str() == "flash_cute::DType::BF16"
    for name in ("fp16", "FP16", "float16", "torch.float16", "half", str(torch.float16)):
        assert DType.from_string(name) is DType.FP16
    for name in ("bf16", "BF16", "bfloat16", str(torch.bfloat16)):
        assert DType.from_string(name) is DType.BF16
    with pytest.raises(ValueError, match="float32"):
        DType.from_string("float32")


def test_the_value_in_cpp_has_all_fields_in_order():
    assert FAST.to_cpp_struct() == (
        "FlashForwardKernelConfig{flash_cute::DType::BF16, 128, 64, 64, 4, true, true, true, 0, 1, "
        "1, true, true}"
    )


def test_names_of_an_example():
    name = "lab_fwd_bf16_d128_r64_c64_w4_q0_k1_v1_async_eager_swizzled_buffer_optsoftmax"
    short = "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_1_1_tiles+buffer+opt_softmax"
    assert FAST.kernel_name() == name
    assert FAST.short_form() == str(FAST) == short


def test_names_and_short_forms_tell_all_configs_apart():
    every = list(dict.fromkeys(EVERY + get_autotuning_kernel_configs(all_block_sizes=True)))
    assert len(every) > 300
    assert len({config.kernel_name() for config in every}) == len(every)
    assert [FlashForwardKernelConfig.from_short_form(str(config)) for config in every] == every


@pytest.mark.parametrize("field", FIELDS[5:8] + FIELDS[11:])
def test_each_switch_is_in_both_names(field):
    other = dataclasses.replace(FAST, **{field: False})
    assert other.kernel_name() != FAST.kernel_name()
    assert FlashForwardKernelConfig.from_short_form(other.short_form()) == other


@pytest.mark.parametrize(
    "text",
    [
        "",
        "FP16",
        "(FP32, 128, 64, 64, 4): load_0_0_0_tiles",
        "(FP16, 128, 64, 64, 4): eager+async+load_0_0_0_tiles",
    ],
)
def test_what_is_no_short_form_is_refused(text):
    with pytest.raises(ValueError, match="no short form"):
        FlashForwardKernelConfig.from_short_form(text)


@pytest.mark.parametrize("config", [get_kernel_progression_configs()[0], FAST])
def test_flops(config):
    batch, heads, seq = 3, 5, 1024
    attn, total = (f(batch, heads, seq) for f in (config.attn_flop, config.total_flop))
    assert attn == 4 * batch * heads * seq**2 * config.d_head
    assert attn < total < 1.2 * attn
    assert config.total_flop(2 * batch, heads, seq) == config.total_flop(batch, 2 * heads, seq)
    assert config.total_flop(2 * batch, heads, seq) == 2 * total
    assert isinstance(total, int)


def features(config: FlashForwardKernelConfig) -> int:
    return sum(getattr(config, field) is True for field in FIELDS)


@pytest.mark.parametrize("dtype", DType)
def test_the_progression_adds_one_technique_a_step(dtype):
    steps = get_kernel_progression_configs(dtype)
    assert len(steps) == len(PROGRESSION_STEPS) >= 7
    assert {(step.d_head, step.dtype) for step in steps} == {(128, dtype)}
    assert [features(step) for step in steps] == sorted(features(step) for step in steps)
    assert features(steps[0]) == 0 and features(steps[-1]) == 5
    for before, after in itertools.pairwise(steps):
        changed = {f for f in FIELDS if getattr(before, f) != getattr(after, f)}
        switches = {f for f in changed if isinstance(getattr(before, f), bool)}
        blocks = changed & {"B_r", "B_c"}
        # One switch, or one size of blocks, which may bring tiles of operands with it, or tiles.
        assert (len(switches), len(blocks)) in ((1, 0), (0, 1), (0, 0))
        assert not switches or changed == switches


def test_all_listed_configs_can_be_built():
    for config in {*EVERY, *get_autotuning_kernel_configs(all_block_sizes=True)}:
        assert config.problems() == [], config


def test_sets_of_configs():
    tuning, every = get_autotuning_kernel_configs(), EVERY
    progression = get_kernels_to_build("progression")
    for configs in (tuning, every, progression):
        assert len(set(configs)) == len(configs)
    assert set(progression) == {c for d in DType for c in get_kernel_progression_configs(d)}
    assert set(every) == set(progression) | set(tuning)
    assert {c.d_head for c in tuning} == {64, 128}
    assert set(tuning) < set(get_autotuning_kernel_configs(all_block_sizes=True))
    only = get_kernels_to_build("all", dtypes=[DType.FP16])
    assert {c.dtype for c in only} == {DType.FP16} and len(only) == len(every) / 2
    assert get_kernels_to_build("none") == []
    with pytest.raises(ValueError, match="give progression, all or none"):
        get_kernels_to_build("some")


def test_a_variable_names_the_set(monkeypatch):
    assert get_kernel_configs() == get_kernel_progression_configs()
    sets = {
        "progression": get_kernel_progression_configs(),
        "all": EVERY,
        "tune": get_autotuning_kernel_configs(),
    }
    for name, configs in sets.items():
        monkeypatch.setenv("KERNELS", name)
        assert get_kernel_configs() == configs
        assert get_kernel_configs(name) == configs
    monkeypatch.setenv("KERNELS", "fast")
    with pytest.raises(ValueError, match="progression, all, tune"):
        get_kernel_configs()


def test_kernels_to_build_are_those_of_the_library(monkeypatch):
    names = [config.kernel_name() for config in get_kernels_to_build()]
    assert set(names) == set(library.lab_kernels()) or not library.lab_kernels()
    monkeypatch.setattr(library, "lab_kernels", lambda: (FAST.kernel_name(), "lab_other"))
    assert get_kernels_to_build() == [FAST]
    monkeypatch.setattr(library, "lab_kernels", lambda: ())
    assert get_kernels_to_build() == get_kernels_to_build("progression")
    monkeypatch.setenv("FLASH_CUTE_LAB", "all")
    assert get_kernels_to_build() == EVERY


REFUSED = {
    "d_head must be 64 or 128": {"d_head": 96},
    "n_warps must be 4 or 8": {"n_warps": 2},
    "B_r must be a multiple of 16 * n_warps": {"B_r": 96},
    "B_c must be a multiple of 32": {"B_c": 16},
    "eager_load_blocks needs async_copy": {"async_copy": False},
    "Q_mma_load_K_tiles must be 0 or divide d_head / 16 and be less": {"Q_mma_load_K_tiles": 8},
    "K_mma_load_K_tiles must be 0 or divide d_head / 16 and be less": {"K_mma_load_K_tiles": 3},
    "V_mma_load_K_tiles must be 0 or divide B_c / 16 and be less": {"V_mma_load_K_tiles": 4},
    "mma_double_buffer_loads needs Q, K or V to be loaded in tiles": {
        "K_mma_load_K_tiles": 0, "V_mma_load_K_tiles": 0, "B_c": 32,
    },
    "fragments need more than 224 registers a thread": {
        "K_mma_load_K_tiles": 0, "V_mma_load_K_tiles": 0, "mma_double_buffer_loads": False,
    },
    "blocks need more than 99 KiB of shared memory": {"B_r": 256, "B_c": 96, "n_warps": 8},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_built_says_why_in_the_words_of_cpp(words):
    config = dataclasses.replace(FAST, **REFUSED[words])
    assert words in config.problems()
    source = (ROOT / "csrc" / "kernels" / "lab" / "config.h").read_text()
    assert f'"{words}"' in source
    assert source.count("static_assert(") == len(REFUSED) + 1  # and of the dtype


PRINT = """
#include <cstdio>
#include "kernels/lab/config.h"
int main() {
#define LAB_KERNEL(...) { \\
    constexpr FlashForwardKernelConfig config{__VA_ARGS__}; \\
    static_assert(flash_cute::lab::check_config<config>()); \\
    std::printf("%s %d %d\\n", config.name().c_str(), config.smem_bytes(), config.fragment_registers()); }
#include "rows.def"
}
"""  # noqa: E501


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_what_is_compiled_is_what_is_listed(tmp_path):
    """CMake gets the rows from a Python that has neither torch nor flash_cute."""
    script = ROOT / "flash_cute" / "lab" / "kernel_configs.py"
    run = subprocess.run(
        [sys.executable, "-I", "-S", script, "all"], capture_output=True, text=True, check=True
    )
    assert run.stdout == kernel_configs.rows("all")
    (tmp_path / "rows.def").write_text(run.stdout)
    (tmp_path / "print.cpp").write_text(PRINT)
    program = tmp_path / "print"
    subprocess.run(
        ["c++", "-std=c++20", "-I", ROOT / "csrc", "-I", tmp_path, tmp_path / "print.cpp", "-o",
         program], check=True,
    )  # fmt: skip
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("\n")
    assert lines[:-1] == [f"{c.kernel_name()} {c.smem_bytes} {c.fragment_registers}" for c in EVERY]


def test_tools_know_the_kernels_by_name():
    first = get_kernel_progression_configs(DType.FP16)[0]
    symbol = (
        "_ZN10flash_cute3lab7forwardIXtl24FlashForwardKernelConfig{}EEEEvNS0_17ForwardKernelArgsE"
    )
    bf16 = "LNS_5DTypeE1ELi128ELi64ELi64ELi4ELb1ELb1ELb1ELi0ELi1ELi1ELb1ELb1E"
    # What is 0 at the end is not there.
    assert kernel_hash.kernel_id(symbol.format(bf16)) == FAST.kernel_name()
    fp16 = "LN11flash_cute5DTypeE0ELi128ELi64ELi32ELi4E"
    assert kernel_hash.kernel_id(symbol.format(fp16)) == first.kernel_name()
    log = (
        f"ptxas info    : Compiling entry function '{symbol.format(bf16)}' for 'sm_90'\n"
        "    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    (usage,) = regs.parse(log)
    assert (usage.kernel, usage.registers) == ("forward", 168)
    assert re.match("dtype 1, d_head 128, B_r 64, B_c 64, n_warps 4, async_copy true", usage.config)
    assert regs.excess([usage]) == [usage]
