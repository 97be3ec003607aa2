"""cp_attention by every strategy, layout and mask."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_cute.distributed import ContextParallel, cp_attention
from flash_cute.testing.distributed import context
from flash_cute.testing.systems import contract, oracle
from flash_cute.testing.systems.findings import Findings, compare

STRATEGIES = ("all_gather", "ring", "ulysses", "two_dimensional", "auto")
LAYOUTS = ("auto", "contiguous", "zigzag", "per_document", "balanced")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call on ``ranks`` ranks; documents of one length are a dense batch of two."""

    seed: int = 0
    ranks: int = 2
    strategy: str = "all_gather"
    layout: str = "auto"
    dtype: str = "float64"
    documents: tuple[int, ...] = (9,)
    heads: int = 4
    heads_k: int = 2
    dim: int = 4
    dim_v: int = 4
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float = 0.0  # 0 is None
    slopes: str = ""  # "heads", "batch"
    sink: bool = False
    dropout_p: float = 0.0
    head_groups: int = 1
    deterministic: bool = False
    return_lse: bool = True
    of_lse: bool = False
    with_grad: bool = True
    block: int = 4
    uneven: bool = False  # parts of the caller's own sizes
    also: str = ""  # "jvp", "released"
    argument: str = ""
    value: str = ""


def draw(pick: random.Random) -> Case:
    heads = pick.choice((2, 4, 6, 12))
    lengths = [pick.choice((0, 1, 5, pick.randint(1, 30))) for _ in range(pick.randint(2, 5))]
    lengths[0] = max(lengths[0], 1)
    documents = (pick.randint(1, 40),) if pick.random() < 0.4 else tuple(lengths)
    sides = (-1, 0, 1, 5, 2**31 - 1)
    fields: dict[str, Any] = {
        "seed": pick.randrange(2**31), "strategy": pick.choice(STRATEGIES),
        "layout": pick.choice(LAYOUTS), "documents": documents, "heads": heads,
        "dtype": pick.choice(("float64", "float64", "float32", "bfloat16")),
        "heads_k": pick.choice([n for n in (1, 2, 3, 4, 6, 12) if heads % n == 0]),
        "dim": pick.choice((1, 4, 8)), "dim_v": pick.choice((4, 4, 6)),
        "causal": pick.random() < 0.3, "softcap": pick.choice((0.0, 0.0, 1.5)),
        "scale": pick.choice((0.0, 0.0, 0.4)), "slopes": pick.choice(("", "", "heads", "batch")),
        "sink": pick.random() < 0.3, "head_groups": pick.choice((1, 2, 3)),
        "deterministic": pick.random() < 0.3, "return_lse": pick.random() < 0.7,
        "with_grad": pick.random() < 0.8, "block": pick.choice((1, 4, 128)),
    }  # fmt: skip
    if pick.random() < 0.5:
        fields["window"] = (pick.choice(sides), pick.choice(sides))
    fields["of_lse"] = fields["return_lse"] and pick.random() < 0.5
    if pick.random() < (0.3 if fields["strategy"] == "ulysses" else 0.1):
        fields["dropout_p"] = 0.25
    if pick.random() < 0.15:
        fields["argument"] = pick.choice(tuple(REFUSED))
        fields["value"] = pick.choice(REFUSED[fields["argument"]])
    elif fields["layout"] in ("auto", "contiguous") and pick.random() < 0.3:
        fields["uneven"] = True
    elif pick.random() < 0.1:
        fields["also"] = pick.choice(("jvp", "released"))
    return Case(**fields)


REFUSED: contract.Refusals = {
    "head_groups": contract.WHOLE,
    "strategy": ("text", "none", "zero"),
    "layout": ("text", "none", "zero"),
    "check": ("text", "none", "two"),
    "block": (*contract.WHOLE, "none"),
    "seqlen": ("zero", "minus_one", "true", "half", "nan", "text"),
    "window_size": contract.WINDOW,
    "heads": ("minus_one", "true", "half", "text"),
    "sizes": ("pair", "text", "single"),
    "dropout_p": contract.PROBABILITY,
    "softcap": ("minus_one", "nan", "inf", "text", "none"),
    "softmax_scale": ("nan", "inf", "text", "pair"),
    "deterministic": ("text", "none"),
    "return_lse": ("text", "none"),
    "timeout": ("text", "zero", "minus_one"),
}


