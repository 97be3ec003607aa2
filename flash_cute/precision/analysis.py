"""What a model could save, found on a sample without changing the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.precision.allocate import BudgetError
from flash_cute.precision.packed import as_matrix
from flash_cute.precision.plan import Plan, base_bytes, budget_for, packable, tabulate
from flash_cute.precision.sensitivity import calibrate, entropy
from flash_cute.precision.settings import AllocationStrategy, PrecisionConfig, PrecisionFormat

ALLOWED_ERROR = 0.01  # of the output, relative, root mean square
TARGETS = [percent / 100 for percent in range(95, 0, -5)]


def analyze_precision_opportunities(
    model: nn.Module,
    sample_input: Tensor,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """What ``create_ultra_precision_module`` would save if outputs may change by 1 %.

    ``sample_input`` is run through the model forward and backward, in eval mode, on ``device``, by
    default where the model is. The model, its gradients and torch's generators are left as they
    were.

    The dict has:
    - ``potential_savings``: bytes, against ``base_bytes``: those of the model in FP16.
      ``potential_savings_ratio`` is their fraction.
    - ``expected_error``: of the output, ``|change| / |output|``, to first order.
    - ``recommendations``: a dict for each weight that is to change, those that save most first:
      ``layer`` (its name), ``format`` (such as ``"int5"``; ``"int5+int6"`` for blocks of rows
      that differ), ``bits`` (a weight, scales included), ``saved_bytes``, ``expected_error``
      (the layer's part of the output's error) and ``entropy`` (bits).
    - ``config``: what has all of this, with ``calibration=sample_input``.

    Both are 0 and empty if nothing can be saved within 1 %. Raises TypeError if ``model`` is no
    nn.Module, ValueError if no output depends on a weight.

    >>> found = analyze_precision_opportunities(nn.Linear(64, 64).half(), torch.ones(1, 64).half())
    >>> found["recommendations"][0]["layer"]
    'weight'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if device is not None:
        model, sample_input = copy.deepcopy(model).to(device), sample_input.to(device)
    config = PrecisionConfig(allocation_strategy=AllocationStrategy.GRADIENT_WEIGHTED)
    weights = packable(model)
    found = calibrate(model, weights, sample_input)
    table = tabulate(model, weights, config)
    base = base_bytes(model, config.base_precision)
    others = base - budget_for(model, weights, replace(config, target_memory_reduction=0.0))
    plan: Plan | None = None
    for target in TARGETS:
        config = replace(config, target_memory_reduction=target)
        try:
            plan = table.plan(config, found.gradients, budget_for(model, weights, config))
        except BudgetError:
            continue
        if _relative(sum(plan.error.values()), found.power) <= ALLOWED_ERROR:
            break
        plan = None
    if plan is None:
        plan, config = Plan({}, {}), replace(config, target_memory_reduction=0.0)
    chosen = {name: weights[name] for name in plan.blocks}
    rows = _recommendations(chosen, plan, found.power, config.base_precision)
    held = others + sum(_nbytes(weight, plan, name) for name, weight in chosen.items())
    saved = base - held if chosen else 0
    return {
        "potential_savings": saved,
        "potential_savings_ratio": saved / max(base, 1),
        "expected_error": _relative(sum(plan.error.values()), found.power),
        "recommendations": rows,
        "base_bytes": base,
        "config": config,
    }


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
        if all(form.dtype is not None and form.bits >= base.bits for form in formats):
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
