"""Random calls over caches and pages, and the CUDA kernels that the profiler sees in each.

``python tests/cached_kernels.py FILE`` writes, on the GPU at hand, one line of JSON a call: its
arguments, what ``FLASH_CUTE_LOG=plan`` says of it, and the kernels in the order in which they ran.
"""

from __future__ import annotations

import gzip
import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from planned_problems import pick, size
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import flash_cute
from flash_cute.kernels import plan_log

RECORD = Path(__file__).parent / "golden" / "cached_kernels_h200.jsonl.gz"
SEED, COUNT = 20261128, 300
_MOST_BYTES = 128 << 20  # of a cache
_MARK = "erfinv"  # torch's kernel before and after each call
_PASSES = {
    "append_and_rotate": "append_keys", "count_keys": "count_paged_keys", "fill_gaps": "zero_fill",
    "gather": "gather_pages", "merge_rows": "combine_splits", "pad": "pad_rows",
    "transpose": "transpose_values",
}  # fmt: skip
_CONFIG = re.compile(r"KernelConfig\{([^}]*)\}")
_NUMBER = re.compile(r"(?:\([^)]*\))?(-?\d+)")
_OPS, _DTYPES, _TIERS, _TILES = (
    ("fwd", "bwd", "decode"),
    ("fp16", "bf16", "tf32", "tf32x3", "e4m3", "int8"),
    ("plain", "rich"),
    ("", "_list", "_tokens"),
)


