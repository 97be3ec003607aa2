"""Compares a layer's results and gradients with a reference of its own weights in fp64, for many
sizes, layouts, magnitudes, modes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flash_cute.core.model_copies import copied
from flash_cute.utils.layer_checks import Run, expect, normal, without_dropout
from flash_cute.utils.tolerance import Tolerance, largest_of, with_signs

Weights = Mapping[str, Tensor]
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError)
LAYOUTS = ("transposed", "by columns", "strided", "expanded", "offset")


@dataclass(frozen=True)
class Reference:
    """What a layer must compute: ``forward(x, weights)`` in fp64; and a function that splits its
    parameters, or their gradients, into parts of one magnitude, (weight, bias or None) by name."""

    forward: Callable[[Tensor, Weights], Tensor]
    parts: Callable[[Weights], dict[str, tuple[Tensor, Tensor | None]]]


@dataclass(frozen=True)
class Trial:
    """A trial: the input's shape, layout and magnitude, and whether gradients are compared."""

    shape: tuple[int, ...]
    layout: str = "contiguous"
    scale: float = 1.0
    gradients: bool = True
    training: bool = False
    dtype: torch.dtype | None = None  # None is the layer's own

    def input(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return laid_out(self.scale * normal(self.shape, device, dtype), self.layout)

    def __str__(self) -> str:
        words = [f"input {self.shape}", "" if self.layout == "contiguous" else self.layout]
        words.append("" if self.scale == 1 else f"times {self.scale:g}")
        words.append("in training" if self.training else "")
        words.append("" if self.dtype is None else f"in {self.dtype}")
        return ", ".join(filter(None, words))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout; an expanded one repeats the first entry."""
    if layout == "transposed":
        return x.transpose(0, -2).contiguous().transpose(0, -2)
    if layout == "by columns":
        return x.mT.contiguous().mT
    if layout == "strided":
        return torch.stack([x, -x], -1).flatten(-2)[..., ::2]
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return torch.cat([x[:1], x])[1:] if layout == "offset" else x


def trials_of(
    base: tuple[int, ...], others: Iterable[Trial], dtype: torch.dtype, rounds: bool
) -> list[Trial]:
    """Trials in the layer's own dtype in evaluation, then in training, then in other dtypes.
    ``base`` is the first. Layers that round get no large inputs, whose scores amplify rounding."""
    exact = dtype in (torch.float64, torch.float32) and not rounds
    own = [Trial(base), *(Trial(base, layout) for layout in LAYOUTS), *others]
    own += [Trial(base, scale=scale) for scale in ((4.0, 0.01) if exact else (0.01,))]
    own.append(Trial(base, scale=0.0, gradients=False))
    longer = max((trial for trial in own if trial.gradients), key=lambda t: t.shape[-2])
    modes = [Trial(base, training=True), replace(longer, training=True)]
    casts = [d for d in _DTYPES if d != dtype]
    return [*own, *modes, *(replace(t, dtype=d) for d in casts for t in (own[0], modes[0]))]


def check_values(
    layer: nn.Module, run_of: Callable[[nn.Module], Run], trials: list[Trial],
    references: list[Reference], tolerance: Tolerance,
) -> str | None:  # fmt: skip
    """Checks that one reference holds in all trials. Returns why none was tried, or None."""
    if not references:
        return "the layer's weights are not recognised"
    failures = []
    for reference in references:
        try:
            compare(layer, run_of, trials[0], reference, tolerance)
        except AssertionError as error:
            failures.append(str(error))
            continue
        for trial in trials[1:]:
            compare(layer, run_of, trial, reference, tolerance)
        return None
    raise AssertionError("; or ".join(failures))


def compare(
    layer: nn.Module, run_of: Callable[[nn.Module], Run], trial: Trial, reference: Reference,
    tolerance: Tolerance,
) -> None:  # fmt: skip
    """Raises AssertionError unless output and gradients are the reference's. Skips dtypes that the
    layer refuses, and training if it is random for other reasons than dropout."""
    first = next(p for p in layer.parameters() if p.is_floating_point())
    dtype = trial.dtype or first.dtype
    if trial.training or trial.dtype is not None:
        layer = copied(layer).to(dtype)
        without_dropout(layer).train(trial.training)
    run, x = run_of(layer), trial.input(first.device, dtype)
    weights = dict(layer.named_parameters())
    try:
        given = results(run, x, weights, trial)
        again = run(x) if trial.training else None
    except _REFUSALS:
        if trial.dtype is not None:
            return
        raise
    if again is not None and not torch.equal(again, given.out):
        return
    ideal = results(reference.forward, x, weights, trial, exact=True)

    def equal(name: str, of: Callable[[Results], Tensor | None], related: float = 0.0) -> None:
        def alike(draw: torch.Generator) -> Tensor:
            found = of(results(reference.forward, x, weights, trial, exact=True, signs=draw))
            assert found is not None
            return found

        mine, right = of(given), of(ideal)
        if mine is not None and right is not None:
            tolerance.equal(name, mine, right, related, tolerance.typical(right, alike))

    equal(f"the output of {trial}", lambda found: found.out)
    if trial.gradients:
        equal(f"the input's gradient, {trial},", lambda found: found.of_input)
        _compare_parts(trial, ideal.of_weights, reference, equal)


@dataclass(frozen=True)
class Results:
    out: Tensor
    of_input: Tensor | None
    of_weights: dict[str, Tensor]


def results(
    run: Callable[..., Tensor], x: Tensor, weights: Weights, trial: Trial, exact: bool = False,
    signs: torch.Generator | None = None,
) -> Results:  # fmt: skip
    """Output and gradients; if ``exact``, with fp64 copies of input and weights; with a generator
    ``signs``, input and gradient get random signs."""
    wanted = [name for name, p in weights.items() if p.requires_grad]
    dtype = x.dtype
    x = x if signs is None else with_signs(x, signs)
    if exact:
        x, flags = x.detach().double(), {name: p.requires_grad for name, p in weights.items()}
        weights = {n: p.detach().double().requires_grad_(flags[n]) for n, p in weights.items()}
    x = x.detach().requires_grad_(trial.gradients)
    with torch.set_grad_enabled(trial.gradients):
        out = run(x, weights) if exact else run(x)
    if not trial.gradients:
        return Results(out.detach(), None, {})
    expect(out.requires_grad, "the output has no gradient")
    grad_out = normal(tuple(out.shape), out.device, dtype).to(out.dtype)
    if trial.layout != "contiguous":  # expanded, as sum() makes it, but in the last dimension
        grad_out = grad_out[:1].expand(out.shape)
    grad_out = grad_out if signs is None else with_signs(grad_out, signs)
    found = torch.autograd.grad(
        out, [x, *(weights[n] for n in wanted)], grad_out, allow_unused=True, materialize_grads=True
    )
    return Results(out.detach(), found[0], dict(zip(wanted, found[1:], strict=True)))


def _compare_parts(
    trial: Trial, ideal: Weights, reference: Reference, equal: Callable[..., None]
) -> None:
    """Compares each projection separately, as their gradients differ in size; but gradients that
    cancel to 0, as the key bias's does, are measured relative to the others."""
    right = reference.parts(ideal)
    largest = max(
        (largest_of(t) for pair in right.values() for t in pair if t is not None),
        default=0.0,
    )
    for name in right:
        for i, kind in enumerate(("weight", "bias")):

            def of(found: Results, name: str = name, i: int = i) -> Tensor | None:
                return reference.parts(found.of_weights)[name][i]

            equal(f"the gradient of {name}{kind}, {trial},", of, largest)
