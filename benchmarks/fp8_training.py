"""What training with fp8 attention costs on a GPU, and what it learns.

    python -m benchmarks.fp8_training --json build/fp8_training.json
    python -m benchmarks.fp8_training --steps 500

Without ``--steps``: times of a layer's attention, batch 4 and 16 heads. "quantise" rounds q, k and
v to e4m3, "widen" makes bf16 of them again, "backward" is that of bf16 over either. ``backward
ratio`` is bf16's backward to the sum of quantise, widen and the same backward; ``step ratio`` is
forward and backward of bf16 to quantise, the forward of e4m3, widen and backward. Medians of turns,
with an empty L2.

With ``--steps``: the loss on held-out text of the demo's GPT (examples/train_gpt.py), trained from
the same weights on the same text with attention in bf16 and in fp8.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import turns
from flash_cute import ops
from flash_cute.functional.kept import attention
from flash_cute.functional.kept_autograd import Fp8Form

EXAMPLES = Path(__file__).parents[1] / "examples"
FORMS = {"tensor": (), "head": (-2,)}


def form_of(scaling: str) -> Fp8Form:
    return Fp8Form(torch.float8_e4m3fn, FORMS[scaling])


def parts(seqlen: int, dim: int, causal: bool, scaling: str) -> dict[str, Any]:
    """Calls of each part, by name."""
    form = form_of(scaling)
    q, k, v = torch.randn(3, 4, seqlen, 16, dim, device="cuda", dtype=torch.bfloat16).unbind()
    kept = [form.keep(x) for x in (q, k, v)]
    out, softmax_lse, _, _ = ops.fwd(q, k, v, is_causal=causal)
    dout = torch.randn_like(out)
    descales = [scale.float().reshape(1, -1).expand(4, 16) for _, scale in kept]
    values = [x for x, _ in kept]
    return {
        "bf16 forward": partial(ops.fwd, q, k, v, is_causal=causal),
        "e4m3 forward": partial(ops.fp8_fwd, *values, *descales, is_causal=causal),
        "quantise": lambda: [form.keep(x) for x in (q, k, v)],
        "widen": lambda: [form.widen(*x, q.dtype) for x in kept],
        "backward": partial(ops.bwd, dout, q, k, v, out, softmax_lse, is_causal=causal),
    }


def measure(options: argparse.Namespace, seqlen: int, dim: int, causal: bool) -> dict[str, Any]:
    ms = turns(parts(seqlen, dim, causal, options.scaling), options.rounds)
    around = ms["quantise"] + ms["widen"] + ms["backward"]
    return {
        "seqlen": seqlen, "dim": dim, "causal": causal, "ms": ms,
        "backward_ratio": ms["backward"] / around,
        "step_ratio": (ms["bf16 forward"] + ms["backward"]) / (around + ms["e4m3 forward"]),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a table in Markdown."""
    names = list(rows[0]["ms"])
    head = ["case", *(f"{name} us" for name in names), "backward ratio", "step ratio"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        case = f"{row['seqlen']} d{row['dim']} {'causal' if row['causal'] else 'full'}"
        times = [f"{1e3 * row['ms'][name]:.0f}" for name in names]
        lines.append([case, *times, f"{row['backward_ratio']:.3f}", f"{row['step_ratio']:.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, scaling: str = "tensor") -> Tensor:
    """Causal attention of q, k and v that are rounded to e4m3, with gradients of 16 bits."""
    dtype = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled() else q.dtype
    tensors = (q.to(dtype), k.to(dtype), v.to(dtype))
    return attention(
        tensors, form_of(scaling), {}, causal=True, window_size=(-1, -1), softmax_scale=None,
        softcap=0.0, deterministic=False, dropout_p=0.0,
    )  # fmt: skip


def losses(options: argparse.Namespace) -> dict[str, float]:
    """The held-out loss after so many steps, in nats a byte, by attention."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt import flash_cute_attention
    from train_gpt import CPU, CUDA, load_text, measure

    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = replace(CUDA if device == "cuda" else CPU, steps=options.steps)
    text = load_text(None).to(device)
    found = {}
    fp8 = partial(fp8_attention, scaling=options.scaling)
    for name, call in (("bf16", flash_cute_attention), ("fp8", fp8)):
        found[name] = measure(call, text, settings, False, lambda **_: None).held_out_loss
        print(f"{name}: {found[name]:.4f}", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--scaling", choices=sorted(FORMS), default="tensor")
    parser.add_argument("--steps", type=int, help="train instead of measuring times")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    found: dict[str, Any] = {"torch": torch.__version__, "scaling": options.scaling}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    if options.steps:
        found |= {"steps": options.steps, "loss": losses(options)}
    else:
        cases = [(s, d, c) for d in options.dims for s in options.seqlens for c in (False, True)]
        found["rows"] = [measure(options, *case) for case in cases]
        print(table(found["rows"]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
