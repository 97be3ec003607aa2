"""How much the rounding of a layer matters: by entropy, and by a run over samples.

Every strategy estimates the error of the whole model as a sum over layers of ``weight * |dW|^2``:
errors of layers add up as long as they are small and independent. Strategies differ in the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.precision.packed import as_matrix
from flash_cute.precision.settings import AllocationStrategy, PrecisionConfig

Samples = Tensor | Sequence[Any]
NOISE = 0.05  # of a weight's root mean square, to measure sensitivity with
PROBES = 4  # random projections of the output, for gradients
SAMPLED = 2**20  # weights that an entropy is computed from


def entropy(weight: Tensor) -> float:
    """Shannon's entropy of a weight's values, in bits: of 256 bins between -1 and 1, after each
    row is divided by its largest value. One-bit weights have at most 1, three values 1.58, a
    Gaussian about 7."""
    rows = as_matrix(weight.detach())
    rows = rows[:: max(1, weight.numel() // SAMPLED)].float()
    peaks = rows.abs().amax(1, keepdim=True)
    counts = torch.histc(rows / torch.where(peaks == 0, 1.0, peaks), 256, -1, 1)
    shares = counts[counts > 0] / counts.sum()
    return max(0.0, -(shares * shares.log2()).sum().item())


@dataclass
class Calibration:
    """Statistics of samples about a model's weights, by name.

    - ``moments``: mean squares of each input channel, of Linear and MultiheadAttention layers.
    - ``gradients``: mean over a weight of its squared derivatives, of random projections of the
      output: ``gradients * |dW|^2`` is the error of all outputs to first order.
    - ``power``: sum of squares of the outputs.
    """

    moments: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    power: float = 0.0


def batches(samples: Samples) -> list[tuple[Any, ...]]:
    """Arguments of each call of the model. A tensor is the argument of one call; each entry of a
    sequence is a call: a tensor, or a tuple of arguments."""
    calls = [samples] if isinstance(samples, Tensor) else list(samples)
    if not calls:
        raise ValueError("calibration must have at least one batch")
    found = [call if isinstance(call, tuple) else (call,) for call in calls]
    for i, call in enumerate(found):
        for x in call:
            if isinstance(x, Tensor) and x.numel() == 0:
                raise ValueError(
                    f"batch {i} of the samples has shape {tuple(x.shape)}, without a value; give "
                    "samples that have some: nothing can be measured without"
                )
    return found


def outputs_of(result: Any) -> list[Tensor]:
    """Floating tensors in a model's result."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [tensor for entry in result for tensor in outputs_of(entry)]
    return []


