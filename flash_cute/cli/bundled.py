"""Imports modules that are inside of the package in a wheel, and next to it in a checkout."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def module(name: str) -> Any:
    """A module such as ``benchmarks.attention``, from either place.

    Raises:
        ImportError: it is in neither place, or needs a package that is not installed.
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
