"""Whether a layer does what attention, or a linear layer, must do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flash_cute.attention.fp8 import FP8Attention
from flash_cute.hardware.devices import checked_device
from flash_cute.precision.fp8_linear import FP8LinearLayer, FP8Scales
from flash_cute.utils import attention_weights
from flash_cute.utils.calls import call, device_and_dtype

_BATCH, _SEQLEN, _OTHER_SEQLENS = 3, 17, (1, 40)
_ROWS = 5
_TOLERANCES = {  # of the largest element of what is compared
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}

_TOLERANCE_OF_FP8 = 0.4  # E5M2 has two bits of mantissa, and projections follow each other

Equality = Callable[[str, Tensor, Tensor], None]
"""Raises AssertionError, with the name of what is compared."""
Check = Callable[[], str | None]
"""Raises AssertionError if it fails; returns why it was left out, or None."""


class ComponentValidator:
    """Runs layers, and checks what comes out: sizes, finite values, gradients, values.

    A layer is validated as a copy in evaluation mode, so that its parameters, gradients and mode,
    and torch's random state, are as before.

    Args:
        device: where copies run; None is the device of each layer's parameters.

    Raises:
        ValueError: torch has no such device here.

    Example::

        validator = ComponentValidator(device=torch.device("cpu"))
        results = validator.validate_linear_component(nn.Linear(8, 4), 8, 4)
        assert results["passed"], results["failures"]
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = None if device is None else checked_device(device)

    def validate_attention_component(
        self, attention_layer: nn.Module, d_model: int, num_heads: int
    ) -> dict[str, Any]:
        """Check a layer of self-attention, (batch, seqlen, d_model) to the same shape.

        The checks: ``sizes`` (d_model is a multiple of num_heads, and the layer has no others),
        ``shape`` and ``dtype`` of the output, other ``lengths``, ``finite`` values, ``repeatable``
        outputs, ``gradients`` (of the input and of every parameter: there and finite, the input's
        not 0), ``batch`` (entries do not see each other), ``attends`` (tokens see each other), and
        ``values``: outputs and the input's gradient equal softmax attention, full or causal, of
        the layer's own weights in fp64. Weights are found if they are the layer's only parameters
        and bear the names of nn.MultiheadAttention, or ``q_proj, k_proj, v_proj, out_proj``; heads
        of keys may be fewer. Values of other layers are not compared, nor of those that have a
        ``sparsity_ratio`` above 0, a window, a softcap or a ``softmax_scale``. Layers that round to
        fp8 may be off by 0.4 of the largest element.

        Args:
            attention_layer: takes one tensor; nn.MultiheadAttention itself and outputs that are
                tuples are understood.
            d_model: width of input and output.
            num_heads: heads that share it.

        Returns:
            A dict: ``passed``, bool; ``checks``, a dict of ``{"passed": bool or None, "detail":
            str}`` by name, where None is a check that was left out; ``failures``, a list of
            str; ``component``, ``device`` and ``dtype``, str.
        """
        layer, device, dtype = self._copy(attention_layer)

        def run(x: Tensor) -> Tensor:
            if getattr(layer, "batch_first", True):
                return call(layer, x)
            return call(layer, x.transpose(0, 1)).transpose(0, 1)

        x = _normal((_BATCH, _SEQLEN, d_model), device, dtype)
        expected = _attention_reference(layer, num_heads)
        checks: dict[str, Check] = {
            "sizes": lambda: _check_sizes(layer, d_model, num_heads),
            "lengths": lambda: _check_shapes(
                run, [_normal((_BATCH, n, d_model), device, dtype) for n in _OTHER_SEQLENS], d_model
            ),
            "attends": lambda: _check_attends(run, x),
        }
        return _results("attention", layer, run, x, d_model, checks, expected)

    def validate_linear_component(
        self, linear_layer: nn.Module, in_features: int, out_features: int
    ) -> dict[str, Any]:
        """Check a linear layer, (..., in_features) to (..., out_features).

        The checks: ``shape`` and ``dtype`` of the output, inputs of other ``lengths`` and numbers
        of dimensions, ``finite`` values, ``repeatable`` outputs, ``gradients`` (of the input and of
        every parameter), ``batch`` (rows do not see each other), and ``values``: outputs and the
        input's gradient equal ``x @ weight.T + bias`` in fp64, where the layer has a ``weight`` of
        shape (out_features, in_features). All must be ``affine`` in x. Layers that round to fp8
        may be off by 0.4 of the largest element, those that round to bf16 by 0.06.

        Returns:
            A dict as :meth:`validate_attention_component`'s.
        """
        layer, device, dtype = self._copy(linear_layer)

        def run(x: Tensor) -> Tensor:
            return call(layer, x)

        shapes = [(1, in_features), (2, 3, in_features)]
        checks: dict[str, Check] = {
            "lengths": lambda: _check_shapes(
                run, [_normal(shape, device, dtype) for shape in shapes], out_features
            ),
            "affine": lambda: _check_affine(
                run, _normal((2, _ROWS, in_features), device, dtype), _equality_of(layer)
            ),
        }
        x = _normal((_ROWS, in_features), device, dtype)
        expected = _linear_reference(layer, in_features, out_features)
        return _results("linear", layer, run, x, out_features, checks, expected)

    def _copy(self, layer: nn.Module) -> tuple[nn.Module, torch.device, torch.dtype]:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"the layer is {type(layer).__name__}; expected an nn.Module")
        made = copy.deepcopy(layer).eval()
        made.zero_grad()
        if self.device is not None:
            made.to(self.device)
        return made, *device_and_dtype(made)


