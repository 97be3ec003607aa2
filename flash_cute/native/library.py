"""Finding and loading the compiled library that registers ``torch.ops.flash_cute``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flash_cute.native import limits

_NAME = "libflash_cute.so"


def find() -> Path:
    """Path of the library: ``$FLASH_CUTE_LIBRARY``, else the one installed with the package, else
    that of ``make build`` in the package's checkout.

    Raises:
        ImportError: there is no library; the message names every place that was searched.

    Example::

        from flash_cute import library

        print(library.find())
    """
    named = os.environ.get("FLASH_CUTE_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise ImportError(f"FLASH_CUTE_LIBRARY names {named}, which is not a file")
        return Path(named)
    places = _places()
    for path in places:
        if path.is_file():
            return path
    raise ImportError(
        f"flash_cute's compiled library is none of {', '.join(map(str, places))}: run `make build` "
        "in the source tree, or set FLASH_CUTE_LIBRARY to the path of one that was built elsewhere"
    )


def _places() -> list[Path]:
    """Where to search. An editable installation has two folders: of sources, and of binaries."""
    checkout = Path(__file__).resolve().parents[2]
    folders = [*map(Path, sys.modules["flash_cute"].__path__), checkout / "build" / "make"]
    return [folder / _NAME for folder in folders]


torch.ops.load_library(str(find()))


_KERNELS = tuple(torch.ops.flash_cute.kernels().split())


def kernels() -> tuple[str, ...]:
    """Ids of the library's CUDA kernels: ``fwd_sm80_bf16_plain_d64x64_m128_n64_s2_w4_c2``, ..."""
    return _KERNELS


def lab_kernels() -> tuple[str, ...]:
    """Names of the kernels of :mod:`flash_cute.lab` in the library."""
    return tuple(torch.ops.flash_cute.lab_kernels().split())


def has_cuda_kernels() -> bool:
    """Whether the loaded library holds any CUDA kernel.

    Example::

        from flash_cute import library

        print("with CUDA kernels" if library.has_cuda_kernels() else "for the CPU alone")
    """
    return bool(_KERNELS)


def can_use_cuda() -> bool:
    """Whether there is a GPU, and the library holds kernels for one.

    Example::

        from flash_cute import library

        device = "cuda" if library.can_use_cuda() else "cpu"
    """
    return torch.cuda.is_available() and has_cuda_kernels()


@contextmanager
def only(*parts: str) -> Iterator[None]:
    """:func:`flash_cute.kernels.only`, of the library's kernels whose id contains one of ``parts``.

    Raises:
        ValueError: there is no such kernel.
    """
    ids = [kernel for kernel in _KERNELS if any(part in kernel for part in parts)]
    if not ids:
        raise ValueError(f"no kernel's id contains any of {parts}; kernels() lists them")
    with limits.limit_kernels(limits.merge_with_current(ids)):
        yield
