"""A choice of a kernel and its numbers: what the tuner chooses among, and a calibration names."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Choice:
    """A kernel. Of Hopper's forward also into how many parts it cuts the keys, and how many query
    heads share a tile of queries; None is the library's estimate."""

    kernel: str
    num_splits: int | None = None
    pack_gqa: int | None = None

    @property
    def numbers(self) -> dict[str, int]:
        """Those that are given, by name."""
        return {name: x for name, x in asdict(self).items() if name != "kernel" and x is not None}

    @property
    def entry(self) -> dict[str, str | int]:
        """What a calibration file holds of it."""
        return {"kernel": self.kernel, **self.numbers}

    def __str__(self) -> str:
        """As lines of ``torch.ops.flash_cute.set_calibration`` have it."""
        return " ".join([self.kernel, *(f"{name}={x}" for name, x in self.numbers.items())])
