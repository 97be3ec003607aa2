r"""Trains the demo's GPT with its tokens shared out to ranks, beside one process.

Each rank holds a part of every sequence (flash_cute.distributed), and all parameters. Both
trainings see the same batches from the same weights, so the losses must agree. Writes losses.png
and results.json to --out; the exit status is 1 if the losses part.

    export PYTHONPATH=.
    torchrun --nproc-per-node 2 examples/train_context_parallel.py    # gloo, or NCCL on GPUs
    torchrun --nproc-per-node 4 examples/train_context_parallel.py --strategy ring
    # A checkpoint holds whole parameters: any number of ranks goes on from it.
    torchrun --nproc-per-node 2 examples/train_context_parallel.py --checkpoint last.pt \
        --stop-after 50
    python examples/train_context_parallel.py --checkpoint last.pt
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import VOCABULARY, Rotary, flash_cute_attention
from matplotlib.figure import Figure
from progress import Progress
from torch import Tensor
from train_gpt import (
    HELD_OUT_SHARE,
    Settings,
    batches,
    describe,
    learning_rate_factor,
    load_text,
    parse,
    smoothed,
    train,
)

from flash_cute.distributed import ContextParallel, Plan, cp_attention
from flash_cute.distributed.layouts import LAYOUTS
from flash_cute.distributed.strategies import STRATEGIES


class Training:
    """A model, its optimizer, and the losses so far: what a checkpoint holds.

    Parameters are whole on every rank, and so are gradients once they are added up. Where DDP or
    FSDP does that, it takes the mean: multiply the loss by the ranks. DDP also sends the first
    rank's buffers to all: the rotary tables here are each rank's own.
    """

    def __init__(self, cp: ContextParallel, settings: Settings, device: torch.device) -> None:
        self.cp, self.settings, self.device = cp, settings, device
        self.plan: Plan = cp.plan(
            settings.context, causal=True, heads=settings.heads,
            heads_k=settings.heads_k or settings.heads, head_dim=settings.width // settings.heads,
        )  # fmt: skip
        torch.manual_seed(settings.seed)
        self.model = settings.model(partial(cp_attention, plan=self.plan)).to(device)
        rotary, positions = self.model.blocks[0].rotary, cp.position_ids(self.plan, device)
        assert isinstance(rotary, Rotary)
        rotary.cos, rotary.sin = rotary.cos[positions], rotary.sin[positions]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1,
            fused=True,
        )  # fmt: skip
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, settings.steps)
        )
        self.losses: list[float] = []

    def run(self, text: Tensor, stop_after: int, compiled: bool) -> None:
        """Steps from where the losses end, to ``stop_after`` of them."""
        if compiled:
            self.model.compile()
        tokens_of_all = self.settings.batch * self.settings.context
        progress = Progress("step", stop_after - len(self.losses))
        for batch in islice(batches(text, stop_after, self.settings), len(self.losses), None):
            tokens, targets = (self.cp.shard(x, self.plan) for x in batch)
            with torch.autocast(
                self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"
            ):
                logits = self.model(tokens).view(-1, VOCABULARY)
                part = F.cross_entropy(logits, targets.reshape(-1), reduction="sum") / tokens_of_all
            part.backward()
            loss = part.detach()
            if self.cp.size > 1:  # parts of sums over all tokens
                for x in (loss, *(p.grad for p in self.model.parameters())):
                    dist.all_reduce(x)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.losses.append(loss.item())
            if self.cp.rank == 0:
                progress(self.losses[-1])

    def save(self, path: Path) -> None:
        """By the first rank; a file that is there is replaced once the new one is whole."""
        if self.cp.rank == 0:
            state = {
                "settings": asdict(self.settings),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "losses": self.losses,
            }
            beside = path.with_name(path.name + ".new")
            torch.save(state, beside)
            beside.replace(path)

    def load(self, path: Path) -> None:
        """On every rank, whatever the number of ranks that saved it."""
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SystemExit(f"{path} is of another training: {state['settings']}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.losses = state["losses"]


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Draws both curves, and how far they are apart."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    of_losses, of_difference = figure.subplots(1, 2)
    for (name, losses), width in zip(curves.items(), (4, 1), strict=True):
        of_losses.plot(losses, label=name, linewidth=width)
    of_losses.set(title="Training loss", xlabel="step", ylabel="nats per byte")
    of_losses.legend()
    ours, one = curves.values()
    of_difference.plot([abs(a - b) for a, b in zip(ours, one, strict=True)])
    of_difference.set(title="Difference of each step", xlabel="step", ylabel="nats per byte")
    for axes in (of_losses, of_difference):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def options(argv: list[str] | None) -> tuple[argparse.Namespace, Settings]:
    """The demo's, and those of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    of_one_dimension = [name for name, x in STRATEGIES.items() if not x.is_2d]
    shown = "default: %(default)s"
    parser.add_argument(
        "--strategy", choices=("auto", *of_one_dimension), default="auto", help=shown
    )
    parser.add_argument("--layout", choices=("auto", *LAYOUTS), default="auto", help=shown)
    parser.add_argument("--checkpoint", type=Path, help="go on from this file if it exists; save")
    parser.add_argument("--stop-after", type=int, help="steps; then save, without a comparison")
    given, settings = parse(argv, parser)
    if given.stop_after is not None and not 0 < given.stop_after <= settings.steps:
        parser.error(f"--stop-after is {given.stop_after}; expected 1 to --steps {settings.steps}")
    return given, settings


def main(argv: list[str] | None = None) -> int:
    """Trains; returns the exit status, which all ranks but the first leave at 0."""
    given, settings = options(argv)
    is_one_of_many = "RANK" in os.environ  # under torchrun
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if is_one_of_many:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    cp = ContextParallel(strategy=given.strategy, layout=given.layout)
    text = load_text(given.text)
    text = text[: round(len(text) * (1 - HELD_OUT_SHARE))].to(device)
    training = Training(cp, settings, device)
    if given.checkpoint is not None and given.checkpoint.exists():
        training.load(given.checkpoint)
    training.run(text, given.stop_after or settings.steps, given.compile)
    if given.checkpoint is not None:
        training.save(given.checkpoint)
    if is_one_of_many:
        dist.destroy_process_group()
    if cp.rank > 0:
        return 0
    print(f"{cp.size} ranks, {training.plan}")
    print(f"step {len(training.losses)}: loss {training.losses[-1]:.4f}")
    return 0 if given.stop_after else compare(training, text, given.out)


def compare(training: Training, text: Tensor, out: Path) -> int:
    """The same training by one process, with the demo's own loop; the exit status."""
    settings = training.settings
    torch.manual_seed(settings.seed)
    model = settings.model(flash_cute_attention).to(text.device)
    losses, times = train(model, text, settings, lambda **_: None)
    curves = {f"{training.cp.size} ranks": training.losses, "one process": losses}
    ours, one = map(smoothed, curves.values())
    difference = float(np.abs(ours - one).max())
    agree = difference <= settings.tolerance  # False for NaN
    out.mkdir(parents=True, exist_ok=True)
    plot(curves, out / "losses.png")
    results = {
        "environment": describe(text.device.type),
        "settings": asdict(settings),
        "plan": str(training.plan),
        "losses": curves,
        "largest_difference": difference if math.isfinite(difference) else None,
        "agree": agree,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1))
    print(
        f"one process: {1e3 * median(times):.0f} ms a step; losses are {difference:.2g} nats apart,"
    )
    print(
        f"{settings.tolerance:g} allowed: {'they agree' if agree else 'FAILED'}. Written to {out}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
