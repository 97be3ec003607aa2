r"""Trains a GPT twice, with flash_cute's attention and with PyTorch's, and compares the losses.

Both trainings start from the same weights and see the same batches, so the losses must agree.
Writes losses.png and results.json to --out; the exit status is 1 if the losses part.

    PYTHONPATH=. python examples/train_gpt.py        # the text: Python's own source files
    PYTHONPATH=. python examples/train_gpt.py --text book.txt --steps 1000
    # A layer of Llama's shape, head dim 128. Two runs of SDPA part by 0.03, its backends by 0.08.
    PYTHONPATH=. python examples/train_gpt.py --layers 1 --width 4096 --heads 32 --heads-k 8 \
        --context 4096 --batch 2 --steps 200 --tolerance 0.1
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
import torch.nn.functional as F
from gpt import GPT, VOCABULARY, Attention, flash_cute_attention, sdpa_attention
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import flash_cute
from flash_cute.library import can_use_cuda

ATTENTIONS: dict[str, Attention] = {
    "flash_cute": flash_cute_attention,
    "PyTorch SDPA": sdpa_attention,
}
CORPUS_BYTES = 8_000_000
HELD_OUT_SHARE = 0.05  # the end of the text, never trained on
HELD_OUT_BATCHES = 8
SMOOTHING = 10  # steps


@dataclass(frozen=True)
class Settings:
    """What is trained and how; every field is a command-line option.

    The tolerance bounds the difference of the two smoothed loss curves. Exact attentions differ in
    rounding alone, which training amplifies: to 4e-5 nats at most in fp32 on the CPU, and in bf16
    on CUDA to 7e-3 between two runs of SDPA itself, or its flash, cuDNN and efficient backends.
    An attention whose scale is a tenth too large is off by 4e-3 and 1.6e-2.
    """

    steps: int
    layers: int
    width: int
    heads: int
    context: int  # bytes
    batch: int
    learning_rate: float
    tolerance: float  # nats
    heads_k: int = 0  # of keys and values; 0: as many as heads
    seed: int = 0

    def model(self, attention: Attention) -> GPT:
        """A new model of this shape."""
        return GPT(
            self.layers, self.width, self.heads, self.context, attention, heads_k=self.heads_k
        )


CPU = Settings(
    steps=150,
    layers=4,
    width=192,
    heads=3,
    context=256,
    batch=8,
    learning_rate=3e-3,
    tolerance=1e-3,
)
CUDA = Settings(
    steps=300,
    layers=8,
    width=512,
    heads=8,
    context=1024,
    batch=32,
    learning_rate=3e-4,
    tolerance=1.2e-2,
)


@dataclass(frozen=True)
class Run:
    """What one training gave: losses in nats per byte, times in seconds, memory in bytes."""

    losses: list[float]
    step_times: list[float]
    held_out_loss: float
    tokens_per_second: float
    peak_memory: int | None  # None on the CPU, whose allocator keeps no count


def parse(
    argv: list[str] | None, parser: argparse.ArgumentParser | None = None
) -> tuple[argparse.Namespace, Settings]:
    """The general options, and the device's settings with those given in their place."""
    parser = parser or argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="train on this file")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where usable")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="default: %(default)s")
    for name, cpu in asdict(CPU).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(cpu),
            default=argparse.SUPPRESS,
            help=f"default: {cpu} on cpu, {getattr(CUDA, name)} on cuda",
        )
    options = parser.parse_args(argv)
    usable = can_use_cuda()
    options.device = options.device or ("cuda" if usable else "cpu")
    if options.device == "cuda" and not usable:
        parser.error("--device cuda needs a GPU and a flash_cute built with CUDA kernels")
    given = {f.name: vars(options)[f.name] for f in fields(Settings) if f.name in options}
    settings = replace(CUDA if options.device == "cuda" else CPU, **given)
    if settings.steps < 1:
        parser.error("--steps must be at least 1")
    return options, settings


