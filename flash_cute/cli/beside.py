"""Modules of the repository that a wheel holds inside of the package, and a checkout beside it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def module(name: str) -> Any:
    """``benchmarks.attention``, say, wherever it is.

    Raises:
        ImportError: it is nowhere, or needs a package that is not installed.
    """
    for place in (f"flash_cute.{name}", name):
        try:
            return import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
    raise ImportError(
        f"{name} is not in this installation; run from a checkout of flash_cute, or reinstall it"
    )