def _check_refusal(find: Findings, case: Case, device: str) -> None:
    name, value = case.argument, contract.BAD[case.value]

    def make() -> Any:
        if name in ("head_groups", "strategy", "layout", "check", "timeout"):
            return ContextParallel(**{name: value}).plan(8)
        cp = context("all_gather", "auto", 1, device)
        words = {"window_size": value, "sizes": value, "heads": value, "block": value}
        if name in words:
            return cp.plan(8, **{name: value})
        if name == "seqlen":
            return cp.plan(value)
        plan = cp.plan(8)
        q = torch.randn(1, plan.rows(cp.rank), 2, 4, device=device)
        return cp_attention(q, q, q, plan, **{name: value})

    words = (name, "tokens") if name == "seqlen" else (name,)
    find.refused(make, f"{name}={value!r}", *words)


# --- inputs and expected results -----------------------------------------------------------------


def inputs_of(case: Case, device: str) -> dict[str, Tensor]:
    """Inputs of the whole batch, the same on each rank."""
    generator = torch.Generator().manual_seed(case.seed)
    total, batch = sum(case.documents), len(case.documents)
    lead: tuple[int, ...] = (total,) if batch > 1 else (2, total)
    dtype = getattr(torch, case.dtype)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = {
        "q": randn(*lead, case.heads, case.dim), "k": randn(*lead, case.heads_k, case.dim),
        "v": randn(*lead, case.heads_k, case.dim_v), "dout": randn(*lead, case.heads, case.dim_v),
        "dlse": randn(*lead, case.heads),
    }  # fmt: skip
    made = {name: x.to(device, dtype) for name, x in made.items()}
    if case.sink:
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        made["sink"] = randn(case.heads).to(device, wide)
    if case.slopes:
        batch = batch if batch > 1 else 2
        shape = (case.heads,) if case.slopes == "heads" else (batch, case.heads)
        made["slopes"] = torch.rand(shape, generator=generator).to(device)
    return made


def window_of(case: Case) -> tuple[int, int]:
    return (case.window[0], 0 if case.causal else case.window[1])


def plain(case: Case, slopes: Tensor | None) -> Callable[..., Tensor]:
    """out and lse concatenated, (tokens, heads, dim_v + 1), each document separately."""

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        if len(case.documents) == 1:
            parts = [(q[b], k[b], v[b]) for b in range(len(q))]
        else:
            lengths = list(case.documents)
            parts = list(zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True))
        outs = []
        for number, (q1, k1, v1) in enumerate(parts):
            of = slopes if slopes is None or slopes.dim() == 1 else slopes[number]
            out, lse = oracle.attention(
                q1, k1, v1, scale=case.scale or None, window=window_of(case),
                softcap=case.softcap, slopes=of, sink=sink,
            )  # fmt: skip
            outs.append(torch.cat((out, lse.t()[..., None]), -1))
        return torch.stack(outs) if len(case.documents) == 1 else torch.cat(outs)

    return call


def check(case: Case, device: str) -> Findings:
    find = Findings()
    if case.argument:
        _check_refusal(find, case, device)
        return find
    made = inputs_of(case, device)
    if not ranks_divide_heads(case):
        return find  # documented
    cp = context(case.strategy, case.layout, case.head_groups, device)
    if case.also == "jvp":
        _check_jvp(find, case, cp, made)
    elif case.also == "released":
        _check_released(find, case)
    elif case.dropout_p:
        _check_dropout(find, case, cp, made)
    else:
        _check_values(find, case, cp, made)
    return find


def ranks_divide_heads(case: Case) -> bool:
    """Whether the strategy can split the heads over the ranks."""
    inner = {"ulysses": case.ranks, "two_dimensional": 2 - case.ranks % 2}.get(case.strategy, 1)
    return case.heads % inner == 0


