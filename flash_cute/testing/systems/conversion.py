"""Conversion of models to fp8: nothing that was added to a linear layer is lost."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from flash_cute.core import OptimizedLinear
from flash_cute.precision import FP8LinearLayer, convert_model_to_fp8
from flash_cute.testing.systems import contract
from flash_cute.testing.systems.findings import Findings

PARTS = (
    "linear", "optimized", "subclass", "own_forward", "weight_norm", "spectral_norm", "pruned",
    "parametrized", "own_parameter", "own_buffer", "own_property", "attention", "tied",
)  # fmt: skip
# torch cannot copy these once they have computed a weight with a gradient.
_NOT_COPIED = {"weight_norm", "spectral_norm", "pruned", "parametrized", "own_parameter"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A linear layer with these parts after it."""

    seed: int = 0
    dtype: str = "float32"
    parts: tuple[str, ...] = ()
    inplace: bool = True
    also: str = ""


def draw(pick: random.Random) -> Case:
    return Case(
        seed=pick.randrange(2**31),
        parts=tuple(pick.choice(PARTS) for _ in range(pick.randint(1, 4))),
        inplace=pick.random() < 0.5,
        also=pick.choice(("", "copies", "hook")),
    )


class _Subclass(nn.Linear):
    """Computes what nn.Linear does."""


class _Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class _OwnParameter(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.gain = nn.Parameter(torch.full((width,), 1.5))
        self.register_forward_hook(lambda module, _, out: out * module.gain)


class _OwnBuffer(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("calls", torch.zeros(()))


class _OwnProperty(nn.Linear):
    """A linear layer whose weight is computed from another parameter, as in adapters and old
    normalisations."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        given = dict(self.named_parameters())["weight"]
        nn.Module.__delattr__(self, "weight")
        self.raw = nn.Parameter(given.detach())

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.raw / self.raw.norm() * 3


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class _Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[None], x[None], x[None], need_weights=False)[0][0]


def _part(name: str, width: int, first: nn.Module | None) -> nn.Module:
    made: nn.Module = nn.Linear(width, width)
    if name == "optimized":
        made = OptimizedLinear(width, width)
    elif name in _CLASSES:
        made = _CLASSES[name](width)
    elif name == "weight_norm":
        made = nn.utils.weight_norm(made)
    elif name == "spectral_norm":
        made = nn.utils.spectral_norm(made)
    elif name == "pruned":
        made = prune.random_unstructured(made, "weight", amount=0.3)
    elif name == "parametrized":
        made = parametrizations.weight_norm(made)
    elif name == "tied" and isinstance(first, nn.Linear):
        made = first
    return made


_CLASSES: dict[str, Any] = {
    "subclass": lambda n: _Subclass(n, n), "own_forward": lambda n: _Scaled(n, n),
    "own_parameter": _OwnParameter, "own_buffer": _OwnBuffer, "own_property": _OwnProperty,
    "attention": _Attending,
}  # fmt: skip


def check(case: Case, device: str) -> Findings:
    """All parameters, buffers and gradients exist; results are close to those before."""
    find = Findings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check(find, case, device)
    return find


def _check(find: Findings, case: Case, device: str) -> None:
    torch.manual_seed(case.seed)
    width = 8
    parts: list[nn.Module] = []
    for name in case.parts:
        parts.append(_part(name, width, parts[0] if parts else None))
    model = nn.Sequential(nn.Linear(width, width), *parts).to(device).eval()
    x = torch.randn(6, width, device=device)
    named = {id(p): n for n, p in model.named_parameters()}
    with torch.no_grad():  # what old normalisations computed with gradients cannot be copied
        before = model(x)
    keys = set(model.state_dict())
    with find.trying("conversion"):
        converted: Any = convert_model_to_fp8(model, inplace=case.inplace)
        find.that((converted is model) == case.inplace, "inplace differs from the argument")
        find.that(set(converted.state_dict()) == keys, "the state dict has other keys")
        if case.inplace:
            lost = named.keys() - {id(p) for p in converted.parameters()}
            find.that(not lost, f"parameters are lost: {sorted(named[i] for i in lost)[:4]}")
        layers = [m for m in converted.modules() if isinstance(m, FP8LinearLayer)]
        find.that(bool(layers), "no layer is in fp8")
        off = float((converted(x) - before).norm() / before.norm())
        find.that(off < 0.05 * (1 + len(parts)) + 0.1, f"results are {off:.3g} off")
        converted.train()
        for _ in range(2):
            converted(x).square().sum().backward()
        still = [n for n, p in converted.named_parameters() if p.requires_grad and p.grad is None]
        find.that(not still, f"no gradient reaches {still[:4]}")
        again = convert_model_to_fp8(converted)
        find.that(again is converted, "a second conversion makes another model")
    if find.failures:
        return
    if case.also == "copies" and not _NOT_COPIED & set(case.parts):
        contract.copies_equal(find, converted.eval(), lambda m: m(x))
    elif case.also == "hook":
        seen: list[int] = []
        for part in set(converted):
            part.register_forward_hook(lambda *_: seen.append(1))
        converted(x)
        find.that(len(seen) == len(converted), f"{len(seen)} of {len(converted)} hooks are called")
