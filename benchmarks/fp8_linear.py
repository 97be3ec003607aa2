"""fp8 linear layers: `python -m benchmarks.fp8_linear --json F`.

Time of forward and backward of one linear layer in bf16, in fp8 by flash_cute, and by torchao where
it is installed; all compiled, in interleaved rounds. Beside it the bytes that each keeps for
backward, and how far its results are from fp32's.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.precision import FP8Config, convert_model_to_fp8

from .rivals import describe
from .timing import balanced, use_device

BF16, OURS, DELAYED, TORCHAO = "bf16", "flash_cute", "flash_cute delayed", "torchao"


def torchao_layer(linear: nn.Module) -> nn.Module:
    """torchao's layer with a scale a tensor; it leaves a root as it is, so the root is another."""
    convert = importlib.import_module("torchao.float8").convert_to_float8_training
    return convert(nn.Sequential(linear))[0]


MAKERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    BF16: lambda linear: linear,
    OURS: convert_model_to_fp8,
    DELAYED: lambda linear: convert_model_to_fp8(linear, FP8Config(scaling="delayed")),
    TORCHAO: torchao_layer,
}


def step(layer: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the gradients of input and weight."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad  # type: ignore[return-value]


def repeat(calls: int, layer: Any, x: Tensor, dy: Tensor) -> None:
    """That many steps."""
    for _ in range(calls):
        step(layer, x, dy)


def decibels(values: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    """Signal to noise of each value."""
    pairs = zip(values, exact, strict=True)
    errors = [(a.float() - b.float()).norm() / b.float().norm() for a, b in pairs]
    return [round(-20 * float(torch.log10(error)), 1) for error in errors]


def kept_bytes(layer: Any, x: Tensor) -> int:
    """Bytes that forward keeps for backward, those of the parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        layer(x.detach().requires_grad_())
    return sum(kept.values())


def elapsed_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call, the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def measure(tokens: int, width: int, out: int, o: argparse.Namespace) -> dict[str, Any]:
    """One shape: a row of the report."""
    device = torch.device(o.device)
    torch.compiler.reset()  # or there come to be too many versions of one layer's code
    kind: Any = {"device": device, "dtype": torch.bfloat16}
    linear = nn.Linear(width, out, bias=False, **kind)
    x, dy = torch.randn(tokens, width, **kind), torch.randn(tokens, out, **kind)
    exact = step(copy.deepcopy(linear).float(), x.float(), dy.float())
    candidates: dict[str, dict[str, Any]] = {}
    works: dict[str, Callable[[], Any]] = {}
    for name, make in MAKERS.items():
        try:
            layer = make(copy.deepcopy(linear))
            run = torch.compile(layer, fullgraph=True) if o.compile else layer
            errors = decibels(step(run, x, dy), exact)
            bytes_kept = kept_bytes(run, x)
            candidates[name] = {"decibels": errors, "kept_bytes": bytes_kept, "ms": []}
            works[name] = partial(repeat, o.calls, run, x, dy)
        except Exception as error:
            candidates[name] = {"failure": describe(error)}
    for number in range(-1, o.rounds):
        for name in balanced(list(works), number):
            spent = elapsed_ms(works[name], device) / o.calls
            if number >= 0:
                candidates[name]["ms"].append(spent)
    for name in works:
        candidates[name]["median_ms"] = median(candidates[name]["ms"])
    return {"tokens": tokens, "in": width, "out": out, "candidates": candidates}


def describe_row(row: dict[str, Any]) -> str:
    """A line: the shape, each candidate's time and what it gains on bf16."""
    cells = [f"{row['tokens']:6} x {row['in']:5} -> {row['out']:5}"]
    base = row["candidates"][BF16].get("median_ms")
    for name, entry in row["candidates"].items():
        ms = entry.get("median_ms")
        gain = f" ({base / ms:.2f}x)" if ms and base else ""
        cells.append(f"{name} {ms:.3f} ms{gain}" if ms else f"{name}: {entry['failure']}")
    return " | ".join(cells)


def main(argv: list[str] | None = None) -> int:
    """Measures all shapes; returns the exit status, 1 if ours failed somewhere."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20, help="a round")
    parser.add_argument("--eager", dest="compile", action="store_false")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args(argv)
    device = use_device(o.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rows = []
    for width in o.widths:
        rows.append(measure(o.tokens, width, width, o))
        print(describe_row(rows[-1]), flush=True)
        report = {
            "command": "python -m benchmarks.fp8_linear",
            "device": name,
            "torch": torch.__version__,
            "compiled": o.compile,
            "rows": rows,
        }
        if o.json is not None:
            o.json.parent.mkdir(parents=True, exist_ok=True)
            o.json.write_text(json.dumps(report, indent=1))
    return int(any("failure" in row["candidates"][OURS] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
