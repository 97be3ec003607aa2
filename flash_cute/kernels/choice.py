"""A kernel with num_splits and pack_gqa: the tuner's candidates, and entries of a calibration."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Choice:
    """A kernel, and for Hopper's forward num_splits of the keys, and how many query heads share a
    tile of queries (pack_gqa); None is the library's estimate."""

    kernel: str
    num_splits: int | None = None
    pack_gqa: int | None = None

    @property
    def numbers(self) -> dict[str, int]:
        """num_splits and pack_gqa by name, if they are given."""
        return {name: x for name, x in asdict(self).items() if name != "kernel" and x is not None}

    @property
    def entry(self) -> dict[str, str | int]:
        """The entry of a calibration file."""
        return {"kernel": self.kernel, **self.numbers}

    def __str__(self) -> str:
        """The format of ``torch.ops.flash_cute.set_calibration``."""
        return " ".join([self.kernel, *(f"{name}={x}" for name, x in self.numbers.items())])