Reference = Callable[[Tensor], Tensor]


def _results(
    component: str,
    layer: nn.Module,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    width: int,
    more: dict[str, Check],
    expected: list[Reference],
) -> dict[str, Any]:
    """The checks that all components share, and ``more``."""
    equal = _equality_of(layer)
    checks: dict[str, Check] = {
        "shape": lambda: _check_shapes(run, [x], width),
        "dtype": lambda: _check_dtype(run(x), x),
        "finite": lambda: _check_finite("the output", run(x)),
        "repeatable": lambda: equal("a second output", run(x), run(x)),
        "gradients": lambda: _check_gradients(layer, run, x),
        "batch": lambda: _check_batch(run, x, equal),
        "values": lambda: _check_values(run, x, expected, equal),
        **more,
    }
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        outcomes = {name: _outcome(check) for name, check in checks.items()}
    failures = [f"{n}: {o['detail']}" for n, o in outcomes.items() if o["passed"] is False]
    return {
        "passed": not failures,
        "checks": outcomes,
        "failures": failures,
        "component": component,
        "device": str(x.device),
        "dtype": str(x.dtype),
    }


def _outcome(check: Check) -> dict[str, Any]:
    try:
        left_out = check()
    except Exception as error:  # whatever a broken layer raises is a failure of its own
        return {"passed": False, "detail": f"{type(error).__name__}: {error}"}
    if left_out is not None:
        return {"passed": None, "detail": left_out}
    return {"passed": True, "detail": "ok"}


