"""Validates attention layers and linear layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flash_cute import _torch_internals as internals
from flash_cute.core.model_copies import copied
from flash_cute.hardware.devices import checked_device
from flash_cute.utils import layer_checks as generic
from flash_cute.utils.attention_weights import attend, projections_of
from flash_cute.utils.calls import call, device_and_dtype
from flash_cute.utils.layer_checks import Run, expect, normal
from flash_cute.utils.layer_values import (
    LAYOUTS,
    Reference,
    Trial,
    Weights,
    check_values,
    laid_out,
    trials_of,
)
from flash_cute.utils.tolerance import Tolerance
from flash_cute.utils.whole_fp32 import whole_fp32

_BATCH, _SEQLEN, _OTHER_SEQLENS = 3, 17, (1, 40, 130, 515)
_ROWS = 5
_PARTS = ("query ", "key ", "value ", "output ")
_LINEAR = {"weight", "bias"}

Check = Callable[[], str | None]
"""Raises AssertionError if it fails; returns why it was skipped, or None."""


class ComponentValidator:
    """Runs layers, and checks their outputs: sizes, finite values, gradients, values.

    It validates a copy of a layer in evaluation mode, so that the layer's parameters, gradients and
    mode, and torch's random state, do not change. Autocast is off, and fp32 products are in full
    precision, whatever ``torch.set_float32_matmul_precision``.

    Args:
        device: of the copies; None is the device of each layer's parameters.

    Raises:
        ValueError: the device is not available.

    Example::

        import torch
        from flash_cute.utils.validation_framework import ComponentValidator
        from torch import nn

        validator = ComponentValidator(device=torch.device("cpu"))
        results = validator.validate_linear_component(nn.Linear(8, 4), 8, 4)
        assert results["passed"], results["failures"]
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = None if device is None else checked_device(device)

    @torch.inference_mode(False)
    def validate_attention_component(
        self, attention_layer: nn.Module, d_model: int, num_heads: int
    ) -> dict[str, Any]:
        """Check a layer of self-attention, (batch, seqlen, d_model) to the same shape.

        The checks: ``sizes`` (d_model is a multiple of num_heads, and the layer has no others),
        ``shape`` and ``dtype`` of the output, other ``lengths``, up to 515 tokens, ``finite``
        values, ``repeatable`` outputs, ``modes`` (the same without gradients; nothing is written
        to), ``layouts`` of the input, ``gradients`` (of the input and every parameter: they exist
        and are finite, the input's is not 0), ``batch`` (entries do not affect each other),
        ``attends`` (tokens affect each other), and ``values``: outputs and all gradients equal
        softmax attention, full or causal, with the layer's own weights in fp64. They are compared
        for up to 2,100 tokens and 70 sequences, in evaluation and without dropout in training, in
        those of fp64, fp32, bf16 and fp16 that the layer supports. Weights are recognised if they
        are the layer's only parameters, named as in nn.MultiheadAttention, or ``q_proj, k_proj,
        v_proj, out_proj``; there may be fewer kv heads. Values of other layers are not compared,
        nor of layers with a ``sparsity_ratio`` above 0, a window, a softcap or a ``softmax_scale``:
        their gradients are compared with finite differences, except with a ``sparsity_ratio``.
        Layers that round to fp8 may be off by 0.4 of the largest element.

        Args:
            attention_layer: takes one tensor; or nn.MultiheadAttention. Outputs may be tuples.
            d_model: width of input and output.
            num_heads: the layer's heads.

        Returns:
            A dict: ``passed``, bool; ``checks``, a dict of ``{"passed": bool or None, "detail":
            str}`` by name, where None is a check that was left out; ``failures``, a list of
            str; ``component``, ``device`` and ``dtype``, str.

        Raises:
            TypeError, ValueError: the layer is not an nn.Module, or a size not an int >= 1.
        """
        _check_counts(d_model=d_model, num_heads=num_heads)
        layer, device, dtype = self._copy(attention_layer)
        x = normal((_BATCH, _SEQLEN, d_model), device, dtype)
        others = [normal((2, n, d_model), device, dtype) for n in _OTHER_SEQLENS]
        sizes = ((2, 1), (1, 40), (2, 130), (70, 3), (1, 515))
        trials = [Trial((*size, d_model)) for size in sizes]
        trials.append(Trial((1, 2100, d_model), gradients=False))
        run, tolerance = _run_of(layer), Tolerance.of(layer)
        equal, rounds = tolerance.equal, tolerance.least > 0
        checks: dict[str, Check] = {
            "sizes": lambda: _check_sizes(layer, d_model, num_heads),
            "lengths": lambda: generic.check_lengths(run, others, d_model, equal),
            "attends": lambda: generic.check_attends(run, x),
            "batch": lambda: _check_batches(
                run, x, normal((33, 3, d_model), device, dtype), tolerance
            ),
        }
        references = _attention_references(layer, num_heads)
        trials = trials_of(tuple(x.shape), trials, dtype, rounds)
        return _results("attention", layer, x, d_model, checks, references, trials)

    @torch.inference_mode(False)
    def validate_linear_component(
        self, linear_layer: nn.Module, in_features: int, out_features: int
    ) -> dict[str, Any]:
        """Check a linear layer, (..., in_features) to (..., out_features).

        The checks: ``shape`` and ``dtype`` of the output, inputs of other ``lengths`` and numbers
        of dimensions, ``finite`` values, ``repeatable`` outputs, ``modes``, ``layouts``,
        ``gradients`` (of the input and of every parameter), ``batch`` (each of 300 rows has the
        result that it has among four), and ``values``: outputs and all gradients equal ``x @
        weight.T + bias`` in fp64, up to 4,100 rows (gradients: 630), if ``weight`` (out_features,
        in_features) and ``bias`` are the layer's only parameters; gradients of other layers are
        compared with finite differences. All must be ``affine`` in x. Layers that round to fp8 may
        be off by 0.4 of the largest element, those that round to bf16 by 0.06; with fewer than 64
        elements, whose sums may cancel, of the largest one for inputs with other signs.

        Returns:
            A dict as :meth:`validate_attention_component`'s.

        Raises:
            TypeError, ValueError: as there.
        """
        _check_counts(in_features=in_features, out_features=out_features)
        layer, device, dtype = self._copy(linear_layer)
        shapes = [(1, in_features), (2, 3, in_features), (2, 1, 3, in_features), (300, in_features)]
        others = [normal(shape, device, dtype) for shape in shapes]
        run, tolerance = _run_of(layer), Tolerance.of(layer)
        equal, rounds = tolerance.equal, tolerance.least > 0
        checks: dict[str, Check] = {
            "lengths": lambda: generic.check_lengths(run, others, out_features, equal),
            "affine": lambda: generic.check_affine(
                run, normal((2, _ROWS, in_features), device, dtype), tolerance
            ),
            "batch": lambda: _check_batches(run, x, others[-1], tolerance),
        }
        x = normal((_ROWS, in_features), device, dtype)
        references = _linear_references(layer, in_features, out_features)
        trials = [Trial(shape) for shape in (*shapes, (9, 70, in_features))]
        trials.append(Trial((4100, in_features), gradients=False))
        trials = trials_of(tuple(x.shape), trials, dtype, rounds)
        return _results("linear", layer, x, out_features, checks, references, trials)

    def _copy(self, layer: nn.Module) -> tuple[nn.Module, torch.device, torch.dtype]:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"the layer is {type(layer).__name__}; expected an nn.Module")
        made = copied(layer).eval()
        internals.copy_gradient_hooks(layer, made)
        made.zero_grad()
        if self.device is not None:
            made.to(self.device)
        return made, *device_and_dtype(made)


