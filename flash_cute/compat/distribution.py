"""Metadata of a distribution ``flash-attn`` for :mod:`importlib.metadata`.

transformers, Megatron, TransformerEngine and xFormers check its version before they import it.
Nothing is written to disk, and other processes do not see it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from flash_cute.compat import flash_attn

_ANY = metadata.DistributionFinder.Context()  # every distribution
_NAME = "flash-attn"
_FILES = {
    "METADATA": (
        f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {flash_attn.__version__}\n"
        "Summary: flash_cute's functions under flash-attn's names\n"
    ),
    "top_level.txt": "flash_attn\nflash_attn_2_cuda\n",
}


class _Distribution(metadata.Distribution):
    def read_text(self, filename: Any) -> str | None:
        return _FILES.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(flash_attn.__file__).parents[1] / path


class _Finder(metadata.DistributionFinder):
    """A finder of the distribution only: modules are in ``sys.modules``."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(
        self, context: metadata.DistributionFinder.Context = _ANY
    ) -> Iterator[metadata.Distribution]:
        if context.name is None or re.sub(r"[-_.]+", "-", context.name).lower() == _NAME:
            yield _Distribution()


_FINDER = _Finder()


def announce() -> None:
    """Makes the distribution visible, before any other with its name; idempotent."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def withdraw() -> None:
    """Undoes :func:`announce`, if it was called."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