def load_text(path: Path | None) -> Tensor:
    """The bytes of a file, or by default of the standard library's sources, uint8 (bytes,)."""
    if path is None:
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(source.read_bytes() for source in sources)[:CORPUS_BYTES]
    else:
        text = path.read_bytes()
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def batches(text: Tensor, count: int, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text, the same ones for the same seed: tokens and the next ones."""
    generator = torch.Generator().manual_seed(settings.seed)
    windows = text.unfold(0, settings.context + 1, 1)
    for _ in range(count):
        chosen = torch.randint(len(windows), (settings.batch,), generator=generator)
        window = windows[chosen.to(text.device)].long()
        yield window[:, :-1], window[:, 1:]


def loss_of(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy; on CUDA the matrices, so q, k and v too, are bf16."""
    device = tokens.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        return F.cross_entropy(model(tokens).view(-1, VOCABULARY), targets.reshape(-1))


def learning_rate_factor(step: int, steps: int) -> float:
    """A tenth of the steps to warm up, then half a cosine down to a tenth."""
    return min(1.0, 10 * (step + 1) / steps) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(
    model: torch.nn.Module,
    text: Tensor,
    settings: Settings,
    report: Callable[..., None],
) -> tuple[list[float], list[float]]:
    """Trains in place and reports each step's loss; returns the losses and step times."""
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, settings.steps)
    )
    losses, step_times = [], []
    for tokens, targets in batches(text, settings.steps, settings):
        start = time.perf_counter()
        loss = loss_of(model, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if text.is_cuda:
            torch.cuda.synchronize()
        step_times.append(time.perf_counter() - start)
        losses.append(loss.item())
        report(loss=losses[-1])
    return losses, step_times


@torch.no_grad()
def evaluate(model: torch.nn.Module, text: Tensor, settings: Settings) -> float:
    """Mean loss of a few batches."""
    drawn = batches(text, HELD_OUT_BATCHES, settings)
    return fmean(loss_of(model, tokens, targets).item() for tokens, targets in drawn)


def measure(
    attention: Attention,
    text: Tensor,
    settings: Settings,
    compiled: bool,
    report: Callable[..., None],
) -> Run:
    """Builds, trains and evaluates one model, on the device that holds the text."""
    torch.manual_seed(settings.seed)
    model: torch.nn.Module = settings.model(attention).to(text.device)
    if compiled:
        model.compile()
    if text.is_cuda:
        gc.collect()  # the last run's optimizer sits in a reference cycle
        torch.cuda.reset_peak_memory_stats()
    trained_on, held_out = text.tensor_split([round(len(text) * (1 - HELD_OUT_SHARE))])
    losses, step_times = train(model, trained_on, settings, report)
    return Run(
        losses=losses,
        step_times=step_times,
        held_out_loss=evaluate(model, held_out, settings),
        tokens_per_second=settings.batch * settings.context / median(step_times),
        peak_memory=torch.cuda.max_memory_allocated() if text.is_cuda else None,
    )


def measure_all(text: Tensor, settings: Settings, compiled: bool, console: Console) -> list[Run]:
    """One run for each of ATTENTIONS, with a progress bar each."""
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        for name, attention in ATTENTIONS.items():
            task = progress.add_task(name, total=settings.steps, loss=math.nan)
            report = partial(progress.update, task, advance=1)
            runs.append(measure(attention, text, settings, compiled, report))
    return runs


def smoothed(losses: list[float]) -> np.ndarray:
    """Moving average over SMOOTHING steps, from the first full window on."""
    window = min(SMOOTHING, len(losses))
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


def largest_difference(runs: list[Run]) -> float:
    """Of the smoothed losses; NaN if any loss is."""
    ours, theirs = (smoothed(run.losses) for run in runs)
    return float(np.abs(ours - theirs).max())


def results_table(runs: list[Run], difference: float, tolerance: float) -> Table:
    memory = ("n/a" if r.peak_memory is None else f"{r.peak_memory / 2**30:.2f} GiB" for r in runs)
    table = Table("", *ATTENTIONS, title="The same training, two attentions")
    table.add_row("final train loss", *(f"{smoothed(run.losses)[-1]:.4f}" for run in runs))
    table.add_row("held-out loss", *(f"{run.held_out_loss:.4f}" for run in runs))
    table.add_row("tokens/s", *(f"{run.tokens_per_second:,.0f}" for run in runs))
    table.add_row("peak memory", *memory)
    table.add_row("largest difference", f"{difference:.2g}", f"{tolerance:g} allowed")
    return table


def plot(runs: list[Run], path: Path) -> None:
    """Draws the losses and the step times of both runs."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss_axes, time_axes = figure.subplots(1, 2)
    styles = (("tab:orange", 4), ("black", 1))  # the second line runs inside the first
    for name, run, (color, width) in zip(ATTENTIONS, runs, styles, strict=True):
        loss_axes.plot(run.losses, label=name, color=color, linewidth=width)
        milliseconds = [1e3 * seconds for seconds in run.step_times]
        time_axes.plot(milliseconds, label=name, color=color, linewidth=1)
    loss_axes.set(title="Training loss", xlabel="step", ylabel="nats per byte")
    slowest = 1e3 * max(median(run.step_times) for run in runs)
    time_axes.set(title="Step time", xlabel="step", ylabel="ms", ylim=(0, 2 * slowest))
    for axes in (loss_axes, time_axes):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def describe(device: str) -> dict[str, str]:
    """The device and the versions that the numbers belong to."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flash_cute": flash_cute.__version__,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; returns its exit status."""
    options, settings = parse(argv)
    text = load_text(options.text)
    if len(text) * HELD_OUT_SHARE < settings.context + 1:
        raise SystemExit(
            f"the text is too short: {len(text)} bytes for a context of {settings.context}"
        )
    console = Console()
    environment = describe(options.device)
    console.print(", ".join(f"{name} {value}" for name, value in environment.items()))
    console.print(f"{len(text):,} bytes of text, {settings}")
    runs = measure_all(text.to(options.device), settings, options.compile, console)

    difference = largest_difference(runs)
    agree = difference <= settings.tolerance  # False for NaN
    options.out.mkdir(parents=True, exist_ok=True)
    plot(runs, options.out / "losses.png")
    results = {
        "environment": environment,
        "settings": asdict(settings),
        "runs": {name: asdict(run) for name, run in zip(ATTENTIONS, runs, strict=True)},
        "largest_difference": difference,
        "agree": agree,
    }
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    console.print(results_table(runs, difference, settings.tolerance))
    console.print(f"Written to {options.out}: losses.png, results.json")
    if not agree:
        console.print(
            f"[bold red]FAILED: the losses differ by up to {difference:.2g} nats, "
            f"more than {settings.tolerance:g}: one of the attentions is wrong."
        )
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
