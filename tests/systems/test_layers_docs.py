"""The examples of docs/layers.md and of the layers' docstrings run."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch

import flash_cute.attention
import flash_cute.core

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
NAMES = {
    name: getattr(module, name)
    for module in (flash_cute.attention, flash_cute.core)
    for name in module.__all__
}


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_page(example, capsys):
    exec(example, {})
    printed = capsys.readouterr().out
    assert "torch.Size([2, 100, 512])" in printed or "ATen's on the CPU" in printed


@pytest.mark.parametrize("name", [name for name in NAMES if name != "AttentionPatterns"])
def test_docstring(name):
    _, example = (inspect.getdoc(NAMES[name]) or "").split("Example::\n")
    exec(textwrap.dedent(example), NAMES | {"torch": torch, "dataclasses": dataclasses})


def test_page_names_everything():
    assert [name for name in NAMES if f"`{name}" not in PAGE.read_text()] == []
