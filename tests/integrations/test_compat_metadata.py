"""flash-attn's distribution, while flash_cute.compat is installed with its metadata."""

from __future__ import annotations

import importlib.metadata
import sys

import fresh
import pytest

from flash_cute import compat
from flash_cute.compat import flash_attn

SPELLINGS = ["flash-attn", "flash_attn", "Flash.Attn"]


@pytest.fixture(autouse=True)
def uninstalled():
    compat.uninstall()
    yield
    compat.uninstall()


def found() -> list[str]:
    """The versions of flash-attn that this process finds, by each spelling of the name."""
    versions = []
    for name in SPELLINGS:
        try:
            versions.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@pytest.mark.skipif(bool(found()), reason="flash-attn itself is installed")
def test_metadata_is_found_between_install_and_uninstall():
    finders = list(sys.meta_path)
    compat.install()
    assert found() == [] and sys.meta_path == finders
    compat.install(metadata=True)  # adds it
    compat.install(metadata=True)
    compat.install()
    assert found() == [flash_attn.__version__] * len(SPELLINGS)
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    named = [x.metadata["Name"] for x in importlib.metadata.distributions()]
    assert named.count("flash-attn") == 1 and len(named) > 1
    compat.uninstall()
    assert found() == [] and sys.meta_path == finders
    assert "flash_attn" not in importlib.metadata.packages_distributions()


def test_other_queries_of_the_distribution():
    compat.install(metadata=True)
    it = importlib.metadata.distribution("flash-attn")
    assert it.metadata["Name"] == "flash-attn" and it.version == flash_attn.__version__
    assert it.requires is None and it.files is None and not list(it.entry_points)
    assert it.locate_file("flash_attn/__init__.py").is_file()
    assert importlib.metadata.version("torch") == importlib.metadata.distribution("torch").version


@pytest.mark.parametrize(
    ("given", "error"), [("yes", TypeError), (None, TypeError), (2, ValueError)]
)
def test_metadata_is_a_bool(given, error):
    modules = set(sys.modules)
    with pytest.raises(error, match="metadata"):
        compat.install(metadata=given)
    assert set(sys.modules) == modules and found() != [flash_attn.__version__]


def test_transformers_finds_it():
    """Its own question, without the one whether there is a GPU, in a process that asks once."""
    pytest.importorskip("transformers")
    program = (
        "import flash_cute.compat\n"
        "flash_cute.compat.install(metadata=True)\n"
        "from transformers.utils import is_flash_attn_greater_or_equal as asked\n"
        "print(asked('2.3.3'), asked('3.0'))"
    )
    result = fresh.run(program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", "False"]
