"""`csrc/core` on the host: builds the tests of `tests/cpp`, by doctest, and runs them."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1] / "cpp"


def cmake() -> str | None:
    """The one on the path, else pip's."""
    found = shutil.which("cmake")
    if found is None and find_spec("cmake") is not None:
        import cmake

        found = str(Path(cmake.CMAKE_BIN_DIR, "cmake"))
    return found


def has_doctest(compiler: str) -> bool:
    command = [compiler, "-E", "-x", "c++", "-include", "doctest/doctest.h", "/dev/null"]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_core(tmp_path):
    compiler, program = shutil.which("c++"), cmake()
    if compiler is None or program is None or shutil.which("make") is None:
        pytest.skip("needs a C++ compiler, CMake and make")
    if not has_doctest(compiler):
        pytest.skip("doctest is not installed: apt-get install doctest-dev")
    configure = [program, "-S", TESTS, "-B", tmp_path, "-G", "Unix Makefiles"]
    subprocess.run([*configure, f"-DCMAKE_CXX_COMPILER={compiler}"], check=True)
    subprocess.run([program, "--build", tmp_path, "--parallel", "2"], check=True)
    run = subprocess.run([tmp_path / "core_tests"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Status: SUCCESS!" in run.stdout
