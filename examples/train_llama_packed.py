"""Trains Hugging Face's Llama on documents of unlike lengths: packed, and padded with torch's SDPA.

Packed documents lie end to end in one row, and `position_ids` that restart keep them apart; padded
ones have a row each, up to the longest one's end. Both models start from the same random weights
and see the same documents, so their losses must agree. Writes losses.png to --out; the exit status
is 1 if the losses part, or fall too little.

    PYTHONPATH=. python examples/train_llama_packed.py

On two busy cores it took 53 s with OMP_WAIT_POLICY=PASSIVE.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from progress import Progress
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from train_gpt import load_text
from transformers import LlamaConfig, LlamaForCausalLM

from flash_cute.integrations import transformers
from flash_cute.library import can_use_cuda

SHORTEST, LONGEST = 16, 384  # tokens, which are bytes, of a document
IGNORED = -100  # a label without a loss
TOLERANCE = 1e-3  # nats; the same sums in another order, amplified by training
Inputs = dict[str, Tensor]


def llama(width: int, layers: int) -> LlamaForCausalLM:
    """Random weights of seed 0, with two query heads for each head of keys."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def documents(text: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """Pieces of the text, most of them short."""
    shares = torch.rand(count, generator=generator) ** 2
    lengths = (SHORTEST + shares * (LONGEST - SHORTEST)).int().tolist()
    begins = torch.randint(len(text) - LONGEST, (count,), generator=generator).tolist()
    return [text[begin : begin + n].long() for begin, n in zip(begins, lengths, strict=True)]


def packed(pieces: list[Tensor]) -> Inputs:
    """One row. A document's first token is none that the token before it should have told."""
    labels = torch.cat(pieces)
    labels[torch.tensor([0, *map(len, pieces[:-1])]).cumsum(0)] = IGNORED
    places = torch.cat([torch.arange(len(x)) for x in pieces])
    rows = {"input_ids": torch.cat(pieces), "position_ids": places, "labels": labels}
    return {name: x[None] for name, x in rows.items()}


def padded(pieces: list[Tensor]) -> Inputs:
    """A row a document."""
    labels = pad_sequence(pieces, batch_first=True, padding_value=IGNORED)
    keep = labels != IGNORED
    return {"input_ids": labels * keep, "attention_mask": keep.long(), "labels": labels}


WAYS: dict[str, tuple[str, Callable[[list[Tensor]], Inputs]]] = {
    "packed, flash_cute": ("flash_cute", packed),
    "padded, SDPA": ("sdpa", padded),
}


def train(name: str, text: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Losses in nats a token, seconds so far, and tokens that the model computed, of each step."""
    implementation, batch_of = WAYS[name]
    model = llama(options.width, options.layers).to(options.device)
    model.set_attn_implementation(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator, progress = torch.Generator().manual_seed(0), Progress(name, options.steps)
    losses, seconds, computed, begin = [], [], 0, time.monotonic()
    for _ in range(options.steps):
        inputs = batch_of(documents(text, options.batch, generator))
        computed += inputs["input_ids"].numel()
        loss = model(**{x: y.to(options.device) for x, y in inputs.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.monotonic() - begin)
        progress(losses[-1])
    return {"losses": losses, "seconds": seconds, "computed": computed}


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        by_step.plot(run["losses"], style, label=name)
        by_time.plot(run["seconds"], run["losses"], style, label=name)
    by_step.set(xlabel="step", ylabel="loss [nats a token]")
    by_time.set(xlabel="seconds on this machine")
    by_step.legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    counts = {"steps": 40, "batch": 8, "width": 128, "layers": 2}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    device = "cuda" if can_use_cuda() else "cpu"
    parser.add_argument("--device", default=device, help="default: cuda where usable")
    parser.add_argument(
        "--out", type=Path, default=Path("build/llama"), help="default: %(default)s"
    )
    options = parser.parse_args(argv)
    transformers.register()
    text = load_text(None)
    runs = {name: train(name, text, options) for name in WAYS}
    options.out.mkdir(parents=True, exist_ok=True)
    plot(runs, options.out / "losses.png")
    for name, run in runs.items():
        print(
            f"{name}: loss {run['losses'][0]:.3f} at first, {run['losses'][-1]:.3f} at last, "
            f"{run['seconds'][-1]:.1f} s, {run['computed']} tokens computed"
        )
    ours, theirs = (run["losses"] for run in runs.values())
    apart = max(abs(x - y) for x, y in zip(ours, theirs, strict=True))
    print(f"at most {apart:.1e} apart; plot: {options.out / 'losses.png'}")
    return int(apart > TOLERANCE or ours[-1] > 0.8 * ours[0])


if __name__ == "__main__":
    raise SystemExit(main())
