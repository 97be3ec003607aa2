"""Launches and time of fused blocks: `python -m benchmarks.fusion --json F`.

Beside flash_cute.attention.fusion at each level: eager torch, the fast path of its encoder layer,
and torch.compile. All candidates of a case are timed in turns, in one run.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.attention.fusion import (
    FusionStrategy,
    OptimizationLevel,
    create_unified_attention_fusion,
)
from flash_cute.attention.fusion.benchmark import count_launches

from . import report, timing
from .llama_block import LlamaBlock, rotary
from .rivals import Work, describe

MODES = ("inference", "forward", "training")
SHAPES = {
    "encoder": ((1, 32), (1, 128), (4, 128), (8, 512), (32, 512), (16, 2048)),
    "llama": ((1, 32), (1, 128), (1, 2048), (4, 4096)),
    "smoke": ((1, 16),),
}


@dataclass(frozen=True)
class Case:
    """A block, (batch, seqlen), and what is done: "inference" and "forward" in eval mode, without
    and with gradients recorded; "training" is forward and backward, with dropout 0.1."""

    block: str
    batch: int
    seqlen: int
    mode: str

    def __str__(self) -> str:
        return f"{self.block} b{self.batch} s{self.seqlen} {self.mode}"


class Positioned(nn.Module):
    """A block of Llama's shape with its rotary positions."""

    def __init__(self, block: nn.Module, position: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.block, self.position = block, position

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, position_embeddings=self.position)


def candidates(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The models of a case, of equal weights."""
    torch.manual_seed(0)
    block: nn.Module
    if case.block == "llama":
        block = LlamaBlock(width=4096, heads=32, heads_k=8, hidden=14336)
        cos, sin = (x.to(device, dtype) for x in rotary(case.seqlen, 128))
    else:
        block = nn.TransformerEncoderLayer(512, 8, batch_first=True)
    block = block.to(device, dtype).train(case.mode == "training")

    def whole(block: nn.Module) -> nn.Module:
        return Positioned(block, (cos, sin)) if case.block == "llama" else block

    found: dict[str, Any] = {"eager": whole(block)}
    found["compile"] = torch.compile(whole(copy.deepcopy(block)))
    if case.block != "llama" and case.mode == "inference":
        found["fast_path"] = block
    for level in OptimizationLevel:
        if level is OptimizationLevel.AGGRESSIVE and case.mode != "inference":
            continue
        fused = create_unified_attention_fusion(block, FusionStrategy.FULL_BLOCK, level)
        found[level.value] = whole(fused)
    balanced = create_unified_attention_fusion(copy.deepcopy(block))
    found["balanced_compiled"] = torch.compile(whole(balanced))
    return found


@contextmanager
def setting(gradients: bool, fast_path: bool) -> Iterator[None]:
    """Whether gradients are recorded, and whether torch's encoder layer may take its fast path."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast_path)
    try:
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def work(case: Case, name: str, model: nn.Module, x: Tensor) -> tuple[Callable[..., Tensor], Any]:
    """(a call of the model, the context that it runs in)."""

    def call(x: Tensor = x) -> Tensor:
        out = model(x)
        if case.mode == "training":
            out.backward(torch.ones_like(out))
        return out.detach()

    def scope() -> AbstractContextManager[None]:
        return setting(case.mode != "inference", name == "fast_path")

    return call, scope


def measure(
    case: Case, device: torch.device, dtype: torch.dtype, rounds: int, target_ms: float
) -> dict[str, dict[str, Any]]:
    """Every candidate's time, launches, and largest difference from eager (None with dropout)."""
    torch.manual_seed(0)
    width = 4096 if case.block == "llama" else 512
    x = torch.randn(case.batch, case.seqlen, width, device=device, dtype=dtype)
    works: dict[str, Work] = {}
    found: dict[str, dict[str, Any]] = {}
    reference: Tensor | None = None
    for name, model in candidates(case, device, dtype).items():
        call, scope = work(case, name, model, x)
        try:
            with scope():
                for _ in range(3):
                    call()
                out, (kernels, host) = count_launches(call, x)
        except Exception as error:
            found[name] = {"status": "failed", "message": describe(error)}
            continue
        reference = out if reference is None else reference
        exact = case.block == "llama" or case.mode != "training"
        difference = float((out.double() - reference.double()).abs().max()) if exact else None
        found[name] = {"kernels": kernels, "host_launches": host, "max_difference": difference}
        works[name] = Work(call, lambda out: (out,), scope)
    monitor = timing.Monitor(device)
    for name, turn in timing.interleave(works, rounds, target_ms, device, monitor).items():
        if turn.failure:
            found[name] = {"status": "failed", "message": turn.failure}
        else:
            found[name].update(status="ok", median_ms=turn.median_ms, spread=turn.spread)
    return found


def line(name: str, entry: dict[str, Any]) -> str:
    """One candidate of a case, to read."""
    if entry["status"] != "ok":
        return f"  {name:18} {entry['message']}"
    counts = f"{entry['kernels']:4} kernels {entry['host_launches']:4} launches"
    return f"  {name:18} {entry['median_ms'] * 1e3:10.1f} us  {counts}"


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="benchmarks.fusion", description=__doc__)
    parser.add_argument("--blocks", default="encoder,llama", help="of encoder, llama, smoke")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=7, help="turns of each candidate")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N or cpu")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args(argv)
    blocks, modes = options.blocks.split(","), options.modes.split(",")
    try:
        device = timing.use_device(options.device)
        shapes = [(block, *shape) for block in blocks for shape in SHAPES[block]]
    except (KeyError, ValueError) as error:
        parser.error(str(error))
    cases = [Case(*shape, mode) for shape in shapes for mode in modes]
    dtype = getattr(torch, options.dtype)
    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": report.machine(device, timing.Monitor(device)),
        "versions": report.versions({}),
        "dtype": options.dtype,
        "blocks": [],
    }
    for case in cases:
        torch.compiler.reset()
        found = measure(case, device, dtype, options.rounds, timing.BURST_MS)
        print(case, *(line(name, entry) for name, entry in found.items()), sep="\n", flush=True)
        result["blocks"].append({"case": str(case), "candidates": found})
        if options.json:
            report.save(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
