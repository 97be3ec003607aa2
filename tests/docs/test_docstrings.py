"""Every example of a docstring runs alone, as a reader copies it; every public function has one."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flash_cute import compat
from flash_cute.integrations import sdpa
from flash_cute.native import library

ROOT = Path(__file__).resolve().parents[2]
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
DIRECTIVE = re.compile(r"^::: (\S+)\n(?: +options:\n +members: (\[.*\])\n)?", re.MULTILINE)


def has_module(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


# Beginnings of names of examples that not every machine can run, what they need, and whether it is
# there.
NEEDS: dict[str, tuple[str, Callable[[], bool]]] = {
    "flash_cute.integrations.transformers": ("transformers", has_module("transformers")),
    "flash_cute.integrations.vllm": ("vLLM", has_module("vllm")),
    "flash_cute.kernels.gpus.gpu": ("a GPU", library.can_use_cuda),
    "flash_cute.lab.calls": (
        "a GPU and the lab's kernels",
        lambda: library.can_use_cuda() and bool(library.lab_kernels()),
    ),
    "flash_cute.tiled.functions.kernel_of": ("a GPU", library.can_use_cuda),
    "flash_cute.tuning.autotune": ("a GPU", library.can_use_cuda),
}


def examples_in(docstring: str) -> Iterator[str]:
    """The blocks below ``Example::``, each up to a line that is indented no more."""
    lines = docstring.splitlines()
    for start, line in enumerate(lines, 1):
        if line.strip() != "Example::":
            continue
        indent = len(line) - len(line.lstrip())
        block: list[str] = []
        for inner in lines[start:]:
            if inner.strip() and len(inner) - len(inner.lstrip()) <= indent:
                break
            block.append(inner)
        yield textwrap.dedent("\n".join(block)).strip() + "\n"


def docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Names, with dots, and docstrings of what is defined below a node, itself included."""
    if isinstance(node, SCOPES):
        yield name, ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        is_scope = isinstance(child, SCOPES[1:])
        yield from docstrings(child, f"{name}.{child.name}" if is_scope else name)


def of_package() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "flash_cute").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield from docstrings(ast.parse(path.read_text(encoding="utf-8")), module)


EXAMPLES = [(name, code) for name, text in of_package() for code in examples_in(text)]


@pytest.fixture
def left_as_found(tmp_path, monkeypatch) -> Iterator[None]:
    """What examples switch on for a whole process is off again, and their files are elsewhere."""
    monkeypatch.chdir(tmp_path)
    yield
    sdpa.restore()
    compat.uninstall()
    if registry := sys.modules.get("flash_cute.integrations.transformers.registry"):
        registry.unregister()


@pytest.mark.parametrize(("name", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_example_runs_alone(name, code, left_as_found):
    for beginning, (need, is_there) in NEEDS.items():
        if f"{name}.".startswith(f"{beginning}.") and not is_there():
            pytest.skip(f"the example needs {need}")
    exec(compile(code, f"<example of {name}>", "exec"), {"__name__": "__main__"})


def test_every_need_is_of_an_example():
    names = [f"{name}." for name, _ in EXAMPLES]
    assert [need for need in NEEDS if not any(x.startswith(f"{need}.") for x in names)] == []


def test_examples_are_written_in_one_way():
    """Others would be run by nothing."""
    other = re.compile(r"^ *(?:>>> .*|Examples?:|Examples::) *$", re.MULTILINE)
    assert [name for name, text in of_package() if other.search(text)] == []


def public_functions() -> Iterator[str]:
    """Functions that `flash_cute` exports and that the reference shows, by where they are defined.
    One whose docstring refers to another, ":func:`other`: ..", counts as the other. A module whose
    library is missing is left out."""
    shown = {"flash_cute": ""}
    for page in [ROOT / "docs" / "reference.md", *(ROOT / "docs" / "reference").glob("*.md")]:
        shown.update(DIRECTIVE.findall(page.read_text(encoding="utf-8")))
    for name, members in shown.items():
        if name == "flash_cute.integrations.vllm" and not has_module("vllm")():
            continue
        module = importlib.import_module(name)
        own = [x for x, value in vars(module).items() if getattr(value, "__module__", "") == name]
        names = members.strip("[]").split(", ") if members else getattr(module, "__all__", own)
        for member in names:
            function = getattr(module, member, None)
            if of := re.match(r":func:`([\w.]+)`:", inspect.getdoc(function) or ""):
                function = pkgutil.resolve_name(of[1])
            if inspect.isfunction(function) and not member.startswith("_"):
                yield f"{function.__module__}.{function.__qualname__}"


def test_every_public_function_has_an_example():
    public, have = set(public_functions()), {name for name, _ in EXAMPLES}
    assert len(public) > 50
    assert public - have == set()


def test_blocks_are_cut_out_of_docstrings():
    source = '''
"""Words.

Example::

    a = 1

    if a:
        b = 2

More words. Example:: is no head here.
"""

class Outer:
    def inner(self):
        """Words.

        Example::

            c = 3
        """
'''
    found = {x: list(examples_in(text)) for x, text in docstrings(ast.parse(source), "m")}
    assert found == {
        "m": ["a = 1\n\nif a:\n    b = 2\n"],
        "m.Outer": [],
        "m.Outer.inner": ["c = 3\n"],
    }
