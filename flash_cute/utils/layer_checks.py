"""What holds of any right layer, whatever its weights are: each check raises AssertionError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from flash_cute.core.model_copies import copied
from flash_cute.utils.tolerance import Tolerance, with_signs

Run = Callable[[Tensor], Tensor]
Equality = Callable[[str, Tensor, Tensor], None]
"""Raises AssertionError with the first argument's name unless the tensors are equal."""

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_STEPS = (1e-5, 1e-4)  # of a parameter's root mean square, for differences in fp64


def expect(right: bool, otherwise: str) -> None:
    if not right:
        raise AssertionError(otherwise)


def normal(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(
        device, dtype
    )


def without_dropout(layer: nn.Module) -> nn.Module:
    """The layer with all dropout switched off: of modules, and of attributes named dropout."""
    for module in layer.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return layer


def check_shapes(run: Run, inputs: Sequence[Tensor], width: int) -> None:
    for x in inputs:
        given, expected = tuple(run(x).shape), (*x.shape[:-1], width)
        expect(given == expected, f"{tuple(x.shape)} became {given}; expected {expected}")


def check_dtype(out: Tensor, x: Tensor) -> None:
    expect(out.dtype == x.dtype, f"the output is {out.dtype}; the input is {x.dtype}")
    expect(out.device == x.device, f"the output is on {out.device}; the input on {x.device}")


def check_finite(name: str, x: Tensor) -> None:
    count = int((~x.isfinite()).sum())
    expect(count == 0, f"{count} elements of {name} are NaN or infinite")


def check_lengths(run: Run, inputs: Sequence[Tensor], width: int, equal: Equality) -> None:
    """Outputs have the right shapes, are finite and repeatable, and depend on their own input."""
    check_shapes(run, inputs, width)
    for x in inputs:
        out = run(x)
        check_finite(f"the output of {tuple(x.shape)}", out)
        equal(f"a second output of {tuple(x.shape)}", run(x), out)
        noise = normal(x.shape, x.device, x.dtype).flip(0, -1)
        # One sum in a short dtype may stay the same by chance, or by a large bias; several do not.
        changed = [(run(x + 4**n * noise.roll(n)) != out).any(-1) for n in range(4)]
        count = int((~torch.stack(changed).any(0)).sum())
        expect(count == 0, f"{count} rows of the output of {tuple(x.shape)} ignore their input")


def check_modes(layer: nn.Module, run: Run, x: Tensor, equal: Equality) -> None:
    """Without gradients the output is the same, and neither input nor parameters are written to."""
    before, weights = x.clone(), [p.detach().clone() for p in layer.parameters()]
    out = run(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            equal(f"the output in {mode.__name__}", run(x).clone(), out)
    expect(torch.equal(x, before), "the layer writes to its input")
    same = all(torch.equal(p, w) for p, w in zip(layer.parameters(), weights, strict=True))
    expect(same, "the layer writes to its parameters")


def check_layouts(run: Run, inputs: Sequence[Tensor], equal: Equality) -> None:
    """Outputs of views equal those of contiguous copies."""
    for x in inputs:
        equal(f"the output of strides {x.stride()}", run(x), run(x.contiguous()))


def check_batch(run: Run, x: Tensor, tolerance: Tolerance, chunk: int = 1) -> None:
    """Outputs of batch entries do not depend on the other entries."""
    out = run(x)
    typical = tolerance.typical(out[:chunk], lambda draw: run(with_signs(x, draw)))
    for i in range(0, len(x), chunk):
        alone = run(x[i : i + chunk])
        tolerance.equal(f"entry {i} alone", alone, out[i : i + chunk], typical=typical)


def check_attends(run: Run, x: Tensor) -> None:
    """The last token's output depends on the other tokens, under any mask."""
    other = torch.cat([x[:, :-1].flip(-1), x[:, -1:]], dim=1)
    change = (run(other)[:, -1] - run(x)[:, -1]).abs().max()
    expect(bool(change > 0), "the last token's output does not depend on other tokens")


def check_affine(run: Run, pair: Tensor, tolerance: Tolerance) -> None:
    x, y = pair.unbind()
    offset, out = run(torch.zeros_like(x)), run(x)
    typical = tolerance.typical(out, lambda draw: run(with_signs(x, draw)))
    middle = run((x + y) / 2)
    tolerance.equal("f((x + y) / 2)", middle, (out + run(y)) / 2, typical=typical)
    tolerance.equal("f(-x)", run(-x) - offset, offset - out, typical=typical)


def check_gradients(layer: nn.Module, run: Run, x: Tensor) -> None:
    """The input and every parameter that requires grad get finite gradients."""
    x = x.clone().requires_grad_()
    out = run(x)
    expect(out.requires_grad, "the output has no gradient")
    named = {"the input": x, **dict(layer.named_parameters())}
    wanted = {name: p for name, p in named.items() if p.requires_grad}
    gradients = torch.autograd.grad(
        out, list(wanted.values()), normal(tuple(out.shape), x.device, x.dtype), allow_unused=True
    )
    for name, gradient in zip(wanted, gradients, strict=True):
        expect(gradient is not None, f"{name} gets no gradient")
        check_finite(f"the gradient of {name}", gradient)
    expect(bool(gradients[0].any()), "the gradient of the input is 0")


def check_differences(layer: nn.Module, run_of: Callable[[nn.Module], Run], x: Tensor) -> None:
    """Gradients equal finite differences of a copy in fp64, in evaluation and in training without
    dropout. Layers that refuse fp64, and functions that are not smooth, are skipped."""
    for training in (False, True):
        exact = without_dropout(copied(layer).double()).train(training)
        run = run_of(exact)
        y = x.double().clone().requires_grad_()
        try:
            out = run(y)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return
        if not out.requires_grad or not torch.equal(run(y), out):
            return
        weight = normal(tuple(out.shape), out.device, out.dtype)
        named = {"the input": y, **{n: p for n, p in exact.named_parameters() if p.requires_grad}}
        found = torch.autograd.grad(out, list(named.values()), weight, allow_unused=True)
        with torch.no_grad():
            noise = 1e-13 * float((out * weight).abs().sum())
            for (name, p), gradient in zip(named.items(), found, strict=True):
                loss = partial(_weighted, run, y, weight)
                _check_difference(name, p, gradient, loss, noise)


def _weighted(run: Run, x: Tensor, weight: Tensor) -> float:
    return float((run(x) * weight).sum())


def _check_difference(
    name: str, p: Tensor, gradient: Tensor | None, loss: Callable[[], float], noise: float
) -> None:
    size = max(float(p.square().mean().sqrt()), 1e-2)
    direction = size * normal(tuple(p.shape), p.device, p.dtype)
    claimed = 0.0 if gradient is None else float((gradient * direction).sum())
    before, quotients = p.clone(), []
    for step in _STEPS:
        values = []
        for sign in (1, -1):
            p.copy_(before + sign * step * direction)
            values.append(loss())
        quotients.append((values[0] - values[1]) / (2 * step))
    p.copy_(before)
    room = noise / _STEPS[0]
    if abs(quotients[0] - quotients[1]) > 1e-3 * abs(quotients[1]) + room:
        return
    right = abs(claimed - quotients[1]) <= 1e-2 * abs(quotients[1]) + room
    expect(right, f"the gradient of {name} is {claimed:.6g} along a line; {quotients[1]:.6g} is")
