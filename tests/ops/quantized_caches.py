"""Calls over 8-bit caches, and what they return and write: fp64 beside the bytes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from eight_bits import E4M3, INT8, LARGEST, bits, codes_of, new_descale, values_of
from torch import Tensor

import flash_cute
from flash_cute import reference

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
CLOSE = {FP32: 2e-5, FP16: 4e-3, BF16: 3e-2}
KINDS = ["none", "number", "one", "scalar", "heads", "batch", "tokens"]


def descale_of(kind: str, dtype: torch.dtype, shape: tuple[int, ...], batch: int) -> Any:
    """A descale of a cache (pages, rows, heads), about so large that values are normal."""
    unit = 3 / LARGEST[dtype]
    shapes = {"one": (1,), "scalar": (), "heads": shape[2:], "batch": (batch, shape[2])}
    if kind == "none" and dtype == E4M3:
        return None
    if kind in ("none", "number"):
        return unit * 1.1
    return unit * (0.5 + torch.rand(shapes.get(kind, shape)))


def each(descale: Any, b: int, pages: Tensor, rows: Tensor, heads: int) -> Tensor:
    """fp32 (rows, heads): the descale of rows of a sequence."""
    if not isinstance(descale, Tensor):
        return torch.full((len(rows), heads), 1.0 if descale is None else descale)
    if descale.dim() == 3:
        return descale[pages, rows]
    return (descale[b] if descale.dim() == 2 else descale).expand(len(rows), heads)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, o: dict[str, Any], slopes: Any) -> Any:
    """fp64 of one sequence: q (queries, heads, dim), k and v (keys, heads_k, dim)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * o["softmax_scale"]
    if o["softcap"]:
        scores = o["softcap"] * torch.tanh(scores / o["softcap"])
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (i - j).abs()
    (left, right), seen = o["window_size"], mask
    if o["causal"] or right >= 0:
        seen = seen & (j <= i + (0 if o["causal"] else right))
    if left >= 0:
        seen = seen & (j >= i - left)
    scores = scores.masked_fill(~seen, -torch.inf)
    sink = torch.full((q.shape[1],), -torch.inf) if o["sink"] is None else o["sink"]
    sinks = sink.double()[:, None, None].expand(-1, len(q), 1)
    lse = torch.cat((scores, sinks), -1).logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return torch.einsum("hij,jhd->ihd", p, v), lse