def _normal(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


# --- the checks ----------------------------------------------------------------------------------


def _expect(right: bool, otherwise: str) -> None:
    if not right:
        raise AssertionError(otherwise)


def _check_sizes(layer: nn.Module, d_model: int, num_heads: int) -> None:
    _expect(d_model % num_heads == 0, f"{num_heads} heads do not divide {d_model}")
    for name, given in (("d_model", d_model), ("embed_dim", d_model), ("num_heads", num_heads)):
        own = [getattr(m, name) for m in layer.modules() if isinstance(getattr(m, name, 0.0), int)]
        _expect(not own or given in own, f"the layer has {name} {own}, not {given}")


def _check_shapes(run: Callable[[Tensor], Tensor], inputs: list[Tensor], width: int) -> None:
    for x in inputs:
        given, expected = tuple(run(x).shape), (*x.shape[:-1], width)
        _expect(given == expected, f"{tuple(x.shape)} became {given}; expected {expected}")


def _check_dtype(out: Tensor, x: Tensor) -> None:
    _expect(out.dtype == x.dtype, f"the output is {out.dtype}; the input is {x.dtype}")
    _expect(out.device == x.device, f"the output is on {out.device}; the input on {x.device}")


def _check_finite(name: str, x: Tensor) -> None:
    count = int((~x.isfinite()).sum())
    _expect(count == 0, f"{count} elements of {name} are NaN or infinite")


def _equality_of(layer: nn.Module) -> Equality:
    """Equal up to the rounding of given's dtype, or to that of what a layer multiplies."""
    least = 0.0
    for module in layer.modules():
        if isinstance(module, (FP8LinearLayer, FP8Scales, FP8Attention)):
            least = _TOLERANCE_OF_FP8
        elif getattr(module, "optimization_level", None) == "aggressive":
            least = max(least, _TOLERANCES[torch.bfloat16])
    return partial(_check_equal, least=least)


def _check_equal(name: str, given: Tensor, expected: Tensor, least: float) -> None:
    error, largest = _distance(given, expected)
    allowed = max(least, _TOLERANCES.get(given.dtype, 0.0)) * largest
    _expect(error <= allowed, f"{name} is off by {error:.3g}; {allowed:.3g} is allowed")


def _distance(given: Tensor, expected: Tensor) -> tuple[float, float]:
    """(largest difference, largest element)."""
    _expect(given.shape == expected.shape, f"{tuple(given.shape)}, not {tuple(expected.shape)}")
    given, expected = given.detach().double(), expected.detach().double()
    return float((given - expected).abs().max()), float(expected.abs().max())


def _check_gradients(layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x = x.clone().requires_grad_()
    out = run(x)
    _expect(out.requires_grad, "the output has no gradient")
    named = {"the input": x, **dict(layer.named_parameters())}
    wanted = {name: p for name, p in named.items() if p.requires_grad}
    gradients = torch.autograd.grad(
        out, list(wanted.values()), _normal(tuple(out.shape), x.device, x.dtype), allow_unused=True
    )
    for name, gradient in zip(wanted, gradients, strict=True):
        _expect(gradient is not None, f"{name} gets no gradient")
        _check_finite(f"the gradient of {name}", gradient)
    _expect(bool(gradients[0].any()), "the gradient of the input is 0")


def _check_batch(run: Callable[[Tensor], Tensor], x: Tensor, equal: Equality) -> None:
    """Each entry alone gives what it gives beside others."""
    out = run(x)
    for i in range(len(x)):
        equal(f"entry {i} alone", run(x[i : i + 1]), out[i : i + 1])


def _check_attends(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The last token, which any mask lets see the others, changes with them."""
    other = torch.cat([x[:, :-1].flip(-1), x[:, -1:]], dim=1)
    error, _ = _distance(run(other)[:, -1], run(x)[:, -1])
    _expect(error > 0, "the last token's output does not depend on other tokens")


def _check_affine(run: Callable[[Tensor], Tensor], pair: Tensor, equal: Equality) -> None:
    x, y = pair.unbind()
    offset = run(torch.zeros_like(x))
    equal("f((x + y) / 2)", run((x + y) / 2), (run(x) + run(y)) / 2)
    equal("f(-x)", run(-x) - offset, offset - run(x))


def _check_values(
    run: Callable[[Tensor], Tensor], x: Tensor, expected: list[Reference], equal: Equality
) -> str | None:
    """Output and gradient equal those of one of the references."""
    if not expected:
        return "the layer's weights are not recognised"
    x = x.clone().requires_grad_()
    out = run(x)
    grad_out = _normal(tuple(out.shape), x.device, x.dtype)
    (grad,) = torch.autograd.grad(out, x, grad_out)
    failures = []
    for reference in expected:
        ideal = reference(x)
        (ideal_grad,) = torch.autograd.grad(ideal, x, grad_out.double())
        try:
            equal("the output", out, ideal)
            equal("the input's gradient", grad, ideal_grad)
            return None
        except AssertionError as error:
            failures.append(str(error))
    raise AssertionError("; or ".join(failures))


# --- references ----------------------------------------------------------------------------------


def _attention_reference(layer: nn.Module, num_heads: int) -> list[Reference]:
    """Full and causal attention of the layer's weights; nothing if they are not recognised."""
    projections = attention_weights.projections_of(layer)
    if projections is None or any(map(_has_rules, layer.modules())):
        return []
    return [
        lambda x, causal=causal: attention_weights.attend(x, projections, num_heads, causal)  # type: ignore[misc]
        for causal in (False, True)
    ]


def _has_rules(module: nn.Module) -> bool:
    """Whether a layer of flash_cute says that its scores are not those of plain attention."""
    score = getattr(module, "score", None)
    rules = score if isinstance(score, dict) else {}
    return (
        bool(getattr(module, "sparsity_ratio", 0))
        or tuple(rules.get("window_size", (-1, -1))) != (-1, -1)
        or bool(rules.get("softcap", 0))
        or rules.get("softmax_scale") is not None
    )


def _linear_reference(layer: nn.Module, in_features: int, out_features: int) -> list[Reference]:
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(weight, Tensor) or weight.shape != (out_features, in_features):
        return []
    bias = bias.detach().double() if isinstance(bias, Tensor) else None
    return [lambda x: linear(x.double(), weight.detach().double(), bias)]
