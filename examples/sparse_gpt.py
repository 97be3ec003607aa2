r"""Trains a GPT with dense attention, then leaves out pairs of tokens and asks what it costs.

Each pattern takes the place of dense attention in the trained model; LEARNED's gates are first
trained by their own loss, while the model stands still. Prints the perplexity of held-out text, a
byte, and writes results.json and perplexity.png to --out. The exit status is 1 if DYNAMIC_THRESHOLD
or LEARNED adds more than --tolerance to it at half of the pairs.

    PYTHONPATH=. python examples/sparse_gpt.py

On two busy cores it took 8 minutes with OMP_WAIT_POLICY=PASSIVE: 38 steps of training in the first
minute, and 3 without it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Attention, Block, flash_cute_attention
from matplotlib.figure import Figure
from progress import Progress
from torch import Tensor
from train_gpt import CPU, HELD_OUT_SHARE, Settings, batches, evaluate, load_text, train

from flash_cute import flash_attn_func
from flash_cute.library import can_use_cuda
from flash_cute.sparse import LearnedGate, SparsePattern, choose_blocks
from flash_cute.sparse.grid import grid_of

RATIOS = (0.5, 0.8, 0.9)
JUDGED = (SparsePattern.DYNAMIC_THRESHOLD, SparsePattern.LEARNED)


def sparse_attention(
    pattern: SparsePattern, ratio: float, gate: LearnedGate | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Causal attention to the blocks that a pattern keeps."""
    choice = choose_blocks(q, k, pattern, ratio, causal=True, gate=gate)
    return flash_attn_func(q, k, v, causal=True, sparse=choice.value())


def blocks_of(model: GPT) -> list[Block]:
    """The layers of the model."""
    return [block for block in model.blocks if isinstance(block, Block)]


def use(model: GPT, attentions: Iterable[Attention]) -> None:
    """Gives each block its attention."""
    for block, attention in zip(blocks_of(model), attentions, strict=True):
        block.attention = attention


def queries_and_keys(model: GPT, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """q and k of each block of the model with dense attention."""
    x = model.embedding(tokens)
    for block in blocks_of(model):
        q, k, _ = block.project(x)
        yield block.rotary(q), block.rotary(k)
        x = block(x)


def train_gates(
    model: GPT, text: Tensor, settings: Settings, steps: int, report: Progress
) -> list[LearnedGate]:
    """A gate for each block, trained by their own loss on the model as it is."""
    block = blocks_of(model)[0]
    gates = [
        LearnedGate(block.heads, block.heads_k, block.dim, device=text.device) for _ in model.blocks
    ]
    optimizer = torch.optim.Adam([x for gate in gates for x in gate.parameters()], 1e-2)
    grid = grid_of(settings.context, is_causal=True)
    for tokens, _ in batches(text, steps, settings):
        with torch.no_grad():
            seen = list(queries_and_keys(model, tokens))
        losses = [gate.distill_loss(q, k, grid) for gate, (q, k) in zip(gates, seen, strict=True)]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(loss.item())
    return gates


def measure(model: GPT, text: Tensor, settings: Settings, gates: list[LearnedGate]) -> dict:
    """Perplexity of each pattern at each ratio, and of dense attention."""
    report = Progress("patterns", len(SparsePattern) * len(RATIOS))
    use(model, [flash_cute_attention] * len(gates))
    found: dict[str, Any] = {"dense": math.exp(evaluate(model, text, settings))}
    for pattern in SparsePattern:
        found[pattern.value] = {}
        for ratio in RATIOS:
            use(model, [partial(sparse_attention, pattern, ratio, gate) for gate in gates])
            found[pattern.value][ratio] = math.exp(evaluate(model, text, settings))
            report()
    return found


def draw(found: dict, path: Path) -> None:
    """Added perplexity over the share of pairs left out."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for pattern in SparsePattern:
        added = [100 * (found[pattern.value][x] / found["dense"] - 1) for x in RATIOS]
        axes.plot(RATIOS, added, marker="o", label=pattern.value)
    axes.set(xlabel="share of the visible pairs left out", ylabel="perplexity added, %")
    axes.set_yscale("symlog", linthresh=1)
    axes.axhline(1, color="grey", linewidth=0.5)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    counts = {"steps": 200, "gate-steps": 60, "context": 2048, "width": 192, "layers": 4}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--tolerance", type=float, default=0.01, help="default: %(default)s")
    device = "cuda" if can_use_cuda() else "cpu"
    parser.add_argument("--device", default=device, help="default: cuda where usable")
    parser.add_argument(
        "--out", type=Path, default=Path("build/sparse"), help="default: %(default)s"
    )
    options = parser.parse_args(argv)
    settings = replace(
        CPU, steps=options.steps, layers=options.layers, width=options.width,
        heads=options.width // 64, context=options.context, batch=1,
    )  # fmt: skip
    text = load_text(None).to(options.device)
    trained_on, held_out = text.tensor_split([round(len(text) * (1 - HELD_OUT_SHARE))])
    torch.manual_seed(settings.seed)
    model = settings.model(flash_cute_attention).to(options.device)
    train(model, trained_on, settings, Progress("model", settings.steps))
    gates = train_gates(
        model, trained_on, settings, options.gate_steps, Progress("gates", options.gate_steps)
    )
    found = measure(model, held_out, settings, gates)
    print(f"dense: perplexity {found['dense']:.4f}")
    for pattern in SparsePattern:
        added = (
            f"{x}: {100 * (y / found['dense'] - 1):+.2f} %" for x, y in found[pattern.value].items()
        )
        print(f"{pattern.value:18}", "   ".join(added))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.out / "perplexity.png")
    limit = found["dense"] * (1 + options.tolerance)
    return int(any(found[pattern.value][0.5] > limit for pattern in JUDGED))


if __name__ == "__main__":
    raise SystemExit(main())
