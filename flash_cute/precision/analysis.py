"""Finds the bytes that a model could save, on a sample, without changing the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.core.model_copies import copied
from flash_cute.hardware.devices import checked_device
from flash_cute.precision.adaptive import packed_copy
from flash_cute.precision.allocate import BudgetError
from flash_cute.precision.packed import as_matrix
from flash_cute.precision.plan import Plan, base_bytes, budget_for, packable, tabulate
from flash_cute.precision.sensitivity import calibrate, entropy, outputs_of, state_preserved
from flash_cute.precision.settings import AllocationStrategy, PrecisionConfig, PrecisionFormat

ALLOWED_ERROR = 0.01  # of the output, relative, root mean square
TARGETS = [percent / 100 for percent in range(95, 0, -5)]


def analyze_precision_opportunities(
    model: nn.Module,
    sample_input: Tensor,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """What ``create_ultra_precision_module`` would save if outputs may change by 1 %.

    ``sample_input`` is run through the model forward and backward, and through packed copies of it,
    in eval mode, on ``device``, by default the model's. The model, its gradients and torch's
    generators do not change.

    The dict has:

    - ``potential_savings``: bytes, against ``base_bytes``: those of the model in FP16.
      ``potential_savings_ratio`` is their fraction.
    - ``measured_error``: of the output on the sample, ``|change| / |output|``.
    - ``recommendations``: a dict for each weight to pack, those that save most first:
      ``layer`` (its name), ``format`` (such as ``"int5"``; ``"int5+int6"`` for blocks of rows
      that differ), ``bits`` (a weight, scales included), ``saved_bytes``, ``expected_error``
      (the layer's part of the output's error, to first order) and ``entropy`` (bits).
    - ``config``: the config with these savings, if ``calibration=sample_input``.

    Savings are 0 and recommendations empty if nothing can be saved within 1 %. Raises TypeError if
    ``model`` is not an nn.Module or ``sample_input`` not a tensor, ValueError if no output depends
    on a weight, squares of outputs or gradients are not finite, or the device is not available.

    Example::

        import torch
        from flash_cute.precision import analyze_precision_opportunities

        model = torch.nn.Linear(64, 64).half()
        found = analyze_precision_opportunities(model, torch.ones(1, 64).half())
        best, *_ = found["recommendations"]
        assert best["layer"] == "weight"
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if not isinstance(sample_input, Tensor):
        raise TypeError(f"sample_input must be a tensor, not {type(sample_input).__name__}")
    if device is not None:
        checked_device(device)
        model, sample_input = copied(model).to(device), sample_input.to(device)
    config, plan, power, error = _smallest(model, sample_input)
    weights = {name: weight for name, weight in packable(model).items() if name in plan.blocks}
    base = base_bytes(model, config.base_precision)
    spare = budget_for(model, weights, config) - sum(
        _nbytes(weight, plan, name) for name, weight in weights.items()
    )
    saved = base - math.floor((1 - config.target_memory_reduction) * base + 1e-6) + spare
    return {
        "potential_savings": saved if weights else 0,
        "potential_savings_ratio": saved / base if weights else 0.0,
        "measured_error": error,
        "recommendations": _recommendations(weights, plan, power, config.base_precision),
        "base_bytes": base,
        "config": config,
    }


def _smallest(model: nn.Module, sample: Tensor) -> tuple[PrecisionConfig, Plan, float, float]:
    """(config, plan, sum of squares of the outputs, error) of the highest target whose error is
    allowed. Targets whose estimated error is far too large are not run."""
    config = PrecisionConfig(allocation_strategy=AllocationStrategy.GRADIENT_WEIGHTED)
    weights = packable(model)
    if not weights:
        return replace(config, target_memory_reduction=0.0), Plan({}, {}), 0.0, 0.0
    found = calibrate(model, weights, sample)
    table = tabulate(model, weights, config)
    for target in TARGETS:
        config = replace(config, target_memory_reduction=target)
        try:
            plan = table.plan(config, found.gradients, budget_for(model, weights, config))
        except BudgetError:
            continue
        if _relative(sum(plan.error.values()), found.power) > 2 * ALLOWED_ERROR:
            continue
        error = _measured_error(model, packed_copy(model, weights, plan).model, sample)
        if error <= ALLOWED_ERROR:
            return config, plan, found.power, error
    return replace(config, target_memory_reduction=0.0), Plan({}, {}), found.power, 0.0


def _measured_error(model: nn.Module, small: nn.Module, sample: Tensor) -> float:
    with state_preserved(model), state_preserved(small), torch.no_grad():
        pairs = list(zip(outputs_of(small(sample)), outputs_of(model(sample)), strict=True))
    change = sum((a.float() - b.float()).square().sum().item() for a, b in pairs)
    return _relative(change, sum(b.float().square().sum().item() for _, b in pairs))


def _relative(error: float, power: float) -> float:
    return math.sqrt(error / power) if power > 0 else 0.0


def _nbytes(weight: Tensor, plan: Plan, name: str) -> int:
    cols = as_matrix(weight).shape[1]
    return sum(layout.nbytes(rows, cols) for rows, layout in plan.blocks[name])


def _recommendations(
    weights: Mapping[str, Tensor], plan: Plan, power: float, base: PrecisionFormat
) -> list[dict[str, Any]]:
    rows = []
    for name, weight in weights.items():
        nbytes = _nbytes(weight, plan, name)
        formats = {layout.format: None for _, layout in plan.blocks[name]}
        if all(form.bits >= base.bits for form in formats):
            continue
        rows.append(
            {
                "layer": name,
                "format": "+".join(form.value for form in formats),
                "bits": 8 * nbytes / weight.numel(),
                "saved_bytes": weight.numel() * base.bits // 8 - nbytes,
                "expected_error": _relative(plan.error[name], power),
                "entropy": entropy(weight),
            }
        )
    return sorted(rows, key=lambda row: -row["saved_bytes"])
