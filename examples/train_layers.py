r"""Trains an encoder of flash_cute.core's layers, and the same of torch's, on padded sequences.

Every token shall name the largest token of its sequence. Sequences have different lengths, and what
stands behind their ends is random: the mask alone tells it apart. Both encoders start from one
state dict and see the same batches, so the losses must agree. Writes losses.png to --out; the exit
status is 1 if the losses part, or fall too little.

    PYTHONPATH=. python examples/train_layers.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from progress import Progress
from torch import Tensor, nn

from flash_cute.core import AttentionLayer, FusedGELU, OptimizedLinear
from flash_cute.library import can_use_cuda

VOCABULARY, LONGEST = 64, 48
WIDTH, HEADS, LAYERS = 64, 4, 2
TOLERANCE = 0.02  # nats; the same sums in another order, amplified by training


class TorchAttention(nn.MultiheadAttention):
    """torch's own, called as AttentionLayer is."""

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__(d_model, num_heads, dropout, batch_first=True)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, key_padding_mask=~attention_mask, need_weights=False)[0]


class Block(nn.Module):
    """Attention, then an MLP, each on normalised input and added to its input."""

    def __init__(self, attention: type, linear: type, gelu: type) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention(WIDTH, HEADS, dropout=0.0)
        self.mlp = nn.Sequential(linear(WIDTH, 4 * WIDTH), gelu(), linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), keep)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """Logits (batch, seqlen, vocabulary) of tokens (batch, seqlen), of which keep takes part."""

    def __init__(self, attention: type, linear: type, gelu: type) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, linear, gelu) for _ in range(LAYERS))
        self.head = linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, keep)
        return self.head(x)


def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the mask, and the largest token of each sequence."""
    tokens = torch.randint(VOCABULARY, (size, LONGEST), generator=generator)
    lengths = torch.randint(1, LONGEST + 1, (size, 1), generator=generator)
    keep = torch.arange(LONGEST) < lengths
    largest = tokens.masked_fill(~keep, 0).amax(1, keepdim=True).expand_as(tokens)
    return tokens, keep, largest


def train(model: nn.Module, steps: int, size: int, device: str) -> list[float]:
    """The loss of each step, in nats a token that takes part."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    progress = Progress("step", steps)
    for _ in range(steps):
        tokens, keep, largest = (x.to(device) for x in batch(generator, size))
        loss = F.cross_entropy(model(tokens, keep)[keep], largest[keep])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        progress(losses[-1])
    return losses


def plot(losses: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, curve), style in zip(losses.items(), ("-", "--"), strict=True):
        axes.plot(curve, style, label=name)
    axes.set(xlabel="step", ylabel="loss [nats a token]", title="The largest token of a sequence")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=32, help="default: %(default)s")
    parser.add_argument(
        "--device", default="cuda" if can_use_cuda() else "cpu", help="default: cuda where usable"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/layers"), help="default: %(default)s"
    )
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    models = {
        "flash_cute.core": Encoder(AttentionLayer, OptimizedLinear, FusedGELU),
        "torch.nn": Encoder(TorchAttention, nn.Linear, nn.GELU),
    }
    models["torch.nn"].load_state_dict(models["flash_cute.core"].state_dict())
    losses = {
        name: train(model.to(options.device), options.steps, options.batch, options.device)
        for name, model in models.items()
    }
    options.out.mkdir(parents=True, exist_ok=True)
    plot(losses, options.out / "losses.png")
    ours, theirs = losses.values()
    apart = max(abs(x - y) for x, y in zip(ours, theirs, strict=True))
    for name, curve in losses.items():
        print(f"{name}: loss {curve[0]:.3f} at first, {curve[-1]:.3f} at last")
    print(f"at most {apart:.1e} apart; plot: {options.out / 'losses.png'}")
    return int(apart > TOLERANCE or ours[-1] > 0.7 * ours[0])


if __name__ == "__main__":
    raise SystemExit(main())
