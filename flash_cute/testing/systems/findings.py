"""The failures of a case, and the comparisons that find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

# What a result may be off by at least, relative to the largest true value: sums in another order.
# fp64 results may come from fp32 statistics of none of their terms; measured: 1e-13.
_FLOORS = {
    torch.float64: 1e-10,
    torch.float32: 8e-6,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}
# A plain computation in the dtype errs by chance, of small tensors of 16 bits by good luck: another
# order of roundings may err so many times more. Measured on 12,000 cases: 6.3, and 7.3.
_TIMES_PLAIN = {torch.float64: 1.0, torch.float32: 12.0, torch.bfloat16: 12.0, torch.float16: 12.0}
# The error of a tensor of one element is one draw of a normal, which may be 0 by luck: another draw
# is above 12 times it in 2 / (12 pi) = 5 % of cases. Above 12 times the largest of 8 draws it is in
# 2e-6: at most as often as Student's t of 8 degrees of freedom, which divides by their root mean
# square. So tensors of fewer elements than that are computed from that many inputs.
_DRAWS = 8
# Gradients that vanish by symmetry are rounding errors of terms as large as other gradients.
_OF_LARGEST = 0.1


@dataclass
class Findings:
    """Failures as texts.

    ``worst`` is the largest error as a fraction of its bound; ``notes`` must be equal on all ranks;
    ``spent`` says that the group of the ranks cannot be used again.
    """

    failures: list[str] = field(default_factory=list)
    worst: float = 0.0
    notes: list[str] = field(default_factory=list)
    spent: bool = False

    def that(self, holds: bool, otherwise: str) -> bool:
        """Adds the failure ``otherwise`` unless it holds; returns whether it does."""
        if not holds:
            self.failures.append(otherwise)
        return bool(holds)

    def close(self, name: str, got: Any, true: Tensor, bound: float) -> None:
        """``got`` has the shape of ``true`` and is finite, and no element is farther off."""
        if not isinstance(got, Tensor):
            self.that(False, f"{name} is {type(got).__name__}; expected a tensor")
            return
        if not self.that(
            got.shape == true.shape,
            f"{name} has shape {tuple(got.shape)}; expected {tuple(true.shape)}",
        ):
            return
        if not true.numel():
            return
        error = (got.detach().double().cpu() - true.double().cpu()).abs()
        worst = float(error.nan_to_num(torch.inf, torch.inf).max())
        self.worst = max(self.worst, min(worst / bound, 1e9) if bound else float(worst > 0) * 1e9)
        self.that(worst <= bound, f"{name} is off by {worst:.3g}; at most {bound:.3g} is expected")

    def equal(self, name: str, got: Any, true: Any) -> None:
        """The same bits; nested tuples, lists and dicts of tensors, or plain values."""
        self.that(same_bits(got, true), f"{name}: bits differ")

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """What is raised inside is a failure."""
        try:
            yield
        except Exception as error:
            line = next(iter(str(error).splitlines()), "")
            self.failures.append(f"{what} raised {type(error).__name__}: {line[:300]}")

    def refused(self, call: Callable[[], Any], what: str, *words: str) -> None:
        """The call raises ValueError or TypeError (NotImplementedError is one neither), whose
        message has one of the words."""
        try:
            call()
        except (ValueError, TypeError) as error:
            matches = any(word in str(error) for word in words) or not words
            self.that(
                matches, f"{what}: the message names no {' or '.join(words)}: {str(error)[:200]}"
            )
        except Exception as error:
            self.that(False, f"{what} raised {type(error).__name__}: {str(error)[:200]}")
        else:
            self.that(False, f"{what} was taken")


def same_bits(got: Any, true: Any) -> bool:
    """Whether both have the same values, with NaN equal to NaN."""
    if isinstance(true, Tensor):
        if not isinstance(got, Tensor) or got.shape != true.shape or got.dtype != true.dtype:
            return False
        if true.is_floating_point():
            same = (got == true) | (got.isnan() & true.isnan())
            return bool(same.all())
        return torch.equal(got, true)
    if isinstance(true, Mapping):
        return got.keys() == true.keys() and all(
            same_bits(got[name], x) for name, x in true.items()
        )
    if isinstance(true, (tuple, list)):
        return len(got) == len(true) and all(map(same_bits, got, true))
    return bool(got == true)


Results = dict[str, Tensor]


def with_gradients(
    call: Callable[..., Tensor], inputs: Mapping[str, Tensor | None], gradient: Tensor
) -> Results:
    """{"out": call(**inputs), "dx": of each floating input x, given the gradient of out}."""
    leaves: dict[str, Any] = {
        name: x if x is None or not x.is_floating_point() else x.detach().requires_grad_()
        for name, x in inputs.items()
    }
    out = call(**leaves)
    wanted = {n: x for n, x in leaves.items() if x is not None and x.requires_grad}
    grads = torch.autograd.grad(
        out, list(wanted.values()), gradient.to(out.dtype), allow_unused=True
    )
    found = {"out": out.detach()}
    for (name, x), grad in zip(wanted.items(), grads, strict=True):
        found[f"d{name}"] = torch.zeros_like(x) if grad is None else grad
    return found


def compare(
    find: Findings,
    got: Mapping[str, Tensor],
    plain: Callable[..., Tensor],
    inputs: Mapping[str, Tensor | None],
    gradient: Tensor,
    dtype: torch.dtype,
    least: float = 0.0,
) -> None:
    """Compares results with ``plain``, the same function in plain PyTorch, in fp64.

    The bound is measured: the error of ``plain`` in ``dtype`` itself, times a factor, and at least
    a few roundings (or ``least``) of the largest value.
    """

    def run(kind: torch.dtype, given: Mapping[str, Tensor | None]) -> Results:
        made = {n: x.to(kind) if _is_rounded(x) else x for n, x in given.items()}
        return with_gradients(plain, made, gradient.to(kind))

    def errors(given: Mapping[str, Tensor | None], true: Results) -> dict[str, float]:
        low = true if dtype == torch.float64 else run(dtype, given)
        return {n: float((low[n].double() - x).abs().max()) for n, x in true.items() if x.numel()}

    true = run(torch.float64, inputs)
    plains = errors(inputs, true)
    few = [n for n in plains if n in got and true[n].numel() < _DRAWS]
    if few and dtype != torch.float64:
        for other in _neighbours(inputs, dtype):
            others = errors(other, run(torch.float64, other))
            plains |= {n: max(plains[n], others[n]) for n in few}
    sizes = {n: float(x.abs().max()) if x.numel() else 0.0 for n, x in true.items()}
    largest = max((size for name, size in sizes.items() if name != "out"), default=0.0)
    for name, x in true.items():
        if name not in got:
            continue
        size = sizes[name] if name == "out" else max(sizes[name], _OF_LARGEST * largest)
        allowed = _TIMES_PLAIN[dtype] * plains.get(name, 0.0)
        find.close(name, got[name], x, allowed + max(_FLOORS[dtype], least) * max(size, 1e-6))


def _is_rounded(x: Tensor | None) -> TypeGuard[Tensor]:
    return x is not None and x.is_floating_point()


def _neighbours(
    inputs: Mapping[str, Tensor | None], dtype: torch.dtype
) -> Iterator[dict[str, Tensor | None]]:
    """The inputs with each number up to 6 % larger or smaller, for other roundings."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(_DRAWS - 1):
        yield {
            n: (x * (1 + torch.empty(x.shape).uniform_(-0.06, 0.06, generator=generator).to(x)))
            .detach().to(dtype)
            if _is_rounded(x) else x
            for n, x in inputs.items()
        }  # fmt: skip
