"""Other releases of torch: which is the newest, and which environment is a whole one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "tools/torch_versions.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("torch_versions", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folder(cache: Path, version: str) -> Path:
    environment = cache / f"torch-{version}"
    environment.mkdir(parents=True)
    return environment


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([], None),
        (["2.9.1", "2.10.0"], "2.10.0"),
        (["2.13.0+cpu", "2.14.1", "2.14.0"], "2.14.1"),
        (["2.13.0+cpu"], "2.13.0"),
        (["2.15.0.dev20260101", "2.15.0a0+git1", "old", "2.14", "2.13.0"], "2.13.0"),
    ],
)
def test_the_newest_of_versions(tool, versions, expected):
    assert tool.newest(versions) == expected


@pytest.mark.parametrize(
    ("newest_from_pip", "cached", "expected"),
    [
        ("2.14.1", [], "2.14.1"),
        ("2.14.1", ["2.10.0"], "2.14.1"),
        ("2.13.0+cpu", ["2.10.0", "2.14.1"], "2.14.1"),
        (None, ["2.10.0", "2.14.1"], "2.14.1"),
    ],
)
def test_newest_is_of_pip_or_of_the_cache(
    tool, monkeypatch, tmp_path, capsys, newest_from_pip, cached, expected
):
    monkeypatch.setattr(tool, "newest_from_pip", lambda: newest_from_pip)
    for version in cached:
        folder(tmp_path, version)
    (tmp_path / "making-2.99.0").mkdir()
    assert tool.find_newest(tmp_path) == expected
    told = capsys.readouterr().out
    assert expected in told and ("pip finds no torch" in told) == (newest_from_pip is None)


def test_without_pip_and_cache_there_is_no_newest(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "newest_from_pip", lambda: None)
    with pytest.raises(SystemExit, match="the cache holds none"):
        tool.find_newest(tmp_path)


def test_an_environment_is_made_once(tool, monkeypatch, tmp_path):
    """What was left half made is thrown away, what is broken is made again."""
    filled = []

    def make_environment(environment, version):
        environment.mkdir()
        (environment / "new").touch()
        filled.append(version)

    monkeypatch.setattr(tool, "make_environment", make_environment)
    monkeypatch.setattr(tool, "is_usable", lambda environment, _: (environment / "new").exists())
    broken = folder(tmp_path, "2.10.0")
    (tmp_path / "making-2.10.0").mkdir()
    assert tool.prepare(tmp_path, "2.10.0") == tool.prepare(tmp_path, "2.10.0") == broken
    assert filled == ["2.10.0"]
    assert tool.cached(tmp_path) == ["2.10.0"] and not list(tmp_path.glob("making-*"))


@pytest.mark.parametrize("raises", [False, True])
def test_an_environment_that_cannot_be_made_is_none(tool, monkeypatch, tmp_path, raises):
    def make_environment(environment, version):
        environment.mkdir()
        if raises:
            raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(tool, "make_environment", make_environment)
    with pytest.raises(SystemExit, match=r"torch 2\.10\.0: its environment"):
        tool.prepare(tmp_path, "2.10.0")
    assert tool.cached(tmp_path) == []


def test_an_environment_without_torch_is_not_usable(tool, tmp_path):
    assert not tool.is_usable(tmp_path, "2.10.0")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    for prints, expected in (("2.10.0+cu128", True), ("2.13.0", False), ("", False)):
        python.write_text(f"#!/bin/sh\necho {prints}\n")
        python.chmod(0o755)
        assert tool.is_usable(tmp_path, "2.10.0") == expected


def test_what_compiles_and_transforms_is_run_on_other_releases(tool):
    """A new file that does so goes into TESTS."""
    words = (
        r"opcheck|functorch|torch\.(compile|export|func|library|vmap)\b|torch\._(dynamo|inductor)"
    )
    files = {
        str(path.relative_to(ROOT))
        for folder in (".", "unit", "kernels", "ops", "docs")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
        if path != Path(__file__).resolve() and re.search(words, path.read_text())
    }
    assert files - set(tool.TESTS) == set()
