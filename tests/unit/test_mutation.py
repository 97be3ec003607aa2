"""A mutation run: which mutants are drawn, how each is tried, what is reported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("mutmut")

import mutants
import mutation

CODE = '''"""A module that adds 1, or so."""

from __future__ import annotations

from typing import TypeVar

Pair = tuple[int, int]
T = TypeVar("T")
__all__ = ["added"]


def added(x: int | None, to: int = 1) -> int | None:
    """x + 1, as a rule."""
    if x is None:
        raise TypeError(f"x is {x}; expected a number, or {0 + 1}")
    return x + to


@property
def limit(self) -> int:
    return min(self.size, 7)
'''
TEST = """from flash_cute.package.module import added

def test_added():
    assert added(2, 3) == 5
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of one module and its test."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    files = {
        "flash_cute/package/__init__.py": "",
        "flash_cute/package/module.py": CODE,
        "flash_cute/package/kernels_for_a_gpu.py": "LIMIT = 1",
        "tests/test_module.py": TEST,
        ".gitignore": "build/\n__pycache__/\n",
        "pyproject.toml": "[tool.mutation]\ntimeout = 60\npackages = ['package']\n"
        "exclude = ['package/kernels']\n"
        "[tool.mutation.tests]\n'package/' = ['test_module.py']\n'package/module' = ['other.py']\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def draw(root: Path, count: int = 1000, seed: int = 0) -> list[mutants.Mutant]:
    return mutants.draw(
        root / "flash_cute", ["package/__init__.py", "package/module.py"], count, seed
    )


def changed_lines(root: Path) -> set[str]:
    """Lines of the module in its mutants that it does not have itself."""
    lines = (line for mutant in draw(root) for line in mutant.after.splitlines())
    return {line.strip() for line in lines} - {line.strip() for line in CODE.splitlines()}


def test_numbers_operators_conditions_and_arguments_change(root):
    changed = changed_lines(root)
    assert {"return x - to", "if x is not None:", "return min(self.size, 8)"} <= changed
    assert {"return min(7)", "return min(self.size, None)"} <= changed
    assert "def added(x: int | None, to: int = 2) -> int | None:" in changed


def test_what_no_test_can_see_is_left(root):
    unseen = ("Pair", "T", "__all__", '"""', "raise", "from", "import", "@")
    assert not [line for line in changed_lines(root) if line.startswith(unseen)]
    assert not [line for line in changed_lines(root) if "int & None" in line]


def test_a_draw_is_of_its_seed_and_of_the_code_alone(root):
    every = {mutant.key for mutant in draw(root)}
    assert draw(root, 3, 1) == draw(root, 3, 1) != draw(root, 3, 2)
    assert len({mutant.key for mutant in draw(root, 3, 1)} & every) == 3
    assert draw(root, 3, 1) == draw(root, 1000, 1)[:3]


def test_a_module_has_the_tests_of_the_longest_beginning_of_its_path(root):
    settings = mutation.Settings.of(root)
    assert settings.tests_of("package/__init__.py") == ["tests/test_module.py"]
    assert settings.tests_of("package/module.py") == ["tests/other.py"]
    with pytest.raises(KeyError, match="no tests of elsewhere"):
        settings.tests_of("elsewhere/module.py")


def test_modules_that_are_excluded_are_not_drawn_from(root):
    modules = mutation.Settings.of(root).modules(root, ["package"])
    assert modules == ["package/__init__.py", "package/module.py"]


def test_every_module_of_flash_cute_has_its_tests():
    settings = mutation.Settings.of(mutation.ROOT)
    modules = settings.modules(mutation.ROOT, settings.packages)
    assert len(modules) > 40
    for module in modules:
        for test in settings.tests_of(module):
            file, _, name = test.partition("::")
            code = (mutation.ROOT / file).read_text()
            assert f"def {name.partition('[')[0]}" in code, f"{module}: {test}"


def find(root: Path, line: str) -> mutants.Mutant:
    return next(mutant for mutant in draw(root) if line in mutant.after)


def test_a_run_reports_noticed_mutants_and_keeps_the_checkout(root):
    settings = mutation.Settings(["package"], 60, {"package/": ["test_module.py"]}, [])
    drawn = [find(root, "return x - to"), find(root, "to: int = 2")]
    session = root / "build/results.jsonl"
    mutation.run(root, settings, drawn, session)
    results = mutation.read(session)
    assert [results[mutant.key]["outcome"] for mutant in drawn] == ["killed", "survived"]
    assert (root / "flash_cute/package/module.py").read_text() == CODE
    text = mutation.report(["package"], drawn, results)
    assert "+def added(x: int | None, to: int = 2)" in text and "x - to" not in text
    assert "package: 1 of 2 noticed (50%), 0 of them by the time; 1 survived" in text
    (root / "tests/test_module.py").write_text(TEST + "    assert added(2) == 3\n")
    mutation.run(root, settings, drawn, session)  # only what survived
    assert len(session.read_text().splitlines()) == 3
    assert "all: 2 of 2 noticed (100%)" in mutation.report(
        ["package"], drawn, mutation.read(session)
    )


def test_a_mutant_that_does_not_end_counts_as_noticed(root, monkeypatch):
    monkeypatch.setattr(mutation, "check_tests", lambda *_: None)
    endless = "def test():\n    while added(2, 3) != 5: pass\n"
    (root / "tests/test_module.py").write_text(TEST.partition("def")[0] + endless)
    settings = mutation.Settings(["package"], 3, {"package/": ["test_module.py"]}, [])
    drawn, session = [find(root, "return x - to")], root / "build/results.jsonl"
    mutation.run(root, settings, drawn, session)
    (result,) = map(json.loads, session.read_text().splitlines())
    assert result["outcome"] == "timeout"
    assert "1 of 1 noticed (100%), 1 of them by the time" in mutation.report(
        ["package"], drawn, mutation.read(session)
    )


def test_tests_that_fail_without_a_change_end_the_run(root):
    (root / "tests/test_module.py").write_text("def test(): assert 1 == 2")
    settings = mutation.Settings(["package"], 60, {"package/": ["test_module.py"]}, [])
    with pytest.raises(SystemExit, match=r"assert 1 == 2(.|\n)*without any change: killed"):
        mutation.run(root, settings, draw(root, 1), root / "build/results.jsonl")


def test_tests_that_take_most_of_the_time_without_a_change_end_the_run(root, monkeypatch):
    monkeypatch.setattr(mutation.Copy, "run", lambda *_: ("survived", 46.0, ""))
    settings = mutation.Settings(["package"], 60, {"package/": ["test_module.py"]}, [])
    with pytest.raises(SystemExit, match=r"46 s of 60 s without any change: tests/test_module\.py"):
        mutation.run(root, settings, draw(root, 1), root / "build/results.jsonl")
