r"""Trains a small GPT twice, with fp8 linear layers and with bf16 ones, and plots both losses.

Both trainings start from the same weights and see the same batches of text, Python's own source
files. Writes fp8_losses.json and fp8_losses.png to --out. The exit status is 1 if the means of the
last losses differ by more than --tolerance.

    PYTHONPATH=. python examples/train_fp8.py
    PYTHONPATH=. python examples/train_fp8.py --scaling delayed --backward-format e4m3
"""

from __future__ import annotations

import argparse
import copy
import json
import sysconfig
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from gpt import GPT, VOCABULARY, sdpa_attention
from progress import Progress
from torch import Tensor, nn

from flash_cute.precision import FP8Config, FP8Format, FP8TrainingEngine

CORPUS_BYTES = 2_000_000
LAST = 20  # steps whose losses are compared


def load_text() -> Tensor:
    """The bytes of the standard library's sources, uint8."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)[:CORPUS_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch_of(text: Tensor, step: int, o: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Bytes (batch, context) and the next ones, the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(len(text) - o.context, (o.batch, 1), generator=generator)
    window = text[begins + torch.arange(o.context + 1)].long().to(o.device)
    return window[:, :-1], window[:, 1:]


def bf16_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One step under autocast; the loss."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).float().view(-1, VOCABULARY), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def fp8_step(
    trainer: FP8TrainingEngine, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Tensor:
    """The same with fp8 products; what is no product is bf16 here too."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss = trainer.training_step(x, y)
    trainer.optimizer_step(optimizer)
    return loss


def train(
    trained: nn.Module | FP8TrainingEngine, text: Tensor, o: argparse.Namespace
) -> list[float]:
    """Trains a model, or a trainer's; each step's loss in nats per byte."""
    model = trained if isinstance(trained, nn.Module) else trained.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.learning_rate)
    losses = []
    name = "bf16 step" if isinstance(trained, nn.Module) else "fp8 step"
    progress = Progress(name, o.steps)
    for step in range(o.steps):
        x, y = batch_of(text, step, o)
        if isinstance(trained, nn.Module):
            losses.append(bf16_step(trained, optimizer, x, y).item())
        else:
            losses.append(fp8_step(trained, optimizer, x, y).item())
        progress(losses[-1])
    return losses


def plot(losses: dict[str, list[float]], path: Path) -> None:
    """Draws the losses over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    styles = (("tab:orange", 4), ("black", 1))  # the second line runs inside the first
    for (name, values), (color, width) in zip(losses.items(), styles, strict=True):
        axes.plot(values, label=name, color=color, linewidth=width)
    axes.set(title="The same training, two precisions", xlabel="step", ylabel="nats per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where usable",
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=64, help="bytes")
    parser.add_argument("--batch", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: %(default)s")
    parser.add_argument("--tolerance", type=float, default=0.1, help="nats per byte")
    formats = [fmt.value for fmt in FP8Format]
    parser.add_argument(
        "--forward-format", choices=formats, default="e4m3", help="default: %(default)s"
    )
    parser.add_argument(
        "--backward-format", choices=formats, default="e5m2", help="default: %(default)s"
    )
    parser.add_argument(
        "--scaling", choices=("dynamic", "delayed"), default="dynamic", help="default: %(default)s"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs both trainings; returns the exit status."""
    o = parse(argv)
    config = FP8Config(FP8Format(o.forward_format), FP8Format(o.backward_format), o.scaling)
    torch.manual_seed(0)
    model = GPT(o.layers, o.width, o.heads, o.context, sdpa_attention).to(o.device)
    trainer = FP8TrainingEngine(copy.deepcopy(model), config)
    text = load_text()
    losses = {"fp8": train(trainer, text, o), "bf16": train(model, text, o)}
    last = {name: fmean(values[-LAST:]) for name, values in losses.items()}
    agree = abs(last["fp8"] - last["bf16"]) <= o.tolerance  # False for NaN
    statistics = trainer.get_training_statistics()
    print(f"the last {LAST} steps: fp8 {last['fp8']:.4f}, bf16 {last['bf16']:.4f} nats per byte")
    print(", ".join(f"{name} {value}" for name, value in statistics.items()))
    o.out.mkdir(parents=True, exist_ok=True)
    results = {"losses": losses, "last": last, "agree": agree, "statistics": statistics}
    (o.out / "fp8_losses.json").write_text(json.dumps(results, indent=1))
    plot(losses, o.out / "fp8_losses.png")
    print(f"Written to {o.out}: fp8_losses.json, fp8_losses.png")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
