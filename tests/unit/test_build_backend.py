"""What a build asks pip for."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from types import ModuleType

import pytest


@pytest.fixture
def backend(monkeypatch):
    """The module, over a fake scikit-build-core that requires ninja, which tests need not
    install."""
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


@pytest.mark.parametrize("has_torch", [True, False])
@pytest.mark.parametrize(
    ("asked", "archs", "tools", "wanted"),
    [
        ("cpu", "90a", ["nvcc", "nvidia-smi"], False),
        ("cuda", "", [], True),
        ("", "", [], False),
        ("", "90a", [], False),
        ("", "", ["nvcc"], False),
        ("", "90a", ["nvcc"], True),
        ("", "", ["nvcc", "nvidia-smi"], True),
    ],
)
def test_a_build_requires_only_missing_packages(
    backend, monkeypatch, asked, archs, tools, wanted, has_torch
):
    monkeypatch.setenv("FLASH_CUTE_BUILD", asked)
    monkeypatch.setenv("FLASH_CUTE_CUDA_ARCHS", archs)
    monkeypatch.delenv("FLASH_CUTE_CUTLASS_DIR", raising=False)
    monkeypatch.setattr(backend.shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setattr(backend, "_extract_headers", lambda: False)
    monkeypatch.setattr(backend, "_works", lambda program: has_torch and program == backend.TORCH)
    needed = ["ninja", *["torch>=2.10"] * (not has_torch), *["nvidia-cutlass==4.2.0.0"] * wanted]
    assert backend.get_requires_for_build_wheel() == needed
    assert backend.get_requires_for_build_editable() == needed


def test_headers_come_out_of_the_wheel_that_pip_keeps(backend, monkeypatch, tmp_path):
    """Then torch is no requirement of the build; where pip has no wheel it is."""
    monkeypatch.setenv("FLASH_CUTE_BUILD", "cpu")
    monkeypatch.setattr(backend, "HEADERS", tmp_path / "torch")
    monkeypatch.setattr(backend, "_works", lambda program: False)
    names = ("include/a.h", "lib/libtorch.so", "lib/libtorch_cpu.so", "nn/__init__.py")
    ended = [0]

    def run(command, **_):
        folder = command[command.index("-d") + 1]
        with zipfile.ZipFile(f"{folder}/torch-2.13.0-cp311-cp311-linux_x86_64.whl", "w") as wheel:
            for name in names:
                wheel.writestr(f"torch/{name}", "")
        return subprocess.CompletedProcess(command, ended[0])

    monkeypatch.setattr(backend.subprocess, "run", run)
    assert backend.get_requires_for_build_wheel() == ["ninja"]
    kept = {str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*") if x.is_file()}
    assert kept == {"torch/include/a.h", "torch/lib/libtorch.so"}
    ended[0] = 1
    assert backend.get_requires_for_build_wheel() == ["ninja", "torch>=2.10"]
    assert not (tmp_path / "torch").exists()


def test_metadata_is_prepared_without_a_build(backend):
    """Else pip compiles twice: once to read the version."""
    assert backend.prepare_metadata_for_build_wheel == "metadata of wheel"
    assert backend.prepare_metadata_for_build_editable == "metadata of editable"
