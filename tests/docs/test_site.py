"""The site: every page in its menu, every link followed by mkdocs, every public name in it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_cute

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("attention", "attention.fusion", "core", "distributed", "hardware", "lab", "precision",
            "sparse", "tuning", "kernels", "integrations.transformers")  # fmt: skip
MODULES = ("flash_cute.compat", "flash_cute.integrations.sdpa", "flash_cute.integrations.vllm",
           "flash_cute.mha", "flash_cute.check", "flash_cute.call.fp8", "flash_cute.plan_log",
           "flash_cute.reference", "flash_cute.utils.validation_framework",
           "flash_cute.utils.compiler_optimization_assistant", "flash_cute.library")  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_mkdocs_warns_of_pages_and_links():
    config = (ROOT / "mkdocs.yml").read_text()
    assert "omitted_files: warn" in config and "anchors: warn" in config
    assert config.count("not_found: warn") == 2 and "unrecognized_links: warn" in config
    assert "ignore" not in config


def test_the_reference_has_every_public_name(site):
    pages = "".join(path.read_text() for path in site.glob("reference/**/index.html"))
    known = set(re.findall(r'id="(flash_cute[\w.]*)"', pages))
    places = {name: f".{name}" for name in flash_cute.__all__ if name not in ("check", "mha")}
    missing = [name for name, end in places.items() if not any(x.endswith(end) for x in known)]
    for package in PACKAGES:
        module = importlib.import_module(f"flash_cute.{package}")
        public = [name for name in module.__all__ if callable(getattr(module, name))]
        names = [f"{module.__name__}.{name}" for name in public]
        missing += [name for name in (module.__name__, *names) if name not in known]
    missing += [name for name in MODULES if name not in known]
    assert missing == []


def test_docstrings_are_markdown(site):
    for path in site.glob("reference/**/index.html"):
        text = path.read_text()
        assert re.findall(r":\w+:<code>|::</p>", text) == [], path


def test_files_of_the_repository_are_part_of_the_site(site):
    pages = list(site.glob("**/index.html"))
    outside = []
    for page in pages:
        for link in re.findall(r'(?:href|src)="([^"#:]+)', page.read_text()):
            if link in ("https", "http"):
                continue
            found = (page.parent / link).resolve()
            if not found.is_relative_to(site.resolve()) or not found.exists():
                outside.append((page.relative_to(site).as_posix(), link))
    assert outside == [] and len(pages) > 50
    assert (site / "repository/benchmarks/results/forward_sustained_h200.png").is_file()


def test_notebook_and_sources_come_last():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    order = ["integrations.md", "distributed.md", "faq.md", "reference.md", "performance.md",
             "progression.md", "notebook/index.md", "sources/000.md"]  # fmt: skip
    assert [nav.index(page) for page in order] == sorted(nav.index(page) for page in order)
