"""Ring and context-parallel layers with tokens split over ranks."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flash_cute.testing.systems import layers
from flash_cute.testing.systems.findings import Findings, compare

ALSO = ("", "", "deepcopy", "pickle", "longest", "differ_longest", "differ_width", "differ_mask",
        "default_group")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer, and how many tokens each rank has (``sizes``, repeated)."""

    seed: int = 0
    ranks: int = 2
    kind: str = "ring"
    also: str = ""
    dtype: str = "float64"
    batch: int = 2
    sizes: tuple[int, ...] = (3,)
    heads: int = 6
    heads_k: int = 0
    dim: int = 4
    bias: bool = True
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float = 0.0
    mask: str = ""


def draw(pick: random.Random) -> Case:
    heads = pick.choice((2, 4, 6, 12))
    fields: dict[str, Any] = {
        "seed": pick.randrange(2**31), "kind": pick.choice(("ring", "context_parallel")),
        "also": pick.choice(ALSO), "dtype": pick.choice(("float64", "float64", "float32")),
        "batch": pick.choice((1, 2)), "heads": heads,
        "sizes": tuple(pick.choice((0, 1, 3, 8, 20)) for _ in range(pick.choice((1, 2, 3)))),
        "heads_k": pick.choice([0, *(n for n in (1, 2, 3) if heads % n == 0)]),
        "dim": pick.choice((4, 8)), "bias": pick.random() < 0.7, "is_causal": pick.random() < 0.5,
        "softcap": pick.choice((0.0, 1.5)), "scale": pick.choice((0.0, 0.4)),
    }  # fmt: skip
    if max(fields["sizes"]) == 0:
        fields["sizes"] = (4,)
    if pick.random() < 0.4:
        fields["mask"] = pick.choice(("bool", "int64"))
    elif pick.random() < 0.4:
        fields["window"] = (pick.choice((-1, 0, 3)), pick.choice((-1, 0, 3)))
    if fields["also"] == "default_group":
        fields["kind"] = "ring"
    return Case(**fields)


def _layer_case(case: Case, seqlen: int) -> layers.Case:
    return layers.Case(
        seed=case.seed, kind=case.kind, dtype=case.dtype, batch=case.batch, seqlen=seqlen,
        heads=case.heads, heads_k=case.heads_k, dim=case.dim, bias=case.bias,
        is_causal=case.is_causal, window=case.window, softcap=case.softcap, scale=case.scale,
        mask=case.mask, poison="nan" if case.mask else "",
    )  # fmt: skip


def _layer(case: Case, whole: layers.Case, device: str, longest: int) -> Any:
    from flash_cute.attention import create_context_parallel_attention, create_ring_attention

    fields: dict[str, Any] = {
        "num_kv_heads": case.heads_k or None, "bias": case.bias, "window_size": case.window,
        "softmax_scale": case.scale or None, "softcap": case.softcap,
        "dtype": getattr(torch, case.dtype),
        "group": None if case.also == "default_group" else dist.group.WORLD,
    }  # fmt: skip
    width = case.heads * case.dim
    made: nn.Module
    if case.kind == "ring":
        made = create_ring_attention(width, case.heads, longest, **fields)
    else:
        made = create_context_parallel_attention(width, case.heads, case.ranks, **fields)
    made.load_state_dict(layers.make(whole, "cpu", case.seed).state_dict())
    return made.to(device).eval()