def fields_of(draw: random.Random) -> dict[str, Any]:
    """One call, as JSON holds it."""
    kind = pick(draw, "cached", "cached", "paged", "paged", "packed")
    heads_k, dim = pick(draw, 1, 2, 4, 8), pick(draw, 64, 128, 128, 256, 96, 192, 80, 68)
    page_size = 0 if kind == "cached" else pick(draw, 1, 16, 64, 128, 256, 100)
    given = {
        "kind": kind, "dtype": pick(draw, "bfloat16", "bfloat16", "float16"), "dim": dim,
        "heads_k": heads_k, "heads": heads_k * pick(draw, 1, 2, 4, 5, 8, 16),
        "page_size": page_size,
        "seqlen_q": pick(draw, 1, 1, 2, 4, 17, 128, size(draw, 2048)), "batch": size(draw, 64),
    }  # fmt: skip
    row = given["batch"] * heads_k * dim * 2
    given["capacity"] = size(draw, max(2, min(1 << 16, _MOST_BYTES // row)))
    if kind == "packed":
        flags = ["seqused_q", "dropout", "unaligned", "return_attn_probs"]
    else:
        flags = ["append", "append", "leftpad", "lengths", "batch_idx", "varlen"]
        if draw.random() < 0.15:
            given |= pick(draw, {"num_splits": size(draw, 32)}, {"split_size": size(draw, 2048)})
    rare = {name: True for name in (*flags, "softcap", "alibi", "sink") if draw.random() < 0.12}
    given |= rare | ({"causal": True} if draw.random() < 0.6 else {})
    if given.get("append"):
        given |= {"rotary": True} if draw.random() < 0.5 else {}
        given["lengths"] = True
    return given


def call_of(fields: dict[str, Any], device: str = "cuda") -> Callable[[], object]:
    """The call over fresh tensors; on the CPU their values are what was in memory."""
    draw = random.Random(json.dumps(fields))
    dtype, fresh = getattr(torch, fields["dtype"]), torch.randn if device == "cuda" else torch.empty
    batch, rows, capacity = (fields[name] for name in ("batch", "seqlen_q", "capacity"))
    heads, heads_k, dim, page = (fields[name] for name in ("heads", "heads_k", "dim", "page_size"))

    def normal(*shape: int) -> Tensor:
        last = shape[-1] + (fields.get("unaligned", False) and 1)
        return fresh(*shape[:-1], last, dtype=dtype, device=device)[..., : shape[-1]]

    def ints(values: Iterator[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    blocks = -(-capacity // page) if page else 1
    pages = batch * blocks
    cache = [normal(pages, page or capacity, heads_k, dim) for _ in "kv"]
    room = blocks * page if page else capacity
    options: dict[str, Any] = {"causal": fields.get("causal", False)}
    if fields.get("softcap"):
        options["softcap"] = 20.0
    if fields.get("alibi"):
        options["alibi_slopes"] = torch.rand(heads, device=device)
    if fields.get("sink"):
        options["learnable_sink"] = torch.randn(heads, device=device)
    table = torch.randperm(pages, device=device).int().view(batch, blocks) if page else None
    cu = ints(range(0, batch * rows + 1, rows))
    lengths = ints(1 + int(draw.random() * max(1, room - 1)) for _ in range(batch))
    if fields["kind"] == "packed":
        if fields.get("dropout"):
            options["dropout_p"] = 0.25
        if fields.get("seqused_q"):
            options["seqused_q"] = ints(int(draw.random() * (rows + 1)) for _ in range(batch))
        if fields.get("return_attn_probs") and batch * rows * heads * room < 1 << 28:
            options["return_attn_probs"] = True
        cu_k = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        q = normal(batch * rows, heads, dim)
        return lambda: flash_cute.flash_attn_varlen_func(
            q, *cache, cu, cu_k, rows, room, block_table=table, **options
        )
    q = (
        normal(batch * rows, heads, dim)
        if fields.get("varlen")
        else normal(batch, rows, heads, dim)
    )
    if fields.get("varlen"):
        options |= {"cu_seqlens_q": cu, "max_seqlen_q": rows}
    if fields.get("append"):
        new = max(1, min(rows, room // 2))
        options |= {name: normal(batch, new, heads_k, dim) for name in "kv"}
        lengths = (lengths - new).clamp(min=0)
        if fields.get("rotary"):
            turns = torch.rand(room + rows, dim // 4, device=device)
            options |= {"rotary_cos": turns.cos().to(dtype), "rotary_sin": turns.sin().to(dtype)}
    if fields.get("lengths") or page:
        options["cache_seqlens"] = lengths
    if fields.get("leftpad"):
        options |= {"cache_leftpad": lengths // 3, "cache_seqlens": lengths}
    if fields.get("batch_idx") and not page:
        options["cache_batch_idx"] = torch.randperm(batch, device=device).int()
    options |= {name: fields[name] for name in ("num_splits", "split_size") if name in fields}
    return lambda: flash_cute.flash_attn_with_kvcache(q, *cache, block_table=table, **options)


def kernel_name(name: str) -> str:
    """A kernel of attention by its id, a pass as a route names it."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    function = re.sub(r"[<(].*", "", plain).split("::")[-1]
    found = _CONFIG.search(name)
    if found is None or function in _PASSES:  # a pass may have its kernel's configuration, too
        return renamed(function)
    op, arch, dtype, tier, *rest = (int(x) for x in _NUMBER.findall(found[1]))
    dims, (m, n, stages, warps, ctas), cluster, tiles = rest[:2], rest[2:7], rest[7:8], rest[8:9]
    cache = rest[9] if rest[9:] else dtype
    kind = f"{_OPS[op]}_sm{arch}_{_DTYPES[dtype]}_{_TIERS[tier]}_d{dims[0]}x{dims[1]}"
    suffix = f"_x{cluster[0]}" if arch == 90 and cluster else ""
    suffix += _TILES[tiles[0] if tiles else 0] + (f"_{_DTYPES[cache]}" if cache != dtype else "")
    return f"{kind}_m{m}_n{n}_s{stages}_w{warps}_c{ctas}{suffix}"


def renamed(function: str) -> str:
    """A pass by its name in routes."""
    return _PASSES.get(function, function)


def launches_of(line: str) -> list[str]:
    """What a line of the log says that a call launches."""
    route = line.rpartition(": ")[2]
    return [name.split()[0] for name in route.split(" > ")]


def recorded() -> list[dict[str, Any]]:
    """The calls that were recorded on an H200."""
    lines = gzip.decompress(RECORD.read_bytes()).decode().splitlines()
    return [json.loads(line) for line in lines[1:]]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def e4m3_fields_of(draw: random.Random) -> dict[str, Any]:
    """One call of e4m3 inputs, as JSON holds it."""
    heads_k = pick(draw, 1, 2, 4)
    given = {
        "dim": pick(draw, 64, 128, 256, 80, 40, 13), "dim_v": pick(draw, 64, 128, 256, 24, 7),
        "heads_k": heads_k, "heads": heads_k * pick(draw, 1, 4), "batch": size(draw, 8),
        "seqlen_q": size(draw, 500), "capacity": size(draw, 1000),
        "page_size": pick(draw, 0, 0, 1, 16, 100, 256), "softcap": draw.random() < 0.2,
    }  # fmt: skip
    return given | {"packed": given["page_size"] > 0 or draw.random() < 0.5}


def e4m3_call_of(fields: dict[str, Any], device: str = "cuda") -> Callable[[], object]:
    """The call over fresh tensors."""
    batch, rows, keys, page = (fields[x] for x in ("batch", "seqlen_q", "capacity", "page_size"))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(torch.float8_e4m3fn)

    blocks = -(-keys // page) if page else 0
    lead = (
        (batch * blocks, page) if page else (batch * keys,) if fields["packed"] else (batch, keys)
    )
    q = normal(
        *((batch * rows,) if fields["packed"] else (batch, rows)), fields["heads"], fields["dim"]
    )
    k, v = (normal(*lead, fields["heads_k"], fields[x]) for x in ("dim", "dim_v"))
    options: dict[str, Any] = {"causal": True, "softcap": 20.0 * fields["softcap"]}
    if not fields["packed"]:
        return lambda: flash_cute.flash_attn_func(q, k, v, **options)
    cu_q, cu_k = (
        torch.arange(0, batch * n + 1, n, dtype=torch.int32, device=device) for n in (rows, keys)
    )
    if page:
        table = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
        options["block_table"] = table
    return lambda: flash_cute.flash_attn_varlen_func(q, k, v, cu_q, cu_k, rows, keys, **options)


def observed(
    cases: list[dict[str, Any]], call_of: Callable[[dict[str, Any]], Callable[[], object]] = call_of
) -> Iterator[dict[str, Any]]:
    """Each case with its log and its kernels."""
    log = Lines()
    logging.getLogger("flash_cute").addHandler(log)
    logging.getLogger("flash_cute").setLevel(logging.INFO)
    told: list[dict[str, Any]] = []
    mark = torch.zeros(1, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for fields in cases:
            call = call_of(fields)
            mark.erfinv_()
            log.lines.clear()
            try:
                with torch.no_grad(), plan_log.switched():
                    call()
                told.append({"case": fields, "log": log.lines[:]})
            except (RuntimeError, ValueError, NotImplementedError) as error:
                told.append({"case": fields, "error": str(error).splitlines()[0]})
            mark.erfinv_()
            del call
        torch.cuda.synchronize()
    events = [
        e for e in profiled.profiler.kineto_results.events() if "CUDA" in str(e.device_type())
    ]
    events.sort(key=lambda event: event.start_ns())
    parts: list[list[str]] = [[]]
    for event in events:
        if _MARK in event.name():
            parts.append([])
        elif "flash_cute" in event.name():  # torch's own make the tensors
            parts[-1].append(event.name())
    for fields, names in zip(told, parts[1::2], strict=False):
        yield fields | {"kernels": [kernel_name(name) for name in names]}


def main() -> int:
    draw = random.Random(SEED)
    cases = [fields_of(draw) for _ in range(COUNT)]
    head = {"gpu": torch.cuda.get_device_name()}
    text = "".join(f"{json.dumps(line)}\n" for line in (head, *observed(cases)))
    Path(sys.argv[1]).write_bytes(gzip.compress(text.encode(), mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