@contextmanager
def state_preserved(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; after it, its modes and torch's generators are as they
    were."""
    modes = {module: module.training for module in model.modules()}
    devices = {t.device.index for t in model.parameters() if t.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            model.eval()
            yield
        finally:
            for module, training in modes.items():
                module.training = training


def calibrate(model: nn.Module, weights: Mapping[str, Tensor], samples: Samples) -> Calibration:
    """Runs the samples, forward and backward. The model does not change: no hooks, no grads."""
    found = Calibration()
    with state_preserved(model), _recorded_inputs(model, weights, found.moments):
        generator = torch.Generator().manual_seed(0)
        for arguments in batches(samples):
            _add_gradients(model, weights, arguments, generator, found)
    sizes = {"the output": found.power, **found.gradients}
    sizes |= {f"the input of {name}": m.sum().item() for name, m in found.moments.items()}
    _check_finite(sizes)
    return found


def _check_finite(sizes: Mapping[str, float]) -> None:
    """Refuses samples that overflow, since comparisons with NaN are silently False."""
    if bad := [name for name, size in sizes.items() if not math.isfinite(size)]:
        raise ValueError(
            f"calibration: squares of {bad[0]} are not finite; give samples whose values are, and "
            "a model that does not overflow"
        )


def _add_gradients(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    arguments: tuple[Any, ...],
    generator: torch.Generator,
    found: Calibration,
) -> None:
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    with torch.enable_grad():
        result = torch.func.functional_call(model, leaves, arguments)
        outputs = [out.float() for out in outputs_of(result) if out.requires_grad]
        if not outputs:
            raise ValueError("calibration: the model's output has no gradient of any weight")
        found.power += sum(out.detach().square().sum().item() for out in outputs)
        for _ in range(PROBES):
            noises = [torch.randn(out.shape, generator=generator).to(out.device) for out in outputs]
            loss = torch.stack([(o * n).sum() for o, n in zip(outputs, noises, strict=True)]).sum()
            grads = torch.autograd.grad(
                loss, list(leaves.values()), retain_graph=True, allow_unused=True
            )
            for name, grad in zip(leaves, grads, strict=True):
                square = 0.0 if grad is None else grad.float().square().mean().item()
                found.gradients[name] = found.gradients.get(name, 0.0) + square / PROBES


@contextmanager
def _recorded_inputs(
    model: nn.Module, weights: Mapping[str, Tensor], moments: dict[str, Tensor]
) -> Iterator[None]:
    """Inside, squares of layers' inputs are added to ``moments``."""
    names = {id(weight): name for name, weight in weights.items()}
    handles = []
    for module in model.modules():
        own = [names[id(w)] for w in module.parameters(recurse=False) if id(w) in names]
        if isinstance(module, (nn.Linear, nn.MultiheadAttention)) and len(own) == 1:
            cols = as_matrix(weights[own[0]]).shape[1]
            record = _recorder(own[0], cols, moments)
            handles.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _recorder(
    name: str, cols: int, moments: dict[str, Tensor]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """A hook that records the first argument, positional or by name."""

    def record(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = arguments[0] if arguments else named.get("input", named.get("query"))
        if isinstance(x, Tensor) and x.dim() > 0 and x.shape[-1] == cols:
            squares = x.detach().float().reshape(-1, cols).square().sum(0)
            moments[name] = moments[name] + squares if name in moments else squares

    return record


def error_per_noise(
    model: nn.Module, weights: Mapping[str, Tensor], samples: Samples
) -> dict[str, float]:
    """Squared error of the outputs per squared error of each weight: one layer at a time gets noise
    of 5 % of its weights, as rounding to 5 bits would give it, and the samples are run."""
    found: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    with state_preserved(model), torch.no_grad():
        calls = batches(samples)
        expected_outputs = [outputs_of(model(*arguments)) for arguments in calls]
        for name, weight in weights.items():
            noise = torch.randn(weight.shape, generator=generator).to(weight.device)
            noise *= NOISE * weight.float().square().mean().sqrt()
            other = (weight.float() + noise).to(weight.dtype)
            error = 0.0
            for arguments, expected in zip(calls, expected_outputs, strict=True):
                got = outputs_of(torch.func.functional_call(model, {name: other}, arguments))
                pairs = zip(got, expected, strict=True)
                error += sum((a.float() - b.float()).square().sum().item() for a, b in pairs)
            found[name] = error / max(noise.square().sum().item(), 1e-30)
    _check_finite(found)
    return found


def error_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    config: PrecisionConfig,
    samples: Samples | None,
) -> dict[str, float]:
    """The factor of each weight's squared error, by the config's strategy."""
    strategy = config.allocation_strategy
    relative = {n: 1 / max(w.float().square().sum().item(), 1e-30) for n, w in weights.items()}
    if strategy is AllocationStrategy.UNIFORM or (
        strategy is AllocationStrategy.ENTROPY_BASED and samples is None
    ):
        return relative
    if samples is None:
        samples = generated_samples(model)
    if strategy is AllocationStrategy.SENSITIVITY:
        return error_per_noise(model, weights, samples)
    found = calibrate(model, weights, samples)
    by_input = {
        n: _output_sensitivity(w, found.moments.get(n), relative[n]) for n, w in weights.items()
    }
    if strategy is AllocationStrategy.ACTIVATION_AWARE:
        return by_input
    if strategy is AllocationStrategy.GRADIENT_WEIGHTED:
        return found.gradients
    total = max(1.0, config.gradient_weight + config.activation_weight)
    g, a = config.gradient_weight / total, config.activation_weight / total
    parts = [
        (_normalised(relative), 1 - g - a),
        (_normalised(by_input), a),
        (_normalised(found.gradients), g),
    ]
    return {n: math.prod(part[n] ** power for part, power in parts) for n in weights}


def _output_sensitivity(weight: Tensor, moments: Tensor | None, relative: float) -> float:
    """The relative error of a layer's output per squared error of its weight, if that is the same
    in all columns; without moments the relative error of the weight itself."""
    if moments is None:
        return relative
    power = (as_matrix(weight).float().square() @ moments).sum().item()
    return moments.mean().item() / max(power, 1e-30)


def _normalised(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores divided by their geometric mean."""
    logs = {name: math.log(max(score, 1e-30)) for name, score in scores.items()}
    mean = sum(logs.values()) / max(len(logs), 1)
    return {name: math.exp(value - mean) for name, value in logs.items()}


def generated_samples(model: nn.Module) -> Tensor:
    """Random inputs for the model's first layer, for strategies that need samples and got none:
    (16, in_features) for Linear, (2, 16) token ids for Embedding, (16, 2, d_model) for
    TransformerEncoderLayer and MultiheadAttention. Raises ValueError for other first layers."""
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            return noise(16, module.in_features)
        if isinstance(module, nn.Embedding):
            ids = torch.randint(module.num_embeddings, (2, 16), generator=generator)
            return ids.to(weight.device)
        if isinstance(module, nn.TransformerEncoderLayer):
            return noise(16, 2, module.self_attn.embed_dim)
        if next(module.children(), None) is None and list(module.parameters()):
            break
    raise ValueError(
        "this strategy needs samples, and none can be generated for the first layer of "
        f"{type(model).__name__}: pass calibration="
    )
