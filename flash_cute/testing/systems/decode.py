"""cp_decode: prompts and steps over a cache whose tokens are split over ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_cute.distributed import cp_decode
from flash_cute.testing.distributed import context
from flash_cute.testing.systems import contract, oracle
from flash_cute.testing.systems.findings import Findings

UNITS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2.0**-6, "float16": 2.0**-9}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Calls one after the other: ``steps`` are (new tokens, queries)."""

    seed: int = 0
    ranks: int = 2
    dtype: str = "float64"
    batch: int = 2
    heads: int = 4
    heads_k: int = 2
    dim: int = 4
    dim_v: int = 4
    capacity: int = 16
    page: int = 0  # tokens of a page; 0 is a dense cache
    block: int = 0  # 0 is None
    steps: tuple[tuple[int, int], ...] = ((5, 1), (1, 1))
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float = 0.0
    slopes: str = ""
    sink: bool = False
    lengths: str = "int"  # "int", "tensor"
    num_splits: int = 0
    rolls_back: bool = False  # between calls entries lose some of their last tokens
    return_lse: bool = True
    argument: str = ""  # to be refused; then only this argument is tried,
    value: str = ""  # with this value of contract.BAD


def draw(pick: random.Random) -> Case:
    heads = pick.choice((1, 2, 4, 6))
    capacity = pick.choice((4, 8, 16, 37))
    steps, left = [], 2 * capacity
    for _ in range(pick.randint(1, 4)):
        new = min(left, pick.choice((0, 1, 1, 2, pick.randint(1, 2 * capacity))))
        left -= new
        steps.append((new, pick.choice((1, 1, 2, max(new, 1)))))
    sides = (-1, 0, 1, 3, 255)
    fields: dict[str, Any] = {
        "seed": pick.randrange(2**31), "batch": pick.choice((1, 2, 3)), "heads": heads,
        "dtype": pick.choice(("float64", "float64", "float32", "bfloat16")),
        "heads_k": pick.choice([n for n in (1, 2, 3, 6) if heads % n == 0]),
        "dim": pick.choice((4, 8)), "dim_v": pick.choice((4, 4, 6)), "capacity": capacity,
        "page": pick.choice((0, 0, 0, 4)) if capacity % 4 == 0 else 0,
        "block": pick.choice((0, 0, 1, 2, 3, 4, 5, capacity)), "steps": tuple(steps),
        "causal": pick.random() < 0.4, "softcap": pick.choice((0.0, 0.0, 1.5)),
        "scale": pick.choice((0.0, 0.0, 0.4)), "sink": pick.random() < 0.3,
        "slopes": pick.choice(("", "", "heads", "batch")),
        "lengths": pick.choice(("int", "tensor")),
        "rolls_back": pick.random() < 0.4,
        "num_splits": pick.choice((0, 0, 2)), "return_lse": pick.random() < 0.7,
    }  # fmt: skip
    if pick.random() < 0.5:
        fields["window"] = (pick.choice(sides), pick.choice(sides))
    if fields["slopes"]:
        fields |= {"block": 0, "causal": True}
    if pick.random() < 0.1:
        fields["argument"] = pick.choice(tuple(REFUSED))
        fields["value"] = pick.choice(REFUSED[fields["argument"]])
    return Case(**fields)


REFUSED: contract.Refusals = {
    "block": contract.WHOLE,
    "num_splits": ("minus_one", "true", "half", "nan", "text"),
    "cache_seqlens": ("minus_one", "true", "half", "nan", "text", "none"),
    "softcap": ("minus_one", "nan", "inf", "text", "none"),
    "softmax_scale": ("nan", "inf", "text", "pair"),
    "window_size": contract.WINDOW,
    "causal": ("text", "none"),
    "return_softmax_lse": ("text", "none"),
}


def _check_refusal(find: Findings, case: Case, device: str) -> None:
    name, value = case.argument, contract.BAD[case.value]
    cp = context("all_gather", "auto", 1, device)
    q = torch.randn(1, 1, 2, 4, device=device)
    cache = torch.zeros(1, 8, 2, 4, device=device)
    find.refused(
        lambda: cp_decode(q, cache, cache.clone(), cp, q, q, **{name: value}),
        f"{name}={value!r}", name,
    )  # fmt: skip