def _check_counts(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} is {size!r}; expected an int")
        if size < 1:
            raise ValueError(f"{name} is {size}; expected at least 1")


def _run_of(layer: nn.Module) -> Run:
    """Calls the layer on (batch, seqlen, d_model), or on rows."""

    def run(x: Tensor) -> Tensor:
        if getattr(layer, "batch_first", True):
            return call(layer, x)
        return call(layer, x.transpose(0, 1)).transpose(0, 1)

    return run


def _results(
    component: str,
    layer: nn.Module,
    x: Tensor,
    width: int,
    more: dict[str, Check],
    references: list[Reference],
    trials: list[Trial],
) -> dict[str, Any]:
    """Runs the checks that all components share, and ``more``."""
    run, tolerance = _run_of(layer), Tolerance.of(layer)
    equal = tolerance.equal
    views = [laid_out(x, layout) for layout in LAYOUTS]
    checks: dict[str, Check] = {
        "shape": lambda: generic.check_shapes(run, [x], width),
        "dtype": lambda: generic.check_dtype(run(x), x),
        "finite": lambda: generic.check_finite("the output", run(x)),
        "repeatable": lambda: equal("a second output", run(x), run(x)),
        "modes": lambda: generic.check_modes(layer, run, x, equal),
        "layouts": lambda: generic.check_layouts(run, views, equal),
        "gradients": lambda: _check_gradients(layer, run, x, bool(references)),
        "values": lambda: check_values(layer, _run_of, trials, references, tolerance),
        **more,
    }
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), whole_fp32(x.device):
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
    except Exception as error:  # any error of a broken layer fails the check
        return {"passed": False, "detail": f"{type(error).__name__}: {error}"}
    if left_out is not None:
        return {"passed": None, "detail": left_out}
    return {"passed": True, "detail": "ok"}