def check(case: Case, device: str) -> Findings:
    find, rank = Findings(), dist.get_rank()
    sizes = [case.sizes[i % len(case.sizes)] for i in range(case.ranks)]
    total = sum(sizes)
    if total == 0:
        return find  # documented: a batch has tokens
    whole = _layer_case(case, total)
    inputs = layers.inputs_of(whole, device)
    x, mask = inputs["x"], inputs["mask"]
    assert x is not None
    longest = 10**6
    if case.also == "longest":
        longest = total - 1 if case.kind == "ring" else longest
    if case.also == "differ_longest" and rank == case.ranks - 1:
        longest = total - 1 if case.kind == "ring" else longest
    layer = _layer(case, whole, device, max(longest, 1))
    start = sum(sizes[:rank])
    mine = x.narrow(1, start, sizes[rank]).detach().clone().requires_grad_()
    my_mask = None if mask is None else mask.narrow(1, start, sizes[rank]).clone()
    if rank == case.ranks - 1:
        if case.also == "differ_width":
            mine = torch.cat((mine, mine), -1).detach()
        elif case.also == "differ_mask" and case.ranks > 1:
            my_mask = None if mask is not None else torch.ones(mine.shape[:2], device=device).bool()
    _check_call(find, case, layer, whole, inputs, mine, my_mask, (start, sizes[rank], longest))
    return find


def _must_raise(case: Case, total: int) -> bool:
    if case.also in ("longest", "differ_longest"):
        differs = case.also == "differ_longest" and case.ranks > 1
        return case.kind == "ring" and (total > 1 or differs)
    return case.also == "differ_width" or (case.also == "differ_mask" and case.ranks > 1)


def _check_call(
    find: Findings, case: Case, layer: Any, whole: layers.Case, inputs: dict[str, Tensor | None],
    mine: Tensor, mask: Tensor | None, place: tuple[int, int, int],
) -> None:  # fmt: skip
    start, rows, _ = place
    try:
        out = layer(mine, mask, is_causal=case.is_causal)
    except (ValueError, TypeError, NotImplementedError) as error:
        find.notes.append(f"{type(error).__name__}: {error}")
        must = _must_raise(case, whole.seqlen) or _looks_ahead(case)
        find.that(must, f"raised {type(error).__name__}: {str(error)[:200]}")
        return
    if _must_raise(case, whole.seqlen):
        find.that(False, f"{case.also}: taken, where all ranks must raise")
        return
    named = layers.names_of(layer)
    everything = {n: v for n, v in (inputs | named).items() if n != "mask"}
    gradient = torch.randn(
        case.batch, whole.seqlen, case.heads * case.dim,
        generator=torch.Generator().manual_seed(case.seed + 1),
    ).to(mine.device)  # fmt: skip
    part = gradient.narrow(1, start, rows).to(out.dtype)
    wanted = {n: p for n, p in named.items() if p is not None}
    grads = torch.autograd.grad(out, [mine, *wanted.values()], part, allow_unused=True)
    got = {"out": _joined(out.detach(), case), "dx": _joined(grads[0], case)}
    for (name, p), grad in zip(wanted.items(), grads[1:], strict=True):
        total = torch.zeros_like(p) if grad is None else grad.clone()
        dist.all_reduce(total)
        got[f"d{name}"] = total.detach()
    call, full = layers.plain(whole), inputs["mask"]
    dtype = getattr(torch, case.dtype)
    compare(find, got, lambda **x: call(mask=full, **x), everything, gradient, dtype)
    _check_copies(find, case, layer, mine, mask, out.detach())


def _looks_ahead(case: Case) -> bool:
    right = 0 if case.is_causal else case.window[1]
    return bool(case.mask) and (right > 0 or (right < 0 and case.window[0] >= 0))


def _joined(x: Tensor, case: Case) -> Tensor:
    """All ranks' tokens."""
    parts: list[Any] = [None] * case.ranks
    dist.all_gather_object(parts, x.cpu())
    return torch.cat(parts, 1).to(x.device)


def _check_copies(
    find: Findings, case: Case, layer: Any, mine: Tensor, mask: Any, out: Tensor
) -> None:
    """A copy has the same group; a loaded layer has it, too, or raises that it has none."""
    if case.also == "deepcopy":
        other = copy.deepcopy(layer)
        find.equal("deepcopy", other(mine, mask, is_causal=case.is_causal).detach(), out)
    elif case.also == "pickle":
        other = pickle.loads(pickle.dumps(layer))
        try:
            again = other(mine, mask, is_causal=case.is_causal).detach()
        except (ValueError, RuntimeError, TypeError) as error:
            find.notes.append(str(error))
            return
        find.equal("pickle", again, out)
