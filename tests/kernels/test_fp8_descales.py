"""Descales of fp8 rows and channels, against attention in fp64 of what the values stand for."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from fp8_bounds import relative
from torch import Tensor

import flash_cute

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ["row", "row q", "row k", "channel", "all", "mixed"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """out and the LSE in fp64, of (batch, seqlen, heads, dim)."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool)
        hidden = hidden.triu(scores.shape[-1] - scores.shape[-2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(0.0), v)
    return out, scores.logsumexp(-1)


def lse_bound(q: Tensor, k: Tensor, scale: float | None = None) -> float:
    """How far the LSE may be off if each of q and k is rounded to bf16 once, by 2^-8."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->bhij", q.abs(), k.abs())
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    return 1e-5 + 2.0**-7 * scores.max().item()


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(shape).to(dtype)


def scales(*shape: int, power_of_two: bool = False) -> Tensor:
    x = torch.randn(shape) / 2
    return torch.exp2((4 * x).round() if power_of_two else x)


def random_descales(
    kind: str, q: Tensor, k: Tensor, v: Tensor, batch: int, power_of_two: bool = False
) -> dict[str, Tensor | float]:
    """Random descales of the given kind, by their arguments' names."""
    heads_k = k.shape[-2]

    def made(*shape: int) -> Tensor:
        return scales(*shape, power_of_two=power_of_two)

    rows_q, rows_k = made(*q.shape[:-1], 1), made(*k.shape[:-1], 1)
    channels = made(batch, heads_k, v.shape[-1])
    return {
        "row": {"q_descale": rows_q, "k_descale": rows_k},
        "row q": {"q_descale": rows_q},
        "row k": {"k_descale": rows_k},
        "channel": {"v_descale": channels},
        "all": {"q_descale": rows_q, "k_descale": rows_k, "v_descale": channels},
        "mixed": {"q_descale": 0.5, "k_descale": rows_k, "v_descale": made(batch, heads_k)},
    }[kind]  # type: ignore[return-value]


def factor(x: Any, group: int = 1) -> Any:
    """A descale in fp64 that broadcasts to (batch, seqlen, heads, dim)."""
    if not isinstance(x, Tensor) or x.dim() == 4:
        return x.cpu().double() if isinstance(x, Tensor) else x
    x = x.cpu().double()
    x = x[..., None] if x.dim() == 2 else x
    return x.repeat_interleave(group, 1)[:, None]


def meant(
    q: Tensor, k: Tensor, v: Tensor, descales: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """What fp8 values and descales stand for, in fp64."""
    group = q.shape[2] // k.shape[2]
    of = (factor(descales.get(f"{n}_descale", 1.0), group if n == "q" else 1) for n in "qkv")
    q, k, v = (x.cpu().double() * y for x, y in zip((q, k, v), of, strict=True))
    return q, k, v


def on(device: str, descales: dict[str, Any]) -> dict[str, Any]:
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in descales.items()}


def error(out: Tensor, expected: Tensor) -> float:
    return ((out.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("of_v", [E4M3, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_out_and_lse(device, kind, of_v, causal):
    q, k, v = fp8(2, 70, 6, 64), fp8(2, 90, 2, 64), fp8(2, 90, 2, 48, dtype=of_v)
    descales = random_descales(kind, q, k, v, 2)
    exact = meant(q, k, v, descales)
    expected, expected_lse = attend(*exact, causal)
    q, k, v = (x.to(device) for x in (q, k, v))
    options = {"causal": causal, "return_lse": True}
    out, lse = flash_cute.flash_attn_func(q, k, v, **options, **on(device, descales))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert error(out, expected) < relative(device, 0.015, q, k, v)
    assert (lse.cpu() - expected_lse).abs().max() < lse_bound(*exact[:2])
    without = flash_cute.flash_attn_func(q, k, v, causal=causal)
    assert error(without, expected) > 0.05


@pytest.mark.parametrize("of_v", [E4M3, torch.float16])
def test_powers_of_two_are_exact(device, of_v):
    """As if the rows had been those numbers in 16 bits."""
    q, k, v = fp8(1, 40, 4, 32), fp8(1, 50, 4, 32), fp8(1, 50, 4, 32, dtype=of_v)
    descales = random_descales("row", q, k, v, 1, power_of_two=True)
    wide = [x.float().to(device) for x in meant(q, k, v, descales)]
    dtype = torch.float32 if of_v == torch.float16 else torch.bfloat16
    assert all(torch.equal(x.to(dtype).float(), x) for x in wide)
    expected, expected_lse = flash_cute.flash_attn_func(
        *(x.to(dtype) for x in wide), return_lse=True
    )
    q, k, v = (x.to(device) for x in (q, k, v))
    out, lse = flash_cute.flash_attn_func(
        q, k, v, **on(device, descales), return_lse=True, out_dtype=torch.float32
    )
    assert torch.equal(lse, expected_lse) and torch.equal(out, expected.float())


@pytest.mark.parametrize("power", [14, -26])
@pytest.mark.parametrize("of_v", [E5M2, torch.float16, torch.bfloat16])
def test_rows_that_fp16_does_not_hold(device, of_v, power):
    """A scale of the softmax brings the scores back."""
    q, k = fp8(2, 30, 4, 64, dtype=E5M2), fp8(2, 34, 2, 64, dtype=E5M2)
    v = fp8(2, 34, 2, 64, dtype=of_v)
    descales = random_descales("row", q, k, v, 2)
    descales = {name: x * 2.0**power for name, x in descales.items()}
    scale = 2.0 ** -(2 * power + 3)
    exact = meant(q, k, v, descales)
    expected, expected_lse = attend(*exact, scale=scale)
    out, lse = flash_cute.flash_attn_func(
        *(x.to(device) for x in (q, k, v)), softmax_scale=scale, return_lse=True,
        **on(device, descales),
    )  # fmt: skip
    assert error(out, expected) < 0.015
    assert (lse.cpu() - expected_lse).abs().max() < lse_bound(*exact[:2], scale)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_forms(device, kind):
    q, k, v = (fp8(2, 40, 2, 32) for _ in "qkv")
    descales = on(device, random_descales(kind, q, k, v, 2))
    q, k, v = (x.to(device) for x in (q, k, v))
    options = {"causal": True, "return_lse": True, **descales}
    expected = flash_cute.flash_attn_func(q, k, v, **options)
    qkv, kv = (torch.stack([x.float() for x in xs], 2).to(E4M3) for xs in ((q, k, v), (k, v)))
    for got in (
        flash_cute.flash_attn_qkvpacked_func(qkv, **options),
        flash_cute.flash_attn_kvpacked_func(q, kv, **options),
    ):
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_varlen_forms(device, kind):
    """With a document without tokens, one without keys, and rows of no document."""
    lengths_q, lengths_k = (20, 0, 7, 13), (30, 0, 0, 17)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths_q, lengths_k))
    q, k, v = fp8(43, 4, 32), fp8(50, 2, 32), fp8(50, 2, 24)
    descales = random_descales(kind, q, k, v, 4)
    given = [x.to(device) for x in (q, k, v, cu_q, cu_k)]
    out, lse = flash_cute.flash_attn_varlen_func(
        *given, 20, 30, return_lse=True, **on(device, descales)
    )
    assert not out[40:].any()
    for b in range(4):
        rows_q, rows_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = {}
        for name, x in descales.items():
            if not isinstance(x, Tensor):
                one[name] = x
            elif name != "v_descale" and x.dim() == 3:
                one[name] = x[None, rows_q if name == "q_descale" else rows_k]
            else:
                one[name] = x[b : b + 1]
        exact = meant(q[None, rows_q], k[None, rows_k], v[None, rows_k], one)
        expected, expected_lse = attend(*exact)
        if lengths_q[b] and lengths_k[b]:
            assert error(out[None, rows_q], expected) < relative(device, 0.015, q, k, v)
            off = (lse[None, :, rows_q].cpu() - expected_lse).abs().max()
            assert off < lse_bound(*exact[:2])
        elif lengths_q[b]:
            assert not out[rows_q].any() and lse[:, rows_q].isneginf().all()
    kv = torch.nn.functional.pad(v.float(), (0, 8))
    kv = torch.stack((k.float(), kv), 1).to(E4M3).to(device)
    wide = dict(on(device, descales))
    if isinstance(wide.get("v_descale"), Tensor) and wide["v_descale"].dim() == 3:
        wide["v_descale"] = torch.nn.functional.pad(wide["v_descale"], (0, 8), value=1.0)
    packed = flash_cute.flash_attn_varlen_kvpacked_func(
        given[0], kv, given[3], given[4], 20, 30, **wide
    )
    torch.testing.assert_close(packed[..., :24], out, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("with_table", [False, True])
def test_rows_of_pages_and_of_a_padded_batch(device, with_table):
    q, k, v = fp8(12, 4, 32), fp8(3, 16, 2, 32), fp8(3, 16, 2, 32)
    descales = {"q_descale": scales(12, 4, 1), "k_descale": scales(3, 16, 2, 1)}
    offsets = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    used = torch.tensor([16, 3, 9], dtype=torch.int32)
    table = torch.tensor([[2], [0], [1]], dtype=torch.int32) if with_table else None
    out = flash_cute.flash_attn_varlen_func(
        *(x.to(device) for x in (q, k, v)), offsets.to(device), None, 5, 16,
        seqused_k=used.to(device), block_table=None if table is None else table.to(device),
        **on(device, descales),
    )  # fmt: skip
    for b in range(3):
        page, rows = b if table is None else int(table[b]), slice(offsets[b], offsets[b + 1])
        keys = [x[page : page + 1, : used[b]] for x in (k, v, descales["k_descale"])]
        one = {"q_descale": descales["q_descale"][None, rows], "k_descale": keys[2]}
        expected, _ = attend(*meant(q[None, rows], keys[0], keys[1], one))
        assert error(out[None, rows], expected) < relative(device, 0.015, q, k, v)


def test_descales_of_hidden_rows_may_be_anything(device):
    q, k, v = (fp8(24, 2, 32).to(device) for _ in "qkv")
    descale = scales(24, 2, 1).to(device)
    offsets = torch.tensor([0, 20], dtype=torch.int32, device=device)
    args = (q, k, v, offsets, offsets, 20, 20)
    expected = flash_cute.flash_attn_varlen_func(*args, q_descale=descale, k_descale=descale)
    descale = descale.clone()
    descale[20:] = torch.nan
    got = flash_cute.flash_attn_varlen_func(*args, q_descale=descale, k_descale=descale)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("seqlen_q", [0, 1, 5])
@pytest.mark.parametrize("seqlen_k", [0, 1, 5])
def test_short_and_empty(device, seqlen_q, seqlen_k):
    q, k, v = fp8(2, seqlen_q, 4, 16), fp8(2, seqlen_k, 2, 16), fp8(2, seqlen_k, 2, 16)
    descales = random_descales("all", q, k, v, 2)
    expected, _ = attend(*meant(q, k, v, descales))
    out = flash_cute.flash_attn_func(*(x.to(device) for x in (q, k, v)), **on(device, descales))
    assert out.shape == q.shape
    bound = relative(device, 0.03, q, k, v)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_descales_of_other_dtypes(device, dtype):
    """Taken as fp32."""
    q, k, v = (fp8(1, 20, 2, 16).to(device) for _ in "qkv")
    given = random_descales("all", q, k, v, 1)
    low = {name: x.to(device, dtype) for name, x in given.items()}
    exact = {name: x.float() for name, x in low.items()}
    got = flash_cute.flash_attn_func(q, k, v, **low)
    assert torch.equal(got, flash_cute.flash_attn_func(q, k, v, **exact))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(device, dtype):
    q, k, v = (fp8(2, 40, 2, 64).to(device) for _ in range(3))
    given = {"q_descale": torch.full((2, 2), 2e4, device=device), "softmax_scale": 1e-8}
    given["k_descale"] = torch.full((2, 40, 2, 1), 2e4, device=device)
    expected = flash_cute.flash_attn_func(q, k, v, **given)
    with torch.autocast(device, dtype):
        out = flash_cute.flash_attn_func(q, k, v, **given)
    assert out.isfinite().all() and torch.equal(out, expected)


def test_compiled_with_dynamic_sizes(device):
    torch._dynamo.reset()

    def call(*args: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, q_descale, k_descale, v_descale = args
        return flash_cute.flash_attn_func(
            q, k, v, causal=True, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            return_lse=True,
        )  # fmt: skip

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for seqlen in (20, 33):
            q, k, v = fp8(2, seqlen, 4, 16), fp8(2, seqlen + 3, 2, 16), fp8(2, seqlen + 3, 2, 16)
            args = [x.to(device) for x in (q, k, v, *random_descales("all", q, k, v, 2).values())]
            assert all(map(torch.equal, compiled(*args), call(*args)))


def test_mapped(device):
    q, k, v = (fp8(3, 2, 20, 2, 16) for _ in "qkv")
    descales = [scales(3, 2, 20, 2, 1), scales(3, 2, 20, 2, 1), scales(3, 2, 2, 16)]
    args = [x.to(device) for x in (q, k, v, *descales)]

    def call(*args: Tensor) -> Tensor:
        q, k, v, *descales = args
        named = zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)
        return flash_cute.flash_attn_func(q, k, v, **dict(named))

    expected = torch.stack([call(*sample) for sample in zip(*args, strict=True)])
    assert torch.equal(torch.func.vmap(call)(*args), expected)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rows of k for q": (
        {"q_descale": torch.ones(2, 9, 2, 1)},
        ValueError,
        r"q_descale has shape \(2, 9, 2, 1\); expected one element, \(batch, heads_k\), \(2, 2\), "
        r"or one for each row and head, \(2, 8, 4, 1\)",
    ),
    "rows of q for k": (
        {"k_descale": torch.ones(2, 8, 4, 1)},
        ValueError,
        r"k_descale has shape .* one for each row and head, \(2, 9, 2, 1\)",
    ),
    "rows of v": (
        {"v_descale": torch.ones(2, 9, 2, 1)},
        ValueError,
        r"v_descale has shape .* one for each channel, \(2, 2, 16\)",
    ),
    "channels of q": ({"q_descale": torch.ones(2, 2, 16)}, ValueError, "q_descale has shape"),
    "integers": (
        {"k_descale": torch.ones(2, 9, 2, 1).int()}, TypeError, "k_descale has dtype torch.int32",
    ),
    "device": (
        {"k_descale": torch.ones(2, 9, 2, 1, device="meta")}, ValueError, "k_descale is on meta",
    ),
    **{
        f"{name} of {x}": (
            {name: x},
            ValueError,
            f"{name} is {re.escape(str(x))}; expected a positive number, and a finite one in fp32",
        )
        for name in ("q_descale", "k_descale", "v_descale")
        for x in (0, 0.0, -1.0, math.inf, -math.inf, math.nan, 1e40, 10**400)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_descales(name):
    change, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        flash_cute.flash_attn_func(fp8(2, 8, 4, 16), fp8(2, 9, 2, 16), fp8(2, 9, 2, 16), **change)
