"""What numbers may be that callers give."""

from __future__ import annotations

import math
from typing import Any

from flash_cute import validate


def check_whole(name: str, x: Any, least: int, what: str = "an int") -> None:
    """Refuses what is no int, or less than ``least``."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name} is {validate.kind_of(x)}; expected {what}")
    if x < least:
        raise ValueError(f"{name} is {x}; expected at least {least}")


def check_positive(name: str, x: Any) -> None:
    """Refuses what is no finite number above 0."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} is {validate.kind_of(x)}; expected a number")
    if not (math.isfinite(x) and x > 0):
        raise ValueError(f"{name} is {x}; expected a finite number above 0")