def _plan(case: Case, cp: ContextParallel) -> Any:
    ends = [sum(case.documents[:i]) for i in range(len(case.documents) + 1)]
    options: dict[str, Any] = {"causal": case.causal, "window_size": case.window}
    options |= {"block": case.block, "heads": case.heads, "heads_k": case.heads_k}
    if case.uneven:
        total = ends[-1]
        cuts = sorted((case.seed >> i) % (total + 1) for i in range(cp.size - 1))
        options["sizes"] = [b - a for a, b in itertools.pairwise([0, *cuts, total])]
    if len(case.documents) == 1:
        return cp.plan(case.documents[0], **options)
    return cp.plan(cu_seqlens=ends, **options)


def call_of(case: Case, cp: ContextParallel, made: dict[str, Tensor], **changes: Any) -> Any:
    """This rank's results, and its leaves."""
    plan = _plan(case, cp)
    dim = 0 if plan.packed else 1
    mine = {n: cp.shard(made[n], plan, dim) for n in ("q", "k", "v", "dout", "dlse")}
    if changes.pop("rows", 0):  # more than the plan says
        rows = [x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :]) for x in mine.values()]
        mine = {n: torch.cat((x, y), dim) for (n, x), y in zip(mine.items(), rows, strict=True)}
    leaves = {n: mine[n].detach().clone().requires_grad_(case.with_grad) for n in ("q", "k", "v")}
    if "sink" in made:
        leaves["sink"] = made["sink"].detach().clone().requires_grad_(case.with_grad)
    options: dict[str, Any] = {
        "dropout_p": case.dropout_p, "softmax_scale": case.scale or None, "softcap": case.softcap,
        "alibi_slopes": made.get("slopes"), "deterministic": case.deterministic,
        "sink": leaves.get("sink"), "return_lse": case.return_lse,
    } | changes  # fmt: skip
    q, k, v = (leaves[n] for n in "qkv")
    return cp_attention(q, k, v, plan, **options), leaves, mine, plan


def _check_values(find: Findings, case: Case, cp: ContextParallel, made: dict[str, Tensor]) -> None:
    result, leaves, mine, plan = call_of(case, cp, made)
    dim, dtype = (0 if plan.packed else 1), getattr(torch, case.dtype)
    out, lse = result if case.return_lse else (result, None)
    find.that(out.dtype == dtype, f"out has dtype {out.dtype}")
    got = {}
    rows = None if lse is None else lse.movedim(-2, -1) if plan.packed else lse.transpose(1, 2)
    if case.with_grad:
        total = (out * mine["dout"]).sum()
        if case.of_lse and rows is not None:
            total = (
                total
                + (rows * mine["dlse"].to(rows.dtype)).masked_fill(rows == -torch.inf, 0).sum()
            )
        total.backward()
        got = {f"d{n}": cp.unshard(leaves[n].grad, plan, dim) for n in "qkv"}
        if case.sink:
            grad = leaves["sink"].grad
            of_sink = torch.zeros_like(leaves["sink"]) if grad is None else grad
            if cp.size > 1:
                dist.all_reduce(of_sink, group=cp.group)
            got["dsink"] = of_sink
    got["out"] = cp.unshard(out.detach(), plan, dim)
    whole_lse = None if rows is None else cp.unshard(rows.detach(), plan, dim)
    _compare(find, case, made, got, whole_lse)
    again, *_ = call_of(replace(case, with_grad=False), cp, made)
    find.equal("repeated call", again[0] if case.return_lse else again, out.detach())