def check(case: Case, device: str) -> Findings:
    find = Findings()
    if case.argument:
        _check_refusal(find, case, device)
        return find
    cp = context("all_gather", "auto", 1, device)
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    options = _options(case, device, dtype, generator)
    keys = [randn(0, case.heads_k, case.dim) for _ in range(case.batch)]
    values = [randn(0, case.heads_k, case.dim_v) for _ in range(case.batch)]
    for number, (new, queries) in enumerate(case.steps):
        new = min(new, case.ranks * case.capacity - max(map(len, keys)))
        q = randn(case.batch, queries, case.heads, case.dim)
        k = randn(case.batch, new, case.heads_k, case.dim)
        v = randn(case.batch, new, case.heads_k, case.dim_v)
        used: Any = len(keys[0])
        if case.lengths == "tensor":
            if case.rolls_back:
                keys, values = (
                    [x[: max(len(x) - i % 3, 0)] for i, x in enumerate(y)] for y in (keys, values)
                )
            used = torch.tensor([len(x) for x in keys], dtype=torch.int32, device=device)
        keys = [torch.cat(x) for x in zip(keys, k, strict=True)]
        values = [torch.cat(x) for x in zip(values, v, strict=True)]
        given: dict[str, Any] = {"k": k, "v": v} if new else {}
        try:
            result = cp_decode(q, cp=cp, cache_seqlens=used, **given, **options)
        except ValueError as error:
            is_uneven = bool(case.block and case.capacity % case.block)
            find.that(is_uneven and "block" in str(error), f"step {number}: {str(error)[:200]}")
            find.notes.append(str(error))
            return find
        out, lse = result if case.return_lse else (result, None)
        _compare(find, case, number, q, keys, values, options, out, lse)
        if find.failures:
            return find
    return find


def _options(
    case: Case, device: str, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    """The arguments of every call."""
    options: dict[str, Any] = {
        "softmax_scale": case.scale or None, "causal": case.causal, "window_size": case.window,
        "softcap": case.softcap, "num_splits": case.num_splits, "block": case.block or None,
        "return_softmax_lse": case.return_lse, **_caches(case, device, dtype),
    }  # fmt: skip
    if case.sink:
        options["sink"] = torch.randn(case.heads, generator=generator).to(device)
    if case.slopes:
        shape = (case.heads,) if case.slopes == "heads" else (case.batch, case.heads)
        options["alibi_slopes"] = torch.rand(shape, generator=generator).to(device)
    return options


def _caches(case: Case, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """A cache filled with NaN, so that reads of unwritten rows show."""
    shape: tuple[int, ...] = (case.batch, case.capacity)
    caches: dict[str, Any] = {}
    if case.page:
        pages = case.capacity // case.page
        order = torch.randperm(
            case.batch * pages, generator=torch.Generator().manual_seed(case.seed)
        )
        caches["block_table"] = order.int().view(case.batch, pages).to(device)
        shape = (case.batch * pages, case.page)
    for name, dim in (("k_cache", case.dim), ("v_cache", case.dim_v)):
        caches[name] = torch.full(
            (*shape, case.heads_k, dim), torch.nan, dtype=dtype, device=device
        )
    return caches


def _compare(
    find: Findings, case: Case, number: int, q: Tensor, keys: list[Tensor], values: list[Tensor],
    options: dict[str, Any], out: Tensor, lse: Tensor | None,
) -> None:  # fmt: skip
    window = (case.window[0], 0 if case.causal else case.window[1])
    slopes = options.get("alibi_slopes")
    sink = options.get("sink")
    for b in range(case.batch):
        slopes_b = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        true, true_lse = oracle.attention(
            q[b].double(), keys[b].double(), values[b].double(), scale=case.scale or None,
            window=window, softcap=case.softcap, slopes=slopes_b,
            sink=None if sink is None else sink.double(),
        )  # fmt: skip
        unit = UNITS[case.dtype] if sink is None else max(UNITS[case.dtype], 1e-6)
        size = max(float(true.abs().max()), 1e-3) if true.numel() else 1.0
        find.close(f"step {number}: out of entry {b}", out[b], true, unit * size * 4)
        if lse is not None:
            empty = true_lse == -torch.inf
            same = torch.equal(lse[b] == -torch.inf, empty)
            find.that(same, f"step {number}: rows without keys differ in lse")
            kept = lse[b].masked_fill(empty, 0)
            bound = 1e-9 if case.dtype == "float64" and sink is None else 1e-3
            find.close(f"step {number}: lse", kept, true_lse.masked_fill(empty, 0), bound * 10)
