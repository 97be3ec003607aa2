"""What a build asks pip for, and the headers of torch that it uses where there is no torch."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "third_party" / "torch" / "include"


@pytest.fixture
def backend(monkeypatch):
    """The module, over a scikit-build-core that asks for ninja, which tests need not install."""
    package = ModuleType("scikit_build_core")
    package.build = ModuleType("scikit_build_core.build")
    for kind in ("editable", "sdist", "wheel"):
        setattr(package.build, f"build_{kind}", None)
        setattr(package.build, f"prepare_metadata_for_build_{kind}", f"metadata of {kind}")
    package.build.get_requires_for_build_wheel = lambda settings: ["ninja"]
    package.build.get_requires_for_build_editable = lambda settings: ["ninja"]
    for module in (package, package.build):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "build_backend", raising=False)
    yield importlib.import_module("build_backend")
    sys.modules.pop("build_backend")


@pytest.mark.parametrize(
    ("asked", "nvcc", "wanted"),
    [("cpu", True, False), ("cuda", False, True), (None, False, False), (None, True, True)],
)
def test_a_build_never_asks_for_torch(backend, monkeypatch, asked, nvcc, wanted):
    monkeypatch.delenv("FLASH_CUTE_BUILD", raising=False)
    monkeypatch.delenv("FLASH_CUTE_CUTLASS_DIR", raising=False)
    if asked:
        monkeypatch.setenv("FLASH_CUTE_BUILD", asked)
    monkeypatch.setattr(backend.shutil, "which", lambda name: "/bin/nvcc" if nvcc else None)
    monkeypatch.setattr(backend, "_works", lambda program: False)  # nothing is installed
    needed = ["ninja", *["nvidia-cutlass==4.2.0.0"] * wanted]
    assert backend.get_requires_for_build_wheel() == needed
    assert backend.get_requires_for_build_editable() == needed


def test_metadata_is_prepared_without_a_build(backend):
    """Else pip compiles twice: once to read the version."""
    assert backend.prepare_metadata_for_build_wheel == "metadata of wheel"
    assert backend.prepare_metadata_for_build_editable == "metadata of editable"


def test_headers_of_the_repository_are_enough():
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = ["-std=c++20", "-fsyntax-only", f"-I{HEADERS}", f"-I{ROOT / 'csrc'}"]
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DFLASH_CUTE_NAMESPACE=flash_cute"]
    source = ROOT / "csrc" / "library.cpp"
    run = subprocess.run([compiler, *flags, source], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_headers_are_of_the_release_that_is_named():
    version = (HEADERS / "torch" / "headeronly" / "version.h").read_text()
    numbers = [f"#define TORCH_VERSION_{part} {x}" for part, x in (("MAJOR", 2), ("MINOR", 13))]
    assert all(line in version for line in numbers)
    assert "2.13.0" in (ROOT / "third_party" / "README.md").read_text()
