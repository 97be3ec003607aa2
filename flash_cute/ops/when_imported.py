"""Registrations in modules of torch that are slow to import, and that most programs never do."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any


def when_imported(name: str, register: Callable[[], None]) -> None:
    """Calls ``register`` now if the module is imported, else right after its first import."""
    if name in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Once(name, register))


class _Once(MetaPathFinder):
    """Finds the module as the other finders do, once, and calls ``register`` after its import."""

    def __init__(self, name: str, register: Callable[[], None]) -> None:
        self.name, self.register = name, register

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            self.register()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
