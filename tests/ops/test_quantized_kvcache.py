"""Calls over 8-bit caches: results beside fp64, what is written bit by bit, and errors."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flash_cute
from flash_cute import Sparse, reference
from flash_cute.functional import quantized_kvcache

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
DTYPES = [E4M3, INT8]
LARGEST = {E4M3: 448.0, INT8: 127.0}
CLOSE = {FP32: 2e-5, FP16: 4e-3, BF16: 3e-2}


def e4m3_of(code: int) -> float:
    """What the bits of a positive e4m3 number say."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


NUMBERS = np.array([e4m3_of(code) for code in range(127)])  # 127 is NaN


def codes_of(x: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes, as int8, of x / descale: the nearest number, of two the even one."""
    with np.errstate(all="ignore"):
        y = (x.float().cpu().numpy() / descale.cpu().numpy()).astype(float)
    if dtype == INT8:
        rounded = np.clip(np.rint(y), -127, 127)
        return torch.from_numpy(np.nan_to_num(rounded).astype(np.int8))
    size = np.minimum(np.abs(np.nan_to_num(y, nan=0.0)), 448.0)
    above = np.searchsorted(NUMBERS, size).clip(1, 126)
    low, high = size - NUMBERS[above - 1], NUMBERS[above] - size
    is_low = (low < high) | ((low == high) & (above % 2 == 1))
    code = np.where(np.isnan(y), 127, np.where(is_low, above - 1, above))
    code = np.where(np.signbit(y), code + 128, code).astype(np.uint8)
    return torch.from_numpy(code.view(np.int8))


def values_of(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 of the bytes of a cache."""
    if dtype == INT8:
        return codes.double()
    bits = codes.view(torch.uint8).long()
    table = torch.tensor([*NUMBERS, np.nan]).double()
    return table[bits & 127] * torch.where(bits > 127, -1.0, 1.0).double()


def bits(x: Tensor) -> Tensor:
    return x.view(INT8).cpu()


def new_descale(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = x.abs().amax(-1).float().cpu().numpy()
    descale = (largest / np.float32(LARGEST[dtype])).astype(np.float32)
    return torch.from_numpy(np.where(descale == 0, np.float32(1), descale))


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


@pytest.fixture(autouse=True)
def copies_are_expected():
    quantized_kvcache._say.cache_clear()


pytestmark = pytest.mark.filterwarnings("ignore:flash_cute. no kernel reads a cache")


def case_on(device: str, seed: int, dtype: torch.dtype, **fixed: Any) -> Case:
    if device == "cuda":
        fixed["q_dtype"] = random.Random(seed).choice([BF16, FP16])
    return Case(seed, dtype, **fixed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(150))
def test_is_attention_over_the_dequantised_cache(device, dtype, seed):
    case_on(device, seed, dtype).check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k_kind", KINDS)
@pytest.mark.parametrize("v_kind", KINDS)
def test_kinds_of_descales(device, dtype, k_kind, v_kind):
    """In fp32 on the CPU, where each of them is nearly exact."""
    fixed = {"k_kind": k_kind, "v_kind": v_kind, "q_dtype": FP32, "appends": True}
    case_on(device, 1000 + KINDS.index(k_kind), dtype, **fixed).check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [0, 7, 16])
@pytest.mark.parametrize("seed", range(6))
def test_rotary_embedding_comes_before_rounding(device, dtype, page, seed):
    fixed = {"rotary": True, "page": page, "appends": True}
    case_on(device, 2000 + seed, dtype, **fixed).check(device)


def append(dtype: torch.dtype, device: str, k: Tensor, v: Tensor, k_descale: Any, v_descale: Any):
    """Bytes of one row of caches (2, 4, 2, 8), which k and v (2, 1, 2, 8) join."""
    caches = [torch.zeros(2, 4, 2, 8, device=device).to(dtype) for _ in range(2)]
    flash_cute.flash_attn_with_kvcache(
        torch.ones_like(k), *caches, k, v, cache_seqlens=2, k_descale=k_descale, v_descale=v_descale
    )
    for x in caches:
        assert not bits(x)[:, [0, 1, 3]].any()
    return [bits(x)[:, 2:3] for x in caches]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_16_bit_number_is_rounded_to_the_nearest(device, dtype):
    """All that bf16 has: ties, subnormal, beyond the largest, inf and NaN."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16).view(-1, 1, 2, 8).to(device)
    for unit in (1.0, 0.37):
        caches = [torch.zeros(len(every), 1, 2, 8, device=device).to(dtype) for _ in range(2)]
        q = torch.zeros_like(every)
        flash_cute.flash_attn_with_kvcache(
            q, *caches, every, every, cache_seqlens=0, k_descale=unit, v_descale=unit
        )
        expected = codes_of(every.cpu(), torch.tensor(unit), dtype)
        is_nan = every.isnan().cpu()
        for x in caches:
            assert torch.equal(bits(x)[~is_nan], expected[~is_nan])
            assert bool((bits(x)[is_nan] & 127 == (127 if dtype == E4M3 else 0)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_of_zeros_nan_and_inf(device, dtype):
    k = torch.randn(2, 1, 2, 8, device=device).to(BF16)
    k[0, 0, 0], k[0, 0, 1, 3], k[1, 0, 0, 5] = 0, torch.nan, torch.inf
    v = torch.full_like(k, 1e-40)  # its descale is subnormal, or none is left
    descales = [torch.full((2, 4, 2), 7.0, device=device) for _ in range(2)]
    codes, _ = append(dtype, device, k, v, *descales)
    assert descales[0][0, 2, 0] == 1 and not codes[0, 0, 0].any()
    for descale in descales:
        assert bool((descale[:, [0, 1, 3]] == 7).all())
    dequantised = values_of(codes, dtype) * descales[0][:, 2:3].double().cpu()[..., None]
    assert bool(dequantised[0, 0, 1].isnan().all() and dequantised[1, 0, 0].isnan().all())
    assert bool(dequantised[1, 0, 1].isfinite().all() and descales[1].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["number", "tokens"])
def test_what_does_not_fit_is_dropped(device, dtype, kind):
    """Full caches, pages that do not exist; the rest of the rows is written."""
    caches = [torch.zeros(3, 4, 2, 8, device=device).to(dtype) for _ in range(2)]
    descales = [torch.full((3, 4, 2), 7.0, device=device) for _ in range(2)]
    table = torch.tensor([[0, 99], [-1, 1]], dtype=INT32, device=device)
    lengths = torch.tensor([3, 6], dtype=INT32, device=device)
    q = k = torch.ones(2, 3, 2, 8, device=device).to(BF16)

    def run(lengths):
        given = descales if kind == "tokens" else (0.5, 0.5)
        return flash_cute.flash_attn_with_kvcache(
            q, *caches, k, k, cache_seqlens=lengths, block_table=table, k_descale=given[0],
            v_descale=given[1],
        )  # fmt: skip

    run(lengths + 8)
    assert not any(bits(x).any() for x in caches)
    run(lengths)
    written = torch.zeros(3, 4, dtype=torch.bool)
    written[0, 3] = written[1, 2] = written[1, 3] = True
    for x, descale in zip(caches, descales, strict=True):
        assert torch.equal(bits(x).any(-1).all(-1), written)
        if kind == "tokens":
            assert torch.equal((descale != 7).all(-1).cpu(), written)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_page_of_two_sequences_has_each_one_s_descale(device, dtype):
    q = torch.randn(2, 1, 4, 16, device=device).to(BF16)
    k, v = (torch.randn(1, 8, 2, 16, device=device).mul(9).to(dtype) for _ in range(2))
    table = torch.zeros(2, 1, dtype=INT32, device=device)
    descales = torch.rand(2, 2, 2, device=device)
    out = flash_cute.flash_attn_with_kvcache(
        q, k, v, block_table=table, k_descale=descales[0], v_descale=descales[1]
    )
    for b in range(2):
        one = flash_cute.flash_attn_with_kvcache(
            q[b : b + 1], k, v, k_descale=descales[0, b], v_descale=descales[1, b]
        )
        assert torch.equal(out[b : b + 1], one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["packed", "heads_first", "slice"])
def test_caches_of_any_strides(device, dtype, layout):
    plain = case_on(device, 17, dtype, page=16, appends=True, k_kind="tokens")
    plain.run(device)
    strided = case_on(device, 17, dtype, page=16, appends=True, k_kind="tokens")
    for name in ("k_cache", "v_cache"):
        x = bits(strided.arguments[name])
        if layout == "packed":
            x = torch.cat((x, x), -1)[..., : x.shape[-1]]
        elif layout == "heads_first":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            x = torch.cat((x, x), 1)[:, : x.shape[1]]
        assert not x.is_contiguous()
        strided.arguments[name] = x.view(dtype)
    strided.run(device)
    for name in ("k_cache", "v_cache", "k_descale"):
        assert torch.equal(
            strided.ran[name].contiguous().view(INT8), plain.ran[name].contiguous().view(INT8)
        )
    strided.check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["number", "batch", "tokens"])
@pytest.mark.parametrize("page", [0, 16])
def test_sparse(device, dtype, kind, page):
    q, new = torch.randn(2, 1, 4, 32, device=device).to(BF16), {}
    shape = (2, 256, 2, 32) if not page else (40, 16, 2, 32)
    caches = [torch.randn(shape, device=device).mul(20).to(dtype) for _ in range(2)]
    caches[1] = caches[1].transpose(1, 2).contiguous().transpose(1, 2)  # another layout
    k, v = (torch.randn(2, 1, 2, 32, device=device).to(BF16) for _ in range(2))
    descales = [descale_of(kind, dtype, shape[:-1], 2) for _ in range(2)]
    descales = [x.to(device) if isinstance(x, Tensor) else x for x in descales]
    lengths = torch.tensor([200, 130], dtype=INT32, device=device)
    new = {"cache_seqlens": lengths, "k_descale": descales[0], "v_descale": descales[1]}
    if page:
        new["block_table"] = torch.randperm(40, device=device)[:32].view(2, 16).int()
    every = Sparse.topk(torch.arange(16, device=device).expand(2, 1, 2, 16), 16, seqlen_k=256)
    some = Sparse.topk(torch.tensor([[[[0, 3]] * 2]] * 2, device=device), 16, seqlen_k=256)
    dense = flash_cute.flash_attn_with_kvcache(q, *caches, k, v, **new, causal=True)
    again = flash_cute.flash_attn_with_kvcache(q, *caches, k, v, **new, causal=True, sparse=every)
    torch.testing.assert_close(dense, again, rtol=2e-2, atol=2e-2 * float(dense.abs().max()))
    few = flash_cute.flash_attn_with_kvcache(q, *caches, **new, sparse=some)
    assert not torch.allclose(few, dense)


def good(dtype: torch.dtype = E4M3, **changes: Any) -> dict[str, Any]:
    """A call with everything that may be wrong."""
    q = torch.randn(2, 1, 4, 8).to(BF16)
    new = torch.randn(2, 2, 1, 2, 8).to(BF16)
    caches = torch.zeros(2, 3, 4, 2, 8, dtype=INT8)
    given = {"q": q, "k_cache": caches[0].view(dtype), "v_cache": caches[1].view(dtype),
             "k": new[0], "v": new[1], "cache_seqlens": 2, "k_descale": 0.1,
             "v_descale": 0.1}  # fmt: skip
    return given | {n: x(given) if callable(x) else x for n, x in changes.items()}


def tokens(*shape: int) -> Tensor:
    return torch.ones(shape or (3, 4, 2))


SHARED = tokens()
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "e5m2": (
        {n: torch.zeros(3, 4, 2, 8).to(torch.float8_e5m2) for n in ("k_cache", "v_cache")},
        TypeError, "k_cache has torch.float8_e5m2.*supported: both of q's dtype, or both of one",
    ),
    "uint8": ({n: torch.zeros(3, 4, 2, 8).byte() for n in ("k_cache", "v_cache")}, TypeError,
              "k_cache has torch.uint8"),
    "mixed": ({"v_cache": torch.zeros(3, 4, 2, 8).to(INT8)}, TypeError,
              "v_cache torch.int8; supported: both"),
    "half": ({"v_cache": torch.zeros(3, 4, 2, 8).to(BF16)}, TypeError, "v_cache torch.bfloat16"),
    "16_bits": ({n: torch.zeros(3, 4, 2, 8).to(BF16) for n in ("k_cache", "v_cache")}, ValueError,
                "k_descale is given, and the caches have torch.bfloat16"),
    "fp8_q": ({"q": lambda a: a["q"].to(E4M3)}, TypeError, "q has dtype torch.float8_e4m3fn"),
    "fp8_k": ({"k": lambda a: a["k"].to(E4M3)}, TypeError, "dtypes differ: q has torch.bfloat16"),
    "int8_k": ({"dtype": INT8, "k_descale": None}, ValueError, "k_descale is None; caches of"),
    "int8_v": ({"dtype": INT8, "v_descale": None}, ValueError, "v_descale is None; caches of"),
    "zero": ({"k_descale": 0.0}, ValueError, "k_descale is 0.0; expected a positive number"),
    "inf": ({"v_descale": float("inf")}, ValueError, "v_descale is inf"),
    "text": ({"v_descale": "1"}, TypeError, "v_descale is str; expected a number or a tensor"),
    "bool": ({"v_descale": True}, TypeError, "v_descale is bool"),
    "bf16": ({"k_descale": torch.ones(2).to(BF16)}, TypeError, "k_descale has dtype torch.bfloat"),
    "double": ({"k_descale": torch.ones(2).double()}, TypeError, "expected torch.float32"),
    "length": ({"k_descale": torch.ones(3)}, ValueError, r"k_descale has shape \(3,\); expected"),
    "of_q": ({"v_descale": torch.ones(2, 4)}, ValueError, r"\(batch, heads_k\), \(2, 2\)"),
    "rows": ({"v_descale": torch.ones(3, 5, 2)}, ValueError, r"dimension, \(3, 4, 2\)"),
    "device": ({"k_descale": torch.ones(2, device="meta")}, ValueError, "k_descale is on meta"),
    "expanded": ({"k_descale": torch.ones(1).expand(3, 4, 2)}, ValueError, "k_descale has elem"),
    "shared": ({"k_descale": SHARED, "v_descale": SHARED}, ValueError, "v_descale share memory"),
    "views": ({"k_descale": SHARED[:], "v_descale": SHARED[:]}, ValueError, "share memory"),
    "gradient": ({"q": torch.ones(2, 1, 4, 8).to(BF16).requires_grad_()}, RuntimeError,
                 "requires grad"),
    "trained": ({"k_descale": torch.ones(2).requires_grad_()}, RuntimeError, "requires grad"),
    "q_descale": ({"q_descale": 1.0}, NotImplementedError, "q_descale is given"),
    "sparse": ({"sparse": 3}, TypeError, "sparse is int"),
    "slopes": ({"sparse": Sparse.topk(torch.zeros(2, 1, 2, 1).int(), 4, seqlen_k=4),
                "alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes and sparse"),
    "sizes": ({"k": torch.zeros(2, 1, 2, 16).to(BF16)}, ValueError, "k has shape"),
    "full": ({"cache_seqlens": 4}, ValueError, "too small"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_come_before_anything_is_written(name):
    changes, error, match = ERRORS[name]
    arguments = good(**changes)
    kept = {n: x.clone() for n, x in arguments.items() if isinstance(x, Tensor)}
    with pytest.raises(error, match=match):
        flash_cute.flash_attn_with_kvcache(**arguments)
    for n, x in kept.items():
        if x.device.type == "cpu":
            assert torch.equal(
                bits(x.detach().contiguous()), bits(arguments[n].detach().contiguous())
            )


def test_the_call_is_good():
    for dtype in DTYPES:
        arguments = good(dtype, k_descale=tokens(), v_descale=tokens())
        flash_cute.flash_attn_with_kvcache(**arguments)
        assert bits(arguments["k_cache"]).any()


def test_autocast_casts_q_and_new_keys(device):
    arguments = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in good().items()}
    expected = flash_cute.flash_attn_with_kvcache(**arguments)
    wide = {n: arguments[n].float() for n in ("q", "k", "v")}
    with torch.autocast(device, torch.bfloat16):
        out = flash_cute.flash_attn_with_kvcache(**(arguments | wide))
    assert out.dtype == BF16 and torch.equal(out, expected)


@pytest.mark.parametrize("used", [None, 0, 2])
def test_no_sequences_no_queries_no_new_rows(device, used):
    for batch, queries, new in ((0, 1, 1), (2, 0, 1), (2, 1, 0), (2, 1, None)):
        arguments = good(q=torch.zeros(batch, queries, 4, 8).to(BF16), cache_seqlens=used)
        for name in ("k", "v"):
            gone = new is None or used is None
            arguments[name] = None if gone else torch.ones(batch, new, 2, 8).to(BF16)
        arguments = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}
        out = flash_cute.flash_attn_with_kvcache(**arguments)
        assert out.shape == arguments["q"].shape


@pytest.mark.parametrize("fits", [True, False])
def test_pages_in_use_alone_are_copied(device, fits):
    """As many as the table has entries, or if these are more than there are pages, all pages."""
    cache = torch.zeros(4 if fits else 2, 16, 2, 8, device=device).to(E4M3)
    table = torch.tensor([[0, 1, 1]], dtype=INT32, device=device)
    call = quantized_kvcache._widened(
        flash_cute.ops.typed.FwdKvcacheCall(
            torch.zeros(1, 1, 2, 8, device=device).to(BF16), cache, cache, block_table=table
        ),
        None,
        None,
    )
    assert len(call.k_cache) == len(call.v_cache) == (3 if fits else 2)


@pytest.mark.parametrize("kind", ["number", "batch", "tokens"])
def test_compiled(device, kind):
    torch.manual_seed(0)
    descales = [descale_of(kind, E4M3, (3, 4, 2), 2) for _ in range(2)]
    lengths = torch.tensor([1, 2], dtype=INT32)
    eager = good(k_descale=descales[0], v_descale=descales[1], cache_seqlens=lengths)
    eager = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in eager.items()}
    traced = {n: x.clone() if isinstance(x, Tensor) else x for n, x in eager.items()}
    expected = flash_cute.flash_attn_with_kvcache(**eager)
    call = torch.compile(flash_cute.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(**traced), expected)
    for name in ("k_cache", "v_cache", "k_descale"):
        if isinstance(eager[name], Tensor):
            assert torch.equal(eager[name].view(INT8), traced[name].view(INT8))


def test_a_copy_is_said_once(cuda):
    arguments = {n: x.to(cuda) if isinstance(x, Tensor) else x for n, x in good().items()}
    quantized_kvcache._say.cache_clear()
    with pytest.warns(UserWarning, match="no kernel reads a cache of torch.float8_e4m3fn") as said:
        for _ in range(2):
            flash_cute.flash_attn_with_kvcache(**arguments)
    assert sum("no kernel reads" in str(x.message) for x in said) == 1


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_read_by_the_host(seed):
    """The tensors have no values."""
    case = Case(seed, DTYPES[seed % 2])
    moved = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in case.arguments.items()}
    out = flash_cute.flash_attn_with_kvcache(**moved)
    assert out.device.type == "meta" and out.dtype == case.q_dtype
    assert out.shape == (*moved["q"].shape[:-1], moved["v_cache"].shape[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vmap_appends(dtype):
    q, k = torch.randn(3, 2, 1, 4, 16).to(BF16), torch.randn(3, 2, 1, 2, 16).to(BF16)
    caches = (50 * torch.randn(3, 2, 8, 2, 16)).to(dtype)
    mapped, looped = caches.clone(), caches.clone()

    def call(q, k, cache):
        return flash_cute.flash_attn_with_kvcache(
            q, cache, cache.clone(), k, k, cache_seqlens=3, k_descale=0.02, v_descale=0.02
        )

    try:
        out = torch.vmap(call)(q, k, mapped)
    except RuntimeError as error:  # of torch 2.10, for fp8
        assert dtype == E4M3 and "Batching rule not implemented for aten::view.dtype" in str(error)
        assert torch.equal(bits(mapped), bits(looped))
        return
    for i in range(3):
        torch.testing.assert_close(out[i], call(q[i], k[i], looped[i]))
    assert torch.equal(bits(mapped), bits(looped))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_as_descales_round_out_alone(device, dtype):
    """The bits of the 16-bit call over the same numbers, whose out is multiplied once."""
    q = torch.randn(2, 3, 4, 64, device=device).to(BF16)
    caches = [torch.randn(2, 50, 2, 64, device=device).mul(30).to(dtype) for _ in range(2)]
    out, lse = flash_cute.flash_attn_with_kvcache(
        q, *caches, k_descale=0.03, v_descale=0.3, return_softmax_lse=True
    )
    expected, expected_lse = flash_cute.flash_attn_with_kvcache(
        q, *(x.to(BF16) for x in caches), softmax_scale=0.03 * 64**-0.5, return_softmax_lse=True
    )
    assert torch.equal(out, (expected.float() * 0.3).to(BF16)) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("pages", [3, 9])
@pytest.mark.parametrize("by_index", [False, True])
def test_pages_that_do_not_exist_read_as_in_16_bits(device, pages, by_index):
    q = torch.randn(2, 1, 4, 16, device=device).to(BF16)
    caches = [torch.randn(pages, 4, 2, 16, device=device).mul(30).to(E4M3) for _ in range(2)]
    if by_index:
        where = {"cache_batch_idx": torch.tensor([99, 1], dtype=INT32, device=device)}
    else:
        table = torch.tensor([[0, 99], [-1, 1]], dtype=INT32, device=device)
        where = {"block_table": table}
    expected = flash_cute.flash_attn_with_kvcache(q, *(x.to(BF16) for x in caches), **where)
    assert torch.equal(flash_cute.flash_attn_with_kvcache(q, *caches, **where), expected)
