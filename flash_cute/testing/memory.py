"""Memory that detects missing writes of a kernel, and writes outside of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_RED_ZONE = 512
"""Elements of canary on each side of a guarded tensor."""


class GuardedTensor:
    """A tensor of NaN inside canaries: small integers, which as floats are distinct subnormals.

    A stray write, even the addition of +0 (which flushes subnormals), changes a canary.
    `row_padding` elements of canary follow each row of the last dim.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        row_padding: int = 0,
    ) -> None:
        row = shape[-1] + row_padding
        rows = torch.Size(shape[:-1]).numel()
        integers = _INTEGERS[dtype.itemsize]
        self._canary = torch.arange(rows * row + 2 * _RED_ZONE, device=device) % 997 + 1
        self._canary = self._canary.to(integers)
        self._storage = self._canary.clone()
        self._free = torch.ones_like(self._canary, dtype=torch.bool)
        self.tensor: Tensor = self._view(self._storage.view(dtype), shape, rows, row)
        self.tensor.fill_(float("nan"))
        self._view(self._free, shape, rows, row).fill_(False)

    @staticmethod
    def _view(flat: Tensor, shape: Sequence[int], rows: int, row: int) -> Tensor:
        inner = flat[_RED_ZONE : _RED_ZONE + rows * row].view(rows, row)
        return inner[:, : shape[-1]].view(tuple(shape))

    def check(self, name: str) -> None:
        """Assert that no canary was overwritten.

        Raises:
            AssertionError: names the first element outside of the tensor that was written.
        """
        dead = (self._storage != self._canary) & self._free
        if dead.any():
            first = int(dead.nonzero()[0])
            raise AssertionError(
                f"{name}: {int(dead.sum())} elements outside of the tensor were written, the first "
                f"{first - _RED_ZONE} elements after its start"
            )


def fill_freed_memory(device: torch.device | str) -> None:
    """Fill the memory of the next allocations of any size on a CUDA `device` with NaN."""
    sizes = [2**exponent for exponent in range(9, 21)]
    blocks = [
        torch.full((size // 4,), float("nan"), device=device) for size in sizes for _ in range(8)
    ]
    blocks.append(torch.full((2**26,), float("nan"), device=device))  # 256 MiB
    del blocks


@contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """Make torch fill `empty` tensors with NaN; nondeterministic algorithms only warn."""
    switch: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = switch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    switch.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        switch.fill_uninitialized_memory = filled
