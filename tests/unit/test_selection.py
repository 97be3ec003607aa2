"""Which tests are collected, with CUDA and without: the hooks of `conftest.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_cute.native import library

pytest_plugins = ["pytester"]

FOLDER = Path(__file__).resolve().parents[1]
TESTS = """
import pytest

def test_plain(): pass

def test_device(device): assert device in ("cpu", "cuda")

@pytest.fixture
def derived(cuda): return cuda

@pytest.mark.parametrize("n", [1, 2])
def test_cuda(cuda, n): assert cuda == "cuda"

def test_derived(derived): assert derived == "cuda"
"""
LEFT_OUT = "Tests that need CUDA, left out: 3 (no CUDA device, or a library without CUDA kernels)"


@pytest.fixture
def made_up(pytester, monkeypatch):
    """TESTS beside `conftest.py`, whose modules are found here."""
    pytester.makeconftest((FOLDER / "conftest.py").read_text())
    pytester.makepyfile(TESTS)
    monkeypatch.syspath_prepend(FOLDER)
    return pytester


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr(library, "can_use_cuda", lambda: True)


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(library, "can_use_cuda", lambda: False)


def test_without_cuda_its_tests_are_left_out_and_counted(made_up, without_cuda):
    result = made_up.runpytest_inprocess()
    result.assert_outcomes(passed=2, deselected=3)
    result.stdout.fnmatch_lines([LEFT_OUT])
    result = made_up.runpytest_inprocess("-k", "plain or derived")
    result.assert_outcomes(passed=1, deselected=4)
    result.stdout.fnmatch_lines([LEFT_OUT])


def test_without_cuda_devices_are_the_cpu(made_up, without_cuda):
    lines = made_up.runpytest_inprocess("--collect-only", "-q").outlines
    assert [line.partition("::")[2] for line in lines if "::" in line] == [
        "test_plain",
        "test_device[cpu]",
    ]


def test_only_cuda_without_cuda_is_an_error(made_up, without_cuda):
    result = made_up.runpytest_inprocess("--only-cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --only-cuda: no CUDA device, or a library without*"])


def test_with_cuda_all_run(made_up, with_cuda):
    result = made_up.runpytest_inprocess()
    result.assert_outcomes(passed=6)
    result.stdout.no_fnmatch_line("*left out*")


def test_only_cuda(made_up, with_cuda):
    result = made_up.runpytest_inprocess("--only-cuda")
    result.assert_outcomes(passed=4, deselected=2)
    result.stdout.no_fnmatch_line("*left out*")


def test_other_processes_tell_what_they_left_out(made_up, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    path = f"{FOLDER}:{FOLDER.parent}"
    monkeypatch.setenv("PYTHONPATH", path, prepend=":")
    result = made_up.runpytest_subprocess("-n", "1")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([LEFT_OUT])
