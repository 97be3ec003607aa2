"""Trains a small GPT and holds it in ever fewer bytes: loss over bytes, by strategy.

Uniform bits are the rival: the same format for all layers. A model whose layers are alike gains
little over it. With --one-bit the MLPs of every second block are trained with one-bit weights, and
layers differ. Writes loss_over_bytes.png and results.json to --out.

    PYTHONPATH=. python examples/compress_model.py
    PYTHONPATH=. python examples/compress_model.py --one-bit
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from gpt import GPT, flash_cute_attention
from matplotlib.figure import Figure
from progress import Progress
from torch import Tensor, nn
from torch.nn.utils import parametrize
from train_gpt import CPU, HELD_OUT_SHARE, Settings, batches, evaluate, load_text, train

from flash_cute.precision import AllocationStrategy, PrecisionConfig, create_ultra_precision_module

TARGETS = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8)


class OneBit(nn.Module):
    """A weight's signs times the mean size of its row; gradients pass as if nothing was done."""

    def forward(self, weight: Tensor) -> Tensor:
        rounded = weight.sign() * weight.abs().mean(1, keepdim=True)
        return weight + (rounded - weight).detach()


@dataclass(frozen=True)
class Point:
    """A module's bytes, and its loss on text that it never saw, in nats a byte."""

    strategy: str
    target: float
    stored_bytes: int
    savings: float
    loss: float


def trained(settings: Settings, text: Tensor, one_bit: bool) -> GPT:
    """A trained GPT in eval mode."""
    torch.manual_seed(settings.seed)
    model = settings.model(flash_cute_attention).to(text.device)
    blocks = list(model.blocks)[::2] if one_bit else []
    layers = [m for b in blocks for m in b.mlp if isinstance(m, nn.Linear)]  # type: ignore
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", OneBit())
    train(model, text, settings, Progress("training step", settings.steps))
    for layer in layers:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return model.eval()


def measure(
    model: GPT, held_out: Tensor, samples: Tensor, settings: Settings, targets: Sequence[float]
) -> list[Point]:
    """Each strategy at each target. Targets that a strategy cannot meet are left out."""
    points = []
    progress = Progress("compressed model", len(AllocationStrategy) * len(targets))
    for strategy in AllocationStrategy:
        for target in targets:
            progress()
            config = PrecisionConfig(allocation_strategy=strategy, target_memory_reduction=target)
            try:
                small = create_ultra_precision_module(model, config, calibration=samples)
            except ValueError as refusal:
                print(f"{strategy.value}: {refusal}")
                continue
            stats = small.get_precision_stats()
            loss = evaluate(small, held_out, settings)
            savings = stats.memory_savings_ratio
            points.append(Point(strategy.value, target, stats.stored_bytes, savings, loss))
    return points


def plot(points: list[Point], whole: float, path: Path) -> None:
    """Draws what compression adds to the loss, over bytes."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for strategy in AllocationStrategy:
        own = [point for point in points if point.strategy == strategy.value]
        style = "k--" if strategy is AllocationStrategy.UNIFORM else "-"
        added = [max(point.loss - whole, 1e-6) for point in own]
        axes.plot(
            [p.stored_bytes / 2**10 for p in own], added, style, marker="o", label=strategy.value
        )
    axes.set(xlabel="KiB", ylabel="loss added, nats per byte", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="train on this file")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/compress"), help="default: %(default)s"
    )
    parser.add_argument("--one-bit", action="store_true", help="train some layers with one bit")
    parser.add_argument(
        "--targets", type=float, nargs="+", default=TARGETS, help="default: %(default)s"
    )
    for name in ("steps", "layers", "width", "heads", "context", "batch"):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(CPU, name), help="default: %(default)s"
        )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    names = ("steps", "layers", "width", "heads", "context", "batch")
    settings = replace(CPU, **{name: getattr(options, name) for name in names})
    text = load_text(options.text).to(options.device)
    trained_on, held_out = text.tensor_split([round(len(text) * (1 - HELD_OUT_SHARE))])
    model = trained(settings, trained_on, options.one_bit)
    samples = next(batches(trained_on, 1, replace(settings, seed=1)))[0]
    whole = evaluate(model, held_out, settings)
    points = measure(model, held_out, samples, settings, options.targets)

    options.out.mkdir(parents=True, exist_ok=True)
    plot(points, whole, options.out / "loss_over_bytes.png")
    results = {"loss": whole, "points": [asdict(point) for point in points]}
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    print(f"loss of the whole model {whole:.4f} nats per byte")
    for point in points:
        kib, added = point.stored_bytes / 2**10, point.loss - whole
        print(f"{point.strategy:18} {kib:8.1f} KiB  saved {point.savings:.3f}  added {added:+.4f}")
    print(f"Written to {options.out}: loss_over_bytes.png, results.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
