"""Makes mutants, each a small change of a module's code as in mutmut.

Code that tests of behaviour cannot see does not change: annotations, type aliases, imports,
decorators, docstrings, `__all__`, messages of `raise`, and strings with a space, which are prose.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from mutmut.mutation.mutators import mutation_operators

# mutmut leaves these calls alone: without an argument they raise, which any test notices.
_TRIVIAL_CALLS = ("isinstance", "len")
_UNSEEN = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom, cst.Raise)


@dataclass(frozen=True)
class Mutant:
    """One change of one module, by its path below the folder of the code."""

    module: str
    before: str
    after: str

    @property
    def key(self) -> str:
        """A key of the change and its code, the same on any machine."""
        return hashlib.sha256(f"{self.module}\n{self.after}".encode()).hexdigest()[:12]

    @property
    def diff(self) -> str:
        before, after = self.before.splitlines(), self.after.splitlines()
        lines = difflib.unified_diff(before, after, self.module, self.module, n=1, lineterm="")
        return "\n".join(lines)


class _Changes(cst.CSTVisitor):
    """Collects pairs of a node and its replacement, in the order of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_unseen(node):
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                self.found += ((node, other) for other in operator(node))
        return True


def _is_unseen(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
        return node.func.value in _TRIVIAL_CALLS
    if isinstance(node, cst.Expr):
        return isinstance(node.value, cst.BaseString)
    if isinstance(node, cst.SimpleString):
        return " " in node.value
    if isinstance(node, cst.Assign) and isinstance(target := node.targets[0].target, cst.Name):
        name = target.value
        is_variable = m.matches(node.value, m.Call(func=m.Name("TypeVar")))
        return name == "__all__" or is_variable or (name[0].isupper() and not name.isupper())
    return isinstance(node, _UNSEEN)


def draw(root: Path, modules: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, or fewer if there are no more; all changes are equally likely. Code that
    Python cannot compile is skipped."""
    changes = []
    for module in modules:
        tree, found = cst.parse_module((root / module).read_text()), _Changes()
        tree.visit(found)
        changes += [(module, tree, *change) for change in found.found]
    random.Random(seed).shuffle(changes)
    return list(itertools.islice(_compiled(changes), count))


def _compiled(
    changes: Iterable[tuple[str, cst.Module, cst.CSTNode, cst.CSTNode]],
) -> Iterator[Mutant]:
    for module, tree, node, other in changes:
        changed = tree.deep_replace(node, other)
        assert isinstance(changed, cst.Module)
        with contextlib.suppress(SyntaxError):
            compile(changed.code, module, "exec")
            yield Mutant(module, tree.code, changed.code)
