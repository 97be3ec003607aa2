"""Random problems of every kind of call, and what is planned for them, as lines of text.

``python tests/planned_problems.py`` compares with the recorded lines and prints what differs;
``--write`` records today's instead.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flash_cute import kernels

RECORD = Path(__file__).parent / "golden" / "plans.txt.gz"
SEED, COUNT = 20261128, 5000
KINDS = ("dense", "packed", "backward", "cached", "paged")
GPUS = ("h100", "h100", "h200", "a100")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def pick(draw: random.Random, *values: Any) -> Any:
    """One of the values; the same on every Python, which `random.choice` does not promise."""
    return values[int(draw.random() * len(values))]


def size(draw: random.Random, most: int) -> int:
    """A length from 1 to `most`: small and large ones alike, often next to a power of two."""
    bits = draw.random() * (most.bit_length() - 1)
    number = int(2**bits) if draw.random() < 0.5 else (1 << round(bits)) + pick(draw, -1, 0, 1)
    return max(1, min(number, most))


def fields_of(draw: random.Random) -> dict[str, Any]:
    """The fields of a `kernels.Problem`, as JSON holds them."""
    kind = pick(draw, *KINDS)
    heads_k, over_cache = pick(draw, 1, 1, 2, 4, 8, 16, 32), kind in ("cached", "paged")
    few, many = pick(draw, 1, 1, 2, 4, 16, size(draw, 8192)), size(draw, 65536)
    given: dict[str, Any] = {
        "op": {"backward": "bwd", "cached": "decode", "paged": "decode"}.get(kind, "fwd"),
        "dtype": pick(draw, "bf16", "bf16", "fp16", "fp32"),
        "batch": size(draw, 256), "heads_k": heads_k,
        "heads": heads_k * pick(draw, 1, 1, 2, 4, 5, 8, 16),
        "seqlen_q": few if over_cache else many,
        "head_dim": pick(draw, 64, 64, 128, 128, 128, 96, 192, 256, 40, 80, 72, size(draw, 256)),
    }  # fmt: skip
    same_length = not over_cache and draw.random() < 0.6
    given["seqlen_k"] = given["seqlen_q"] if same_length else size(draw, 1 << 17)
    if draw.random() < 0.1:
        given["head_dim_v"] = pick(draw, 64, 128, 256, 8)
    if draw.random() < 0.5:
        given["causal"] = True
    elif draw.random() < 0.4:
        given["window_size"] = [size(draw, 4096), pick(draw, 0, 0, -1, size(draw, 4096))]
    flags = ["softcap", "alibi", "unaligned", "allow_tf32"]
    flags += [] if over_cache else ["dropout"]
    flags += ["deterministic", "fp32_gradients"] if kind == "backward" else []
    flags += ["lengths", "leftpad"] if over_cache else []
    given |= {name: True for name in flags if draw.random() < 0.12}
    if kind == "packed" or (kind == "backward" and draw.random() < 0.4):
        rows = {x: given["batch"] * given[f"seqlen_{x}"] for x in "qk"}
        given |= {"varlen": True}
        given |= {f"total_{x}": max(1, int(most * draw.random())) for x, most in rows.items()}
    if kind == "paged":
        given |= {"page_size": pick(draw, 1, 16, 64, 128, 256, 100), "lengths": True}
    if over_cache and draw.random() < 0.1:
        given |= pick(draw, {"num_splits": size(draw, 64)}, {"split_size": size(draw, 4096)})
    return given


def problem_of(fields: dict[str, Any]) -> kernels.Problem:
    """The problem that `fields_of` drew."""
    changed = {"dtype": _DTYPES[fields["dtype"]]}
    if "window_size" in fields:
        changed["window_size"] = tuple(fields["window_size"])
    return kernels.Problem(**(fields | changed))


def planned(problem: kernels.Problem, gpu: str) -> dict[str, Any]:
    """What of the plan is no default, with its kernel's id; or why there is none."""
    try:
        plan = kernels.plan(problem, gpu)
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    facts = dataclasses.asdict(plan)
    defaults = {field.name: field.default for field in dataclasses.fields(plan)}
    facts = {name: value for name, value in facts.items() if value != defaults[name]}
    return facts | {"kernel": plan.kernel.id}


def lines() -> Iterator[str]:
    """A GPU, a problem and its plan in each line."""
    draw = random.Random(SEED)
    for _ in range(COUNT):
        gpu, fields = pick(draw, *GPUS), fields_of(draw)
        plan = planned(problem_of(fields), gpu)
        yield f"{gpu}\t{json.dumps(fields)}\t{json.dumps(plan, sort_keys=True)}"


def recorded() -> list[str]:
    """The lines that were recorded."""
    return gzip.decompress(RECORD.read_bytes()).decode().splitlines()


def differences() -> list[str]:
    """Both lines of each problem that is planned otherwise than recorded."""
    return [
        f"recorded: {before}\nnow:      {now}"
        for before, now in zip(recorded(), lines(), strict=True)
        if before != now
    ]


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        text = "".join(f"{line}\n" for line in lines())
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_bytes(gzip.compress(text.encode(), mtime=0))
        return 0
    found = differences()
    print("\n".join(found), f"{len(found)} of {COUNT} problems are planned otherwise", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
