"""What a build asks pip for."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest


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


@pytest.mark.parametrize("has_torch", [True, False])
@pytest.mark.parametrize(
    ("asked", "nvcc", "wanted"),
    [("cpu", True, False), ("cuda", False, True), (None, False, False), (None, True, True)],
)
def test_a_build_requires_only_missing_packages(
    backend, monkeypatch, asked, nvcc, wanted, has_torch
):
    monkeypatch.delenv("FLASH_CUTE_BUILD", raising=False)
    monkeypatch.delenv("FLASH_CUTE_CUTLASS_DIR", raising=False)
    if asked:
        monkeypatch.setenv("FLASH_CUTE_BUILD", asked)
    monkeypatch.setattr(backend.shutil, "which", lambda name: "/bin/nvcc" if nvcc else None)
    monkeypatch.setattr(backend, "_works", lambda program: has_torch and program == backend.TORCH)
    needed = ["ninja", *["torch>=2.10"] * (not has_torch), *["nvidia-cutlass==4.2.0.0"] * wanted]
    assert backend.get_requires_for_build_wheel() == needed
    assert backend.get_requires_for_build_editable() == needed


def test_metadata_is_prepared_without_a_build(backend):
    """Else pip compiles twice: once to read the version."""
    assert backend.prepare_metadata_for_build_wheel == "metadata of wheel"
    assert backend.prepare_metadata_for_build_editable == "metadata of editable"
