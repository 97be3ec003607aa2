"""Attention of an unchanged Hugging Face model: `python -m benchmarks.hf_attention --json F`.

Layers of Llama 3.1 8B's shape with random weights, from transformers, run with torch's SDPA as it
chooses a backend itself, with its cuDNN backend alone, with `sdpa.activate()`, with
`attn_implementation="flash_cute"`, and short ones with "eager": prompts, prompts padded on the left
to one length, and training steps. A figure is the time of the whole stack, so that it holds what a
user gains. Then SDPA alone, forward and training, with each kind of mask.

`--page P --json F` measures nothing: it writes the tables of F into the page P.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_cute.integrations import sdpa, transformers

from . import report, timing
from .rivals import Work

DEFAULT = "sdpa"
EAGER = "eager"
KINDS = ("prompt", "padded prompt", "training")
MASKS = ("no mask", "is_causal", "causal as a bool mask", "padding as a bool mask", "bias")
PARTS = {"model": "whole stack of layers", "sdpa": "SDPA alone"}
BEGIN, END = "<!-- hf-attention -->", "<!-- /hf-attention -->"
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "heads": 32, "heads_k": 8}
LIMIT = 0.03  # of the relative difference from the default's results, in 16 bits
# Each candidate's attn_implementation, and what it runs in.
CANDIDATES: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    DEFAULT: ("sdpa", nullcontext),
    "sdpa, cuDNN": ("sdpa", lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    "sdpa.activate()": ("sdpa", sdpa.activated),
    "flash_cute": ("flash_cute", nullcontext),
    EAGER: ("eager", nullcontext),
}
OF_SDPA = (DEFAULT, "sdpa, cuDNN", "sdpa.activate()")


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
    """Candidates whose results are not the default's, and how far they are from these."""
    found, expected = {}, None
    for name, candidate in works.items():
        try:
            with candidate.scope():
                results = candidate.results(candidate.run())
        except (RuntimeError, NotImplementedError):
            continue  # its turn says why
        got = torch.cat([x.flatten() for x in results]).double()
        expected = got if expected is None else expected
        error = float((got - expected).norm() / expected.norm())
        if not error <= LIMIT:
            found[name] = f"wrong by {error:.2g}"
    return found


