"""Includes of csrc go down: docs/architecture.md, "Folders"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# What the files of a folder may include; the longest prefix of a file's path counts.
MAY_INCLUDE = {
    "core": ("core", "kernels_built.def"),
    "kernels/common": ("core", "kernels/common"),
    "kernels/ampere": ("core", "kernels/common", "kernels/ampere"),
    "kernels/decode": ("core", "kernels/common", "kernels/ampere", "kernels/decode"),
    "kernels/passes": ("core", "kernels/common", "kernels/passes", "kernels/launch.h"),
    "kernels/sm80": ("core", "kernels/common", "kernels/ampere", "kernels/decode", "kernels/passes",
                     "kernels/launch.h", "kernels/sm80"),
    "kernels/hopper": ("core", "kernels/common", "kernels/hopper"),
    "kernels/sm90": ("core", "kernels/common", "kernels/hopper", "kernels/decode", "kernels/passes",
                     "kernels/launch.h", "kernels/sm90"),
    "kernels/lab": ("core", "kernels/common", "kernels/ampere", "kernels/launch.h", "kernels/lab",
                    "lab_built.def"),
    "kernels/launch.h": (),
    "kernels/families.cpp": ("core", "kernels/families.def"),
    "api": ("core", "api", "kernels/passes", "kernels/lab/registry.h"),
    "library.cpp": ("boundary.h", "core", "api/api.h", "kernels/lab/names.h"),
    "boundary.h": (),
}  # fmt: skip
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu"))


def is_under(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.relative_to(CSRC).as_posix())
def test_includes_go_down(file):
    name = file.relative_to(CSRC).as_posix()
    allowed = MAY_INCLUDE[max((x for x in MAY_INCLUDE if is_under(name, x)), key=len)]
    included = re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE)
    assert [x for x in included if not any(is_under(x, folder) for folder in allowed)] == []


def test_archs_are_named_in_their_families_alone():
    """A new arch is a folder, a value of `Arch` and a line in families.def."""
    root = CSRC.parent
    files = [*CSRC.rglob("*.*"), *(root / "cmake").iterdir(), root / "CMakeLists.txt"]
    names = {path.relative_to(root).as_posix(): path.read_text() for path in files}
    outside = [x for x in names if not re.match(r"csrc/kernels/(sm\d+|lab)/", x)]
    naming = {x for x in outside if re.search(r"\b[sS]m(80|90|\d{3})\b", names[x])}
    assert naming == {"csrc/core/config.h", "csrc/kernels/families.def"}
