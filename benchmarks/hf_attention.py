"""Attention of an unchanged Hugging Face model: `python -m benchmarks.hf_attention --json F`.

Layers of Llama 3.1 8B's shape with random weights, from transformers, run with torch's SDPA as it
chooses a backend itself, with its cuDNN backend alone, with `sdpa.activate()` and with
`attn_implementation="flash_cute"`: prompts, prompts padded on the left to one length, and training
steps. A figure is the time of the whole stack, so that it holds what a user gains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_cute.integrations import sdpa, transformers

from . import report, timing
from .rivals import Work

DEFAULT = "sdpa"
KINDS = ("prompt", "padded prompt", "training")
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "heads": 32, "heads_k": 8}
LIMIT = 0.03  # of the relative difference from the default's hidden states, in 16 bits
# Each candidate's attn_implementation, and what it runs in.
CANDIDATES: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    DEFAULT: ("sdpa", nullcontext),
    "sdpa, cuDNN": ("sdpa", lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    "sdpa.activate()": ("sdpa", sdpa.activated),
    "flash_cute": ("flash_cute", nullcontext),
}


def stack(layers: int, width: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama without a head; a smaller width keeps the number of heads."""
    from transformers import AutoModel, LlamaConfig

    transformers.register()
    share = SHAPE["hidden_size"] // width
    config = LlamaConfig(
        vocab_size=1000, hidden_size=width, intermediate_size=SHAPE["intermediate_size"] // share,
        num_hidden_layers=layers, num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["heads_k"], max_position_embeddings=1 << 17, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModel.from_config(config).to(device, dtype)


def inputs(kind: str, batch: int, seqlen: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens; padded rows are an eighth to all of the length long."""
    generator = torch.Generator().manual_seed(seqlen)
    given = {"input_ids": torch.randint(1000, (batch, seqlen), generator=generator)}
    if kind == "padded prompt":
        lengths = torch.randint(max(1, seqlen // 8), seqlen + 1, (batch, 1), generator=generator)
        lengths[0] = seqlen
        given["attention_mask"] = (torch.arange(seqlen) >= seqlen - lengths).long()
    return {name: x.to(device) for name, x in given.items()}


def work(model: Any, candidate: str, kind: str, given: dict[str, torch.Tensor]) -> Work:
    name, scope = CANDIDATES[candidate]

    @contextmanager
    def within() -> Iterator[None]:
        model.set_attn_implementation(name)
        with scope(), torch.set_grad_enabled(kind == "training"):
            yield

    def run() -> torch.Tensor:
        out = model(**given).last_hidden_state
        if kind == "training":
            model.zero_grad()
            out.sum().backward()
        return out.detach()

    mask = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    return Work(run, lambda out: (out[mask],), within)


def wrong(works: dict[str, Work]) -> dict[str, str]:
    """Candidates whose hidden states are not the default's, and how far they are from these."""
    found, expected = {}, None
    for name, candidate in works.items():
        try:
            with candidate.scope():
                (out,) = candidate.results(candidate.run())
        except (RuntimeError, NotImplementedError):
            continue  # its turn says why
        expected = out.double() if expected is None else expected
        error = float((out.double() - expected).norm() / expected.norm())
        if not error <= LIMIT:
            found[name] = f"wrong by {error:.2g}"
    return found


def measure(model: Any, kind: str, seqlen: int, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each candidate, and its speed beside the default's."""
    device, batch = next(model.parameters()).device, max(1, options.tokens // seqlen)
    given = inputs(kind, batch, seqlen, device)
    works = {name: work(model, name, kind, given) for name in CANDIDATES}
    failures = wrong(works)
    kept, monitor = {x: works[x] for x in works if x not in failures}, timing.Monitor(device)
    turns = timing.interleave(kept, options.rounds, options.target_ms, device, monitor)
    failures |= {name: turn.failure for name, turn in turns.items() if turn.failure}
    ms = {name: turn.median_ms for name, turn in turns.items() if not turn.failure}
    speed = {name: ms.get(DEFAULT, float("nan")) / x for name, x in ms.items()}
    case = f"{kind}, {batch} x {seqlen}"
    return {"case": case, "ms": ms, "speed": speed, "failures": failures}


def cells(row: dict[str, Any]) -> str:
    """A line of Markdown: milliseconds, and the speed beside the default's."""
    told = {name: f"{x:.4g} ms, {row['speed'][name]:.2f}" for name, x in row["ms"].items()}
    return f"| {row['case']} | {' | '.join(told.get(x, 'n/a') for x in CANDIDATES)} |"


def main(argv: list[str] | None = None) -> int:
    """The command; 1 if a candidate was wrong."""
    parser = argparse.ArgumentParser(prog="benchmarks.hf_attention", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the command")
    counts = {"layers": 4, "width": 4096, "tokens": 16384, "rounds": 8}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seqlens", default="1024,4096,16384", help="comma-separated")
    parser.add_argument("--target-ms", type=float, default=310.0, help="what a turn takes at least")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args(argv)
    device = timing.use_device(options.device)
    model, rows = stack(options.layers, options.width, device, torch.bfloat16), []
    print(f"| case | {' | '.join(CANDIDATES)} |\n| --- |{' --- |' * len(CANDIDATES)}", flush=True)
    for seqlen in map(int, options.seqlens.split(",")):
        for kind in KINDS:
            rows.append(measure(model, kind, seqlen, options))
            print(cells(rows[-1]), flush=True)
            if options.json:
                result = {
                    "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    "machine": report.machine(device, timing.Monitor(device)),
                    "settings": {x: str(y) for x, y in vars(options).items() if x != "json"},
                    "versions": report.versions({}), "rows": rows,
                }  # fmt: skip
                report.save(result, options.json)
    reasons = {f"{name}: {x}" for row in rows for name, x in row["failures"].items()}
    print(*(f"n/a, {x}" for x in sorted(reasons)), sep="\n")
    return int(any("wrong" in x for row in rows for x in row["failures"].values()))


if __name__ == "__main__":
    sys.exit(main())