def masked_work(
    candidate: str, mask: str, trains: bool, batch: int, seqlen: int, device: torch.device
) -> Work:
    """SDPA with a mask, of half the heads of the model, each with keys of its own."""
    generator = torch.Generator(device).manual_seed(seqlen)
    shape = (batch, SHAPE["heads"] // 2, seqlen, SHAPE["hidden_size"] // SHAPE["heads"])
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    given: dict[str, Any] = {"is_causal": mask == "is_causal"}
    places = torch.arange(seqlen, device=device)
    if mask == "causal as a bool mask":
        given["attn_mask"] = places[:, None] >= places
    elif mask == "padding as a bool mask":
        lengths = torch.arange(batch, device=device) % 4 * (seqlen // 8)
        given["attn_mask"] = (places >= lengths[:, None])[:, None, None].expand(-1, -1, seqlen, -1)
    elif mask == "bias":
        given["attn_mask"] = -0.01 * (places[:, None] - places).abs().to(q.dtype)
    for x in (q, k, v):
        x.requires_grad_(trains)
    dout = torch.randn(shape, device=device, dtype=q.dtype, generator=generator)

    def run() -> tuple[torch.Tensor, ...]:
        out = scaled_dot_product_attention(q, k, v, **given)
        return torch.autograd.grad(out, (q, k, v), dout) if trains else (out,)

    return Work(run, lambda results: results, CANDIDATES[candidate][1])


def measure(
    case: str, part: str, works: dict[str, Work], device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of each candidate, and its speed beside the default's."""
    failures = wrong(works)
    kept, monitor = {x: works[x] for x in works if x not in failures}, timing.Monitor(device)
    turns = timing.interleave(kept, options.rounds, options.target_ms[part], device, monitor)
    failures |= {name: turn.failure for name, turn in turns.items() if turn.failure}
    ms = {name: turn.median_ms for name, turn in turns.items() if not turn.failure}
    speed = {name: ms.get(DEFAULT, float("nan")) / x for name, x in ms.items()}
    return {"part": part, "case": case, "ms": ms, "speed": speed, "failures": failures}


def rows_of(device: torch.device, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = stack(options.layers, options.width, device, torch.bfloat16)
    sizes = [(max(1, options.tokens // x), x) for x in map(int, options.seqlens.split(","))]
    for batch, seqlen in sizes:
        for kind in KINDS:
            given = inputs(kind, batch, seqlen, device)
            names = [x for x in CANDIDATES if x != EAGER or seqlen <= options.eager_up_to]
            works = {name: work(model, name, kind, given) for name in names}
            yield measure(f"{kind}, {batch} x {seqlen}", "model", works, device, options)
    del model
    for batch, seqlen in sizes:
        for mask in MASKS:
            for direction in ("forward", "training"):
                sizes_of_mask = (direction == "training", batch, seqlen, device)
                works = {name: masked_work(name, mask, *sizes_of_mask) for name in OF_SDPA}
                case = f"{mask}, {direction}, {batch} x {seqlen}"
                yield measure(case, "sdpa", works, device, options)


def cells(row: dict[str, Any]) -> str:
    """A line of Markdown: milliseconds, and the speed beside the default's."""
    told = {name: f"{x:.4g} ms, {row['speed'][name]:.2f}" for name, x in row["ms"].items()}
    return f"| {row['case']} | {' | '.join(told.get(x, 'n/a') for x in columns(row['part']))} |"


def columns(part: str) -> tuple[str, ...]:
    return tuple(CANDIDATES) if part == "model" else OF_SDPA


def head(part: str) -> str:
    names = columns(part)
    return f"| {PARTS[part]} | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}"


def tables(result: dict[str, Any]) -> str:
    """Markdown: where it was measured, and a table for each part."""
    where, what = result["machine"]["device"], result["versions"]
    lines = [f"{where}, torch {what['torch']}, CUDA {what['cuda']}, cuDNN {what['cudnn']}, bf16."]
    for part in PARTS:
        lines += ["", head(part), *(cells(x) for x in result["rows"] if x["part"] == part)]
    return "\n".join(lines)


def with_tables(page: str, result: dict[str, Any]) -> str:
    """The page's text with the tables between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has to hold {BEGIN} and then {END}")
    return f"{before}{begin}\n{tables(result)}\n{end}{after}"


def main(argv: list[str] | None = None) -> int:
    """The command; 1 if a candidate was wrong."""
    parser = argparse.ArgumentParser(prog="benchmarks.hf_attention", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the command")
    counts = {"layers": 2, "width": 4096, "tokens": 16384, "rounds": 6, "eager-up-to": 1024}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seqlens", default="1024,4096,16384", help="comma-separated")
    parser.add_argument("--target-ms", type=float, help="what a turn takes at least: 60, SDPA's 20")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--page", type=Path, help="write the tables of --json into this page")
    options = parser.parse_args(argv)
    if options.page:
        if not options.json:
            parser.error("--page needs --json, the file of measurements")
        page = options.page.read_text(encoding="utf-8")
        made = with_tables(page, report.load(options.json))
        options.page.write_text(made, encoding="utf-8")
        return 0
    given = options.target_ms
    options.target_ms = {"model": given or 60.0, "sdpa": given or 20.0}
    device, started = timing.use_device(options.device), time.perf_counter()
    rows: list[dict[str, Any]] = []
    for row in rows_of(device, options):
        if not rows or rows[-1]["part"] != row["part"]:
            print(head(row["part"]), flush=True)
        rows.append(row)
        print(cells(row), flush=True)
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
    print(f"{time.perf_counter() - started:.0f} s")
    return int(any("wrong" in x for row in rows for x in row["failures"].values()))


if __name__ == "__main__":
    sys.exit(main())