def _compare(
    find: Findings, case: Case, made: dict[str, Tensor], got: dict[str, Tensor], lse: Any
) -> None:
    call, dv = plain(case, made.get("slopes")), case.dim_v
    names = ("q", "k", "v", "sink")
    inputs: dict[str, Tensor | None] = {n: made[n] for n in names if n in made}
    exact = {n: made[n].double() for n in inputs}

    def of_loss(**given: Any) -> Tensor:
        both = call(**given)
        seen = torch.where(both[..., dv:] == -torch.inf, 0.0, both[..., dv:])
        return torch.cat((both[..., :dv], seen if case.of_lse else seen.detach()), -1)

    gradient = torch.cat((made["dout"], made["dlse"][..., None]), -1).double()
    dtype = getattr(torch, case.dtype)
    true = of_loss(**exact).detach()
    known = dict(got)
    whole = known.pop("out")
    stats = true[..., dv:] if lse is None else torch.where(lse == -torch.inf, 0.0, lse)[..., None]
    if lse is not None:
        empty = call(**exact)[..., dv] == -torch.inf
        find.that(torch.equal(lse == -torch.inf, empty), "rows without keys differ in lse")
        # Of the sum, the dtype of statistics is fp32, whatever the dtype of values.
        bound = 1e-10 if dtype == torch.float64 else 1e-4
        size = float(true[..., dv:].abs().max()) if true.numel() else 0.0
        find.close("lse", stats, true[..., dv:], bound * max(size, 1.0))
    # Sinks have gradients in fp32's accuracy; results that are merged are rounded twice.
    low = torch.float32 if case.sink and dtype == torch.float64 else dtype
    parts = {n: x for n, x in known.items() if n != "dsink"}
    padded = torch.cat((whole.double(), true[..., dv:]), -1)
    compare(find, {"out": padded, **parts}, of_loss, inputs, gradient, dtype)
    if "dsink" in known:
        compare(find, {"dsink": known["dsink"]}, of_loss, inputs, gradient, low, least=1e-5)


def _check_dropout(
    find: Findings, case: Case, cp: ContextParallel, made: dict[str, Tensor]
) -> None:
    """With values of 1 a row's out is the share of kept weights over 1 - p. It is the same for the
    same state, which only the first rank draws, and differs for another."""
    ones = {**made, "v": torch.ones_like(made["v"])}
    state = torch.tensor([case.seed, 1 + cp.rank], device=made["q"].device)
    single = replace(case, return_lse=True, with_grad=False)
    must_refuse = case.ranks > 1 and _plan(case, cp).strategy != "ulysses"
    outs = []
    for _ in range(2):
        try:
            (out, *_), _, _, plan = call_of(single, cp, ones, rng=state)
        except NotImplementedError as error:
            find.that(must_refuse and "dropout_p" in str(error), f"dropout: {str(error)[:200]}")
            return
        outs.append(cp.unshard(out, plan, 0 if plan.packed else 1))
    find.that(not must_refuse, "dropout is taken by a strategy that does not have it")
    find.equal("dropout from one state", outs[1], outs[0])
    spread = float((outs[0][..., :1] - outs[0]).abs().max()) if outs[0].numel() else 0.0
    find.that(spread <= 1e-2, f"dims differ in what is dropped: {spread}")
    share = float(outs[0].double().mean())
    true = plain(case, made.get("slopes"))(*(ones[n].double() for n in "qkv"), ones.get("sink"))
    expected = float(true[..., :-1].mean())
    # A row has weight at most 1, with variance at most p / (1 - p); rows are independent.
    deviation = (1 / 3 / max(outs[0][..., 0].numel(), 1)) ** 0.5
    off = abs(share - expected)
    whole = true[..., :-1].to(outs[0].device)
    is_plain = torch.allclose(outs[0].double(), whole.double(), rtol=1e-2, atol=1e-2)
    find.that(not is_plain or whole.numel() < 200 or float(whole.max()) < 0.5,
              "dropout drops nothing")  # fmt: skip
    find.that(off <= 6 * deviation + 0.02, f"dropout keeps {share:.3f}; {expected:.3f} is expected")


def _check_jvp(find: Findings, case: Case, cp: ContextParallel, made: dict[str, Tensor]) -> None:
    """A forward derivative is refused, or not zero."""
    plan = _plan(case, cp)
    q, k, v = (cp.shard(made[n], plan, 0 if plan.packed else 1) for n in "qkv")
    try:
        both: Any = torch.func.jvp(lambda v: cp_attention(q, k, v, plan), (v,), (v,))
    except (RuntimeError, NotImplementedError, ValueError):
        return
    out = cp_attention(q, k, v, plan)  # linear in v: its own derivative along v
    size = max(float(out.abs().max()), 1e-3) if out.numel() else 1.0
    find.close("jvp", both[1], out, 2.0**-6 * size)


def _check_released(find: Findings, case: Case) -> None:
    """A ContextParallel is freed with its last user."""
    made = ContextParallel(strategy="all_gather")
    made.plan(8)
    alive = weakref.ref(made)
    del made
    gc.collect()
    find.that(alive() is None, "a ContextParallel without users lives on")
