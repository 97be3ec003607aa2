"""Calls of e4m3 queries over e4m3 caches, and what each sequence of them stands for."""

from __future__ import annotations

from typing import Any

import torch
from fp8_calls import check, scales, values
from fp8_oracle import E4M3, exact, offsets
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flash_cute

HEADS, HEADS_K, DIM, DIM_V, QUERIES = 4, 2, 64, 48, 40  # 80 rows of queries a kv head
LENGTHS = (300, 131, 40, 0)
LAYOUTS = ("dense", "index", "pages of 16", "pages of 40")
OP = "flash_cute::fp8_varlen_fwd"


class Ops(TorchDispatchMode):
    """The operators that a call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


class Prompts:
    """Arguments of a call: fresh numbers, NaN where nothing may read, descales of ``kinds`` for q,
    k and v. Queries of packed sequences are as many as keys at most."""

    def __init__(
        self, layout: str = "dense", kinds: tuple[str, str, str] = ("none",) * 3,
        packed: bool = False, lengths: tuple[int, ...] = LENGTHS,
    ) -> None:  # fmt: skip
        batch, self.lengths = len(lengths), lengths
        rows, columns = {"pages of 16": (16, 20), "pages of 40": (40, 8)}.get(layout, (310, 1))
        pages = batch * columns + 3
        self.page, self.table = rows, torch.randperm(pages)[:-3].view(batch, columns).int()
        if layout == "dense":
            self.table = torch.arange(batch).view(batch, 1).int()
        self.caches = [values(pages, rows, HEADS_K, d).float() for d in (DIM, DIM_V)]
        self.queries = [min(n, QUERIES) if packed else QUERIES for n in lengths]
        self.q = values(sum(self.queries), HEADS, DIM)
        shapes = {
            "one": (1,), "scalar": (), "heads": (HEADS_K,), "batch": (batch, HEADS_K),
            "rows": (len(self.q), HEADS, 1), "tokens": (pages, rows, HEADS_K),
        }  # fmt: skip
        self.descales = [
            {"none": None, "number": 0.7}[x] if x in ("none", "number") else scales(*shapes[x])
            for x in kinds
        ]
        unseen = torch.ones(pages, rows, dtype=torch.bool)
        for b in range(batch):
            unseen[self.places(b)] = False
        for cache in self.caches:
            cache[unseen] = torch.nan
        if kinds[1] == "tokens":
            self.descales[1][unseen] = torch.nan
        named = zip(("q_descale", "k_descale", "v_descale"), self.descales, strict=True)
        self.arguments: dict[str, Any] = {
            "q": self.q if packed else self.q.view(batch, QUERIES, HEADS, DIM),
            "k_cache": self.caches[0].to(E4M3), "v_cache": self.caches[1].to(E4M3),
            "cache_seqlens": torch.tensor(lengths).int(), "return_softmax_lse": True,
            **{name: x for name, x in named if x is not None},
        }  # fmt: skip
        if kinds[0] == "rows" and not packed:
            self.arguments["q_descale"] = self.descales[0].view(batch, QUERIES, HEADS, 1)
        if packed:
            self.arguments["cu_seqlens_q"] = offsets("cpu", *self.queries)
            self.arguments["max_seqlen_q"] = QUERIES
        if layout == "index":
            self.arguments["cache_batch_idx"] = self.table[:, 0].contiguous()
        elif columns > 1:
            self.arguments["block_table"] = self.table

    def places(self, b: int) -> tuple[Tensor, Tensor]:
        """Pages and rows of the keys of a sequence."""
        rows = torch.arange(self.lengths[b])
        return self.table[b].long()[rows // self.page], rows % self.page

    def on(self, device: str, **changes: Any) -> dict[str, Any]:
        """The arguments there, with ``changes``."""
        given = self.arguments | changes
        return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}

    def _wide(self, x: Tensor, descale: Any, b: int) -> Tensor:
        """fp64 (rows, heads, dim) of rows of a sequence times a descale of heads."""
        if not isinstance(descale, Tensor):
            return x.double() * (1.0 if descale is None else descale)
        descale = descale.double()
        descale = (descale[b] if descale.dim() == 2 else descale).expand(HEADS_K)
        return x.double() * descale.repeat_interleave(x.shape[1] // HEADS_K)[:, None]

    def of_sequence(self, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a sequence in fp64, (1, rows, heads, dim)."""
        first, (of_q, of_k, of_v) = sum(self.queries[:b]), self.descales
        q = self.q[first : first + self.queries[b]]
        if isinstance(of_q, Tensor) and of_q.dim() == 3:
            of_rows = of_q[first : first + len(q)].double()
            wide = q.double() * of_rows
        else:
            wide = self._wide(q, of_q, b)
        page, row = self.places(b)
        k, v = (x[page, row] for x in self.caches)
        if isinstance(of_k, Tensor) and of_k.dim() == 3:
            k = k.double() * of_k[page, row].double()[..., None]
        else:
            k = self._wide(k, of_k, b)
        return wide[None], k[None], self._wide(v, of_v, b)[None]

    def check(self, out: Tensor, lse: Tensor, mask: dict[str, Any], **options: Any) -> None:
        """Of every sequence, within what rounded weights may change."""
        packed = out.dim() == 3
        for b in range(len(self.lengths)):
            first = sum(self.queries[:b])
            rows = slice(first, first + self.queries[b])
            got = (out[None, rows], lse[None, :, rows]) if packed else (out[b, None], lse[b, None])
            check(*got, exact(*self.of_sequence(b), **mask, **options))


def of_mask(mask: dict[str, Any]) -> dict[str, Any]:
    """The function's arguments for a mask."""
    return {"causal": mask.get("causal", False), "window_size": mask.get("window", (-1, -1))}


def run(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, bool]:
    """out, softmax_lse, and whether the op of e4m3 inputs computed them."""
    with Ops() as seen:
        out, lse = flash_cute.flash_attn_with_kvcache(**arguments)
    return out, lse, OP in seen.names