class Case:
    """A random call: its arguments, and what each sequence is."""

    def __init__(self, seed: int, dtype: torch.dtype, **fixed: Any) -> None:
        torch.manual_seed(seed)
        draw = random.Random(seed)

        def pick(name: str, *choices: Any) -> Any:
            return fixed.get(name, draw.choice(choices))

        self.dtype, self.q_dtype = dtype, pick("q_dtype", BF16, FP16, FP32)
        self.batch, self.heads_k = draw.randint(1, 4), draw.choice([1, 2, 3])
        self.heads = self.heads_k * draw.choice([1, 2, 4])
        dim, dim_v = draw.choice([(32, 32), (64, 16), (40, 48), (33, 7)])
        page, columns = pick("page", 0, 0, 1, 7, 16), draw.randint(1, 6)
        self.page = page or draw.choice([20, 64])
        self.capacity = self.page * (columns if page else 1)
        extra = draw.choice([0, 3, 30])
        pages = self.batch * (columns if page else 1) + extra
        self.table = torch.randperm(pages)[: pages - extra].view(self.batch, -1).int()
        by_index = not page and draw.random() < 0.5
        if not page and not by_index:
            self.table = torch.arange(self.batch).view(-1, 1).int()
        appends, packed = pick("appends", True, True, False), draw.random() < 0.4
        self.used = [draw.randint(0, self.capacity) for _ in range(self.batch)]
        self.new = [0] * self.batch
        if appends:
            one = draw.choice([1, 1, 2, 5])
            self.new = [draw.randint(0, 4) if packed else one for _ in range(self.batch)]
        self.queries = [draw.choice([1, 1, 2, 6])] * self.batch
        if packed:
            self.queries = [draw.randint(0, 5) for _ in range(self.batch)]
        self.q_packed, self.k_packed = packed, packed and appends
        leftpad = draw.random() < 0.3
        given_pads = [draw.randint(0, n + 2) if leftpad else 0 for n in self.used]
        self.pads = [min(x) for x in zip(given_pads, self.used, strict=True)]
        rotary = pick("rotary", False, False, True) and appends
        self.options: dict[str, Any] = {
            "softmax_scale": dim**-0.5, "causal": draw.random() < 0.5,
            "softcap": draw.choice([0, 0, 3.0]),
            "window_size": draw.choice([(-1, -1), (-1, -1), (9, 0), (4, 3), (-1, 2)]),
            "sink": draw.choice([None, torch.randn(self.heads)]),
        }  # fmt: skip
        self.slopes = draw.choice(
            [None, torch.rand(self.heads), torch.rand(self.batch, self.heads)]
        )
        shape = (pages, self.page, self.heads_k)
        kinds = (pick("k_kind", *KINDS), pick("v_kind", *KINDS))
        self.descales = [descale_of(kind, dtype, shape, self.batch) for kind in kinds]
        self.caches = []
        unseen = torch.ones(shape[:2], dtype=torch.bool)  # rows that nothing may read
        for b in range(self.batch):
            unseen[self.places(b, self.pads[b], self.used[b])] = False
        for i, d in enumerate((dim, dim_v)):
            codes = torch.randint(-127, 128, (*shape, d), dtype=INT8)
            if dtype == E4M3:
                normal = torch.randn(*shape, d) * LARGEST[E4M3] / 3
                codes = codes_of(normal, torch.ones(()), E4M3)
                codes[unseen] = 127  # NaN
            if isinstance(self.descales[i], Tensor) and self.descales[i].dim() == 3:
                self.descales[i][unseen] = torch.nan
            elif self.descales[i] is None:
                codes = codes_of(torch.randn(*shape, d), torch.ones(()), E4M3)
            self.caches.append(codes.view(dtype))

        def rows(lengths: list[int], is_packed: bool, *tail: int) -> Tensor:
            lead = (sum(lengths),) if is_packed else (self.batch, lengths[0])
            return torch.randn(*lead, *tail).to(self.q_dtype)

        def offsets(lengths: list[int]) -> Tensor:
            return torch.tensor([*itertools.accumulate(lengths, initial=0)], dtype=INT32)

        def integers(x: list[int]) -> Tensor:
            return torch.tensor(x, dtype=INT32)

        self.arguments: dict[str, Any] = {
            "q": rows(self.queries, self.q_packed, self.heads, dim),
            "k_cache": self.caches[0], "v_cache": self.caches[1],
            "cache_seqlens": integers(self.used),
            "k_descale": self.descales[0], "v_descale": self.descales[1],
            "alibi_slopes": self.slopes, **self.options,
            **draw.choice([{}, {"num_splits": 3}, {"split_size": 64}]),
        }  # fmt: skip
        if page:
            self.arguments["block_table"] = self.table
        elif by_index:
            self.arguments["cache_batch_idx"] = self.table[:, 0].contiguous()
        if leftpad:
            self.arguments["cache_leftpad"] = integers(given_pads)
        if self.q_packed:
            self.arguments |= {"cu_seqlens_q": offsets(self.queries), "max_seqlen_q": 6}
        if appends:
            for name, d in (("k", dim), ("v", dim_v)):
                behind = [*self.new, 2] if self.k_packed else self.new  # rows of no sequence
                self.arguments[name] = rows(behind, self.k_packed, self.heads_k, d)
            if self.k_packed:
                self.arguments["cu_seqlens_k_new"] = offsets(self.new)
        self.starts = self.used
        if rotary:
            angles = 6.3 * torch.rand(self.capacity + 9, draw.choice([4, 16]))
            self.arguments |= {"rotary_cos": angles.cos().to(self.q_dtype),
                               "rotary_sin": angles.sin().to(self.q_dtype),
                               "rotary_interleaved": draw.random() < 0.5}  # fmt: skip
            if draw.random() < 0.4:
                self.starts = [n // 2 for n in self.used]
                self.arguments["rotary_seqlens"] = integers(self.starts)

    def places(self, b: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Pages and rows of the keys [first, last) of a sequence."""
        rows = torch.arange(first, min(last, self.capacity))
        return self.table[b].long()[rows // self.page], rows % self.page

    def rotated(self, x: Tensor, b: int, step: int) -> Tensor:
        if "rotary_cos" not in self.arguments:
            return x
        a = self.arguments
        positions = self.starts[b] + step * torch.arange(len(x))
        return reference.rotate(
            x, positions, a["rotary_cos"], a["rotary_sin"], a["rotary_interleaved"]
        )

    def new_keys(self) -> Tensor | None:
        """k as the 16-bit call appends it, one row behind the other."""
        a, new = self.arguments, self.arguments.get("k")
        if new is None or "rotary_cos" not in a:
            return new
        room = max(self.capacity, max(u + n for u, n in zip(self.used, self.new, strict=True)))
        caches = torch.zeros(2, self.batch, room, *new.shape[-2:], dtype=new.dtype).unbind()
        names = ("rotary_cos", "rotary_sin", "rotary_interleaved", "cu_seqlens_k_new",
                 "cache_seqlens", "rotary_seqlens")  # fmt: skip
        some = {name: a[name] for name in names if name in a}
        q = new.new_zeros(self.batch, 1, *new.shape[-2:])
        flash_cute.flash_attn_with_kvcache(q, *caches, new, new, **some)
        rows = [
            caches[0][b, u : u + n]
            for b, (u, n) in enumerate(zip(self.used, self.new, strict=True))
        ]
        return torch.cat(rows)

    def appended(self) -> tuple[list[Tensor], list[Any]]:
        """Bytes of the caches, and descales, after the call."""
        caches = [bits(x).clone() for x in self.caches]
        descales = [x.clone() if isinstance(x, Tensor) else x for x in self.descales]
        for i, new in enumerate((self.new_keys(), self.arguments.get("v"))):
            if new is None:
                continue
            rows = new.reshape(-1, *new.shape[-2:])[: sum(self.new)].split(self.new)
            for b, x in enumerate(rows):
                page, row = self.places(b, self.used[b], self.used[b] + len(x))
                x = x[: len(row)]
                if isinstance(descales[i], Tensor) and descales[i].dim() == 3:
                    descales[i][page, row] = new_descale(x, self.dtype)
                factor = each(descales[i], b, page, row, self.heads_k)[..., None]
                caches[i][page, row] = codes_of(x, factor, self.dtype)
        return caches, descales

    def expected(self, hidden: Any = None) -> tuple[Tensor, Tensor]:
        """out (queries of all, heads, dim_v) and lse (heads, queries of all) in fp64."""
        caches, descales = self.appended()
        q = self.arguments["q"]
        parts = q.reshape(-1, *q.shape[-2:]).split(self.queries)
        banded = self.options["causal"] or max(self.options["window_size"]) >= 0
        results = []
        for b, x in enumerate(parts):
            page, row = self.places(b, 0, self.used[b] + self.new[b])
            k, v = (
                (values_of(codes[page, row], self.dtype)
                 * each(d, b, page, row, self.heads_k).double()[..., None])
                for codes, d in zip(caches, descales, strict=True)
            )  # fmt: skip
            mask = torch.arange(len(row)) >= self.pads[b]
            k[~mask], v[~mask] = 0, 0  # may be NaN
            if hidden is not None:
                mask = mask & hidden(b, len(x), len(row))
            slopes = self.slopes
            slopes = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
            x = self.rotated(x, b, int(banded))
            results.append(attention(x, k, v, mask, self.options, slopes))
        outs, lses = zip(*results, strict=True)
        return torch.cat(outs), torch.cat(lses, 1)

    def run(self, device: str, **more: Any) -> tuple[Tensor, Tensor]:
        """The call; caches and descales are then those of :attr:`arguments`."""
        moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in self.arguments.items()}
        self.ran = moved
        out, lse = flash_cute.flash_attn_with_kvcache(**moved, **more, return_softmax_lse=True)
        assert out.dtype == self.q_dtype and lse.dtype == torch.float32
        if not self.q_packed:
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        return out.cpu(), lse.cpu()

    def check(self, device: str, hidden: Any = None, **more: Any) -> None:
        out, lse = self.expected(hidden)
        caches, descales = self.appended()
        got, got_lse = self.run(device, **more)
        for i, name in enumerate(("k", "v")):
            if not (device == "cuda" and "rotary_cos" in self.arguments and name == "k"):
                assert torch.equal(bits(self.ran[f"{name}_cache"]), caches[i])
                if isinstance(descales[i], Tensor):
                    written = self.ran[f"{name}_descale"].cpu()
                    assert torch.equal(written.view(INT32), descales[i].view(INT32))
        size = max(1.0, float(out.abs().max())) if out.numel() else 1.0
        close = CLOSE[self.q_dtype]
        torch.testing.assert_close(got.double(), out, rtol=close, atol=close * size)
        torch.testing.assert_close(got_lse.double(), lse, rtol=close, atol=2 * close)


def case_on(device: str, seed: int, dtype: torch.dtype, **fixed: Any) -> Case:
    if device == "cuda":
        fixed["q_dtype"] = random.Random(seed).choice([BF16, FP16])
    return Case(seed, dtype, **fixed)


def good(dtype: torch.dtype = E4M3, **changes: Any) -> dict[str, Any]:
    """A call with everything that may be wrong."""
    q = torch.randn(2, 1, 4, 8).to(BF16)
    new = torch.randn(2, 2, 1, 2, 8).to(BF16)
    caches = torch.zeros(2, 3, 4, 2, 8, dtype=INT8)
    given = {"q": q, "k_cache": caches[0].view(dtype), "v_cache": caches[1].view(dtype),
             "k": new[0], "v": new[1], "cache_seqlens": 2, "k_descale": 0.1,
             "v_descale": 0.1}  # fmt: skip
    return given | {n: x(given) if callable(x) else x for n, x in changes.items()}
