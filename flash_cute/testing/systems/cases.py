"""The systems by name, and one line of JSON for each case."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
from dataclasses import dataclass
from typing import Any

from flash_cute.testing.systems.findings import Findings

_SHARES = {
    "functions": 5, "layers": 24, "core": 4, "fp8": 10, "conversion": 6, "trainer": 8,
    "adaptive": 10, "fusion": 12, "llama": 8, "ranks": 12, "disagreement": 4, "decode": 6,
    "members": 5,
}  # fmt: skip
NAMES = tuple(_SHARES)
OF_RANKS = ("ranks", "disagreement", "decode", "members")


@dataclass(frozen=True)
class SystemTrial:
    """A case of the system of that name."""

    system: str
    case: Any

    @property
    def ranks(self) -> int:
        """How many processes of a group run it; 0 is one process without a group."""
        return getattr(self.case, "ranks", 0)

    def run(self, device: str) -> Findings:
        """Checks it in this process, or as one rank of the group of this process."""
        return module_of(self.system).check(self.case, device)

    def to_json(self) -> str:
        """The fields that differ from the defaults, in one line."""
        fields: dict[str, Any] = {"system": self.system}
        for field in dataclasses.fields(self.case):
            value = getattr(self.case, field.name)
            if value != field.default:
                fields[field.name] = value
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> SystemTrial:
        """The trial that `to_json` wrote.

        Raises:
            ValueError: no JSON, no system, or a field that does not exist.
        """
        fields: Any = json.loads(text)
        system = fields.pop("system", None) if isinstance(fields, dict) else None
        if system not in NAMES:
            raise ValueError(f'"system" must be one of {", ".join(NAMES)}')
        kind = module_of(system).Case
        known = {field.name for field in dataclasses.fields(kind)}
        if unknown := fields.keys() - known:
            raise ValueError(f"no such field: {', '.join(sorted(unknown))}")
        return cls(system, kind(**{name: _hashable(x) for name, x in fields.items()}))


def module_of(system: str) -> Any:
    """The module of a system."""
    return importlib.import_module(f"flash_cute.testing.systems.{system}")


def draw(
    pick: random.Random,
    names: tuple[str, ...] = NAMES,
    ranks: tuple[int, ...] = (1, 2, 3),
    device: str = "cpu",
) -> SystemTrial:
    """A random case of one of the systems that the device supports; systems over ranks use one of
    these numbers of ranks."""
    (system,) = pick.choices(names, [_SHARES[name] for name in names])
    case = module_of(system).draw(pick)
    if system in OF_RANKS:
        case = dataclasses.replace(case, ranks=pick.choice(ranks))
    return SystemTrial(system, _on_cuda(system, case) if device == "cuda" else case)


def _on_cuda(system: str, case: Any) -> Any:
    """The case for CUDA, which has no fp64 kernels, and caches only in 16 bits. Discontinuous
    functions are left out, as fp32's roundings cross their steps: fp8 of results, ReLU's slope."""
    changes: dict[str, Any] = {}
    if case.dtype == "float64":
        changes["dtype"] = "float32"
    if system == "decode" and case.dtype.endswith(("32", "64")):
        changes["dtype"] = "bfloat16"
    if system == "layers" and case.kind == "fp8":
        changes["kind"] = "config"
    if system == "fusion" and case.activation == "relu":
        changes["activation"] = "gelu"
    return dataclasses.replace(case, **changes)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