def _check_sizes(layer: nn.Module, d_model: int, num_heads: int) -> None:
    expect(d_model % num_heads == 0, f"{num_heads} heads do not divide {d_model}")
    for name, given in (("d_model", d_model), ("embed_dim", d_model), ("num_heads", num_heads)):
        own = [getattr(m, name) for m in layer.modules() if isinstance(getattr(m, name, 0.0), int)]
        expect(not own or given in own, f"the layer has {name} {own}, not {given}")


def _check_batches(run: Run, few: Tensor, many: Tensor, tolerance: Tolerance) -> None:
    generic.check_batch(run, few, tolerance)
    generic.check_batch(run, many, tolerance, chunk=4)


def _check_gradients(layer: nn.Module, run: Run, x: Tensor, compared: bool) -> None:
    """Gradients exist and are finite; without a reference they equal finite differences, unless the
    layer rounds, or chooses keys by their scores, which is not smooth."""
    generic.check_gradients(layer, run, x)
    chooses = any(bool(getattr(m, "sparsity_ratio", 0)) for m in layer.modules())
    if not compared and not chooses and Tolerance.of(layer).least == 0:
        generic.check_differences(layer, _run_of, x)


def _attention_references(layer: nn.Module, num_heads: int) -> list[Reference]:
    """Full and causal attention with the layer's weights; empty if they are not recognised."""
    weights = dict(layer.named_parameters())
    if projections_of(weights) is None or any(map(_has_rules, layer.modules())):
        return []
    return [
        Reference(partial(_attention, num_heads, causal), _parts_of_attention)
        for causal in (False, True)
    ]


def _attention(num_heads: int, causal: bool, x: Tensor, weights: Weights) -> Tensor:
    projections = projections_of(weights)
    assert projections is not None
    return attend(x, projections, num_heads, causal)


def _parts_of_attention(named: Weights) -> dict[str, tuple[Tensor, Tensor | None]]:
    projections = projections_of(named)
    if projections is None:  # some weights have no gradients
        return {f"{name} ": (x, None) for name, x in named.items()}
    return dict(zip(_PARTS, projections, strict=True))


def _has_rules(module: nn.Module) -> bool:
    """Whether a layer of flash_cute has options with which it is not plain attention."""
    score = getattr(module, "score", None)
    rules = score if isinstance(score, dict) else {}
    return (
        bool(getattr(module, "sparsity_ratio", 0))
        or tuple(rules.get("window_size", (-1, -1))) != (-1, -1)
        or bool(rules.get("softcap", 0))
        or rules.get("softmax_scale") is not None
    )


def _linear_references(layer: nn.Module, in_features: int, out_features: int) -> list[Reference]:
    """The reference of a layer whose only parameters are ``weight`` and maybe ``bias``."""
    named = dict(layer.named_parameters())
    weight = named.get("weight")
    if weight is None or weight.shape != (out_features, in_features) or named.keys() - _LINEAR:
        return []
    return [
        Reference(
            lambda x, weights: linear(x, weights["weight"], weights.get("bias")),
            lambda named: {f"{name} ": (x, None) for name, x in named.items()},
        )
    ]
