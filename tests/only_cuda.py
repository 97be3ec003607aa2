"""Which tests need a GPU."""

from __future__ import annotations

import pytest


def runs_on_cuda(item: pytest.Item) -> bool:
    """Whether a test takes the fixture `cuda`, or `device` on CUDA."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return "cuda" in getattr(item, "fixturenames", ()) or parameters.get("device") == "cuda"
