"""fp8 q, k and v of the attention functions, against attention in fp64 of the rounded values."""

from __future__ import annotations

import math

import pytest
import torch
from fp8_bounds import relative

import flash_cute

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)
WIDE = (torch.float16, torch.bfloat16)


def inputs(device, qk, of_v, shape_q=(2, 90, 4, 64), shape_k=(2, 110, 2, 64), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((shape_q, qk), (shape_k, qk), (shape_k, of_v))
    return [torch.randn(s, generator=generator).to(d).to(device) for s, d in shapes]


def reference(q, k, v, factors=(1.0, 1.0, 1.0), scale=None, causal=False):
    """Attention in fp64 of (batch, seqlen, heads, dim) times factors that broadcast."""
    q, k, v = (x.cpu().double() * f for x, f in zip((q, k, v), factors, strict=True))
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores.masked_fill_(hidden.triu(scores.shape[-1] - scores.shape[-2] + 1), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def error(out, expected):
    """Of all elements together, relative."""
    return ((out.double().cpu() - expected).norm() / expected.norm()).item()


def of_heads(descale, group=1):
    """A descale (batch, heads_k) for (batch, seqlen, heads, dim)."""
    return descale.double().cpu().repeat_interleave(group, 1)[:, None, :, None]


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("narrow", FP8)
def test_sixteen_bits_hold_every_value(narrow, wide):
    values = torch.arange(256, dtype=torch.uint8).view(narrow)
    exact = values.double()
    assert torch.equal(values.to(wide).double().nan_to_num(7.0), exact.nan_to_num(7.0))


@pytest.mark.parametrize("of_v", [*FP8, *WIDE])
@pytest.mark.parametrize("qk", FP8)
def test_out_of_rounded_values(device, qk, of_v):
    q, k, v = inputs(device, qk, of_v)
    for options in ({}, {"causal": True}, {"softmax_scale": 1.3}):
        out = flash_cute.flash_attn_func(q, k, v, **options)
        expected = reference(q, k, v, scale=options.get("softmax_scale"),
                             causal=options.get("causal", False))  # fmt: skip
        assert out.dtype == torch.bfloat16 and out.shape == q.shape
        widened = 0.01 if of_v in WIDE else 0.02
        assert error(out, expected) < relative(device, widened, q, k, v)


def test_formats_of_q_and_k_may_differ(device):
    q, k, v = inputs(device, E4M3, E5M2)
    k = k.float().to(E5M2)
    assert error(flash_cute.flash_attn_func(q, k, v), reference(q, k, v)) < 0.01


@pytest.mark.parametrize("out_dtype", [*WIDE, torch.float32])
def test_dtype_of_out(device, out_dtype):
    q, k, v = inputs(device, E5M2, torch.float16)
    out, lse = flash_cute.flash_attn_func(q, k, v, out_dtype=out_dtype, return_lse=True)
    assert (out.dtype, lse.dtype) == (out_dtype, torch.float32)
    assert error(out, reference(q, k, v)) < (2e-3 if out_dtype != torch.bfloat16 else 5e-3)


def test_means_of_long_rows(device):
    """A sum of 16384 values near 1 in fp32, whatever P and v are rounded to."""
    q, k, v = inputs(device, E4M3, E4M3, (1, 16, 1, 64), (1, 16384, 1, 64))
    v = (v.float().abs() + 1).to(E4M3)
    out = flash_cute.flash_attn_func(q, k, v, out_dtype=torch.float32).double().cpu()
    expected = reference(q, k, v)
    assert ((out.mean() - expected.mean()) / expected.mean()).abs() < 0.01


def some_descales():
    return torch.rand(2, 2) + 0.5


DESCALES = {
    "numbers": (0.5, 3.0, 0.125),
    "one element": tuple(torch.tensor([x]) for x in (0.5, 3.0, 0.125)),
    "no dimension": tuple(torch.tensor(x) for x in (0.3, 1.7, 0.9)),
    "heads": tuple(
        torch.rand(2, 2, generator=torch.Generator().manual_seed(1)) + 0.5 for _ in "qkv"
    ),
    "mixed": (torch.rand(2, 2) + 0.5, 2.0, None),
    "v": (None, None, torch.rand(2, 2) + 0.5),
}


def on(device, descales):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in descales]


def factors(descales):
    def of(x, group):
        if x is None:
            return 1.0
        if not isinstance(x, torch.Tensor) or x.dim() < 2:
            return float(x)
        return of_heads(x, group)

    return [of(x, group) for x, group in zip(descales, (2, 1, 1), strict=True)]


def named(device, descales):
    return dict(zip(("q_descale", "k_descale", "v_descale"), on(device, descales), strict=True))


@pytest.mark.parametrize("kind", DESCALES)
@pytest.mark.parametrize("of_v", [E4M3, torch.float16])
def test_descales(device, kind, of_v):
    q, k, v = inputs(device, E4M3, of_v)
    descales = DESCALES[kind]
    expected = reference(q, k, v, factors(descales))
    out = flash_cute.flash_attn_func(q, k, v, **named(device, descales))
    assert error(out, expected) < relative(device, 0.01, q, k, v)
    assert error(flash_cute.flash_attn_func(q, k, v), expected) > 0.05


@pytest.mark.parametrize("of_v", [E5M2, *WIDE])
@pytest.mark.parametrize("out_dtype", [None, torch.float16])
@pytest.mark.parametrize("power", [16, -24])
@pytest.mark.parametrize("is_packed", [False, True])
def test_descales_that_fp16_does_not_hold(device, is_packed, power, out_dtype, of_v):
    """Times q they leave its range; a scale of the softmax brings the scores back."""
    q, k, v = inputs(device, E5M2, of_v, (2, 30, 4, 64), (2, 34, 2, 64))
    descale, scale = torch.tensor([[1.0, 1.5], [0.75, 1.0]]) * 2.0**power, 2.0 ** -(power + 3)
    expected = reference(q, k, v, (of_heads(descale, 2), 1.0, 1.0), scale)
    options = {
        "q_descale": descale.to(device), "softmax_scale": scale, "out_dtype": out_dtype,
    }  # fmt: skip
    if is_packed:
        cu_q, cu_k = (
            torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (30, 34)
        )
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_cute.flash_attn_varlen_func(*rows, cu_q, cu_k, 30, 34, **options)
        out = out.unflatten(0, (2, 30))
    else:
        out = flash_cute.flash_attn_func(q, k, v, **options)
    assert error(out, expected) < 0.01


def test_numbers_are_exact(device):
    """Powers of two, too, wherever they go."""
    q, k, v = inputs(device, E5M2, E5M2)
    once = flash_cute.flash_attn_func(q, k, v, softmax_scale=0.25)
    for scale, descales in ((1.0, (0.5, 0.5, None)), (None, (2.0, 1.0, None)), (0.125, (2, 1, 1))):
        got = flash_cute.flash_attn_func(q, k, v, softmax_scale=scale, **named(device, descales))
        assert torch.equal(got, once)


@pytest.mark.parametrize("kind", DESCALES)
def test_packed_forms(device, kind):
    descales = named(device, DESCALES[kind])
    q, k, v = inputs(device, E4M3, E4M3, (2, 80, 2, 32), (2, 80, 2, 32))
    expected = flash_cute.flash_attn_func(q, k, v, causal=True, **descales)
    qkv, kv = (torch.stack([x.float() for x in xs], 2).to(E4M3) for xs in ((q, k, v), (k, v)))
    options = {"causal": True, "return_lse": True, **descales}
    out, lse = flash_cute.flash_attn_qkvpacked_func(qkv, **options)
    assert torch.equal(out, expected) and lse.shape == (2, 2, 80)
    assert torch.equal(flash_cute.flash_attn_kvpacked_func(q, kv, **options)[0], expected)


@pytest.mark.parametrize("kind", DESCALES)
@pytest.mark.parametrize("gap", [0, 3])
def test_varlen_forms(device, kind, gap):
    descales = DESCALES[kind]
    lengths = (30, 50)
    q, k, v = inputs(device, E5M2, E5M2, (80 + gap, 4, 32), (80 + gap, 2, 32))
    offsets = torch.tensor([0, 30, 80], dtype=torch.int32, device=device)
    options = named(device, descales) | {"zero_tensors": True}
    out = flash_cute.flash_attn_varlen_func(q, k, v, offsets, offsets, 50, 50, **options)
    assert out[80:].abs().sum() == 0
    start = 0
    for b, length in enumerate(lengths):
        rows = slice(start, start + length)
        start += length
        one = [
            x[b : b + 1] if isinstance(x, torch.Tensor) and x.dim() == 2 else x for x in descales
        ]
        parts = (x[None, rows] for x in (q, k, v))
        assert error(out[None, rows], reference(*parts, factors(one))) < 0.015
    kv = torch.stack((k.float(), v.float()), 1).to(E5M2)
    got = flash_cute.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 50, 50, **options)
    assert torch.equal(got, out)
    qkv = torch.stack([q[:, :2].float(), k.float(), v.float()], 1).to(E5M2)
    got = flash_cute.flash_attn_varlen_qkvpacked_func(qkv, offsets, 50, **options)
    separate = flash_cute.flash_attn_varlen_func(
        q[:, :2], k, v, offsets, offsets, 50, 50, **options
    )
    assert torch.equal(got, separate)


def test_pages(device):
    """A page may be two sequences', each with its own descales."""
    q, k, v = inputs(device, E4M3, E4M3, (12, 4, 32), (3, 16, 2, 32))
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32, device=device)
    used = torch.tensor([32, 20], dtype=torch.int32, device=device)
    keys = torch.tensor([0, 32, 52], dtype=torch.int32, device=device)
    descales = DESCALES["heads"]
    out = flash_cute.flash_attn_varlen_func(
        q, k, v, offsets, keys, 7, 32, block_table=table, seqused_k=used, **named(device, descales)
    )
    for b, (rows, count) in enumerate(((slice(0, 5), 32), (slice(5, 12), 20))):
        pages = [x[table[b].long()].flatten(0, 1)[None, :count] for x in (k, v)]
        one = [x[b : b + 1] for x in descales]
        assert error(out[None, rows], reference(q[None, rows], *pages, factors(one))) < 0.015


def test_no_sequences(device):
    q, k, v = inputs(device, E4M3, E4M3, (0, 4, 32), (0, 2, 32))
    offsets = torch.zeros(1, dtype=torch.int32, device=device)
    descale = torch.ones(0, 2, device=device)
    out = flash_cute.flash_attn_varlen_func(
        q, k, v, offsets, offsets, 0, 0, q_descale=descale, v_descale=descale
    )
    assert out.shape == (0, 4, 32)


def test_other_options_hold(device):
    q, k, v = inputs(device, E4M3, E4M3)
    wide = [x.to(torch.bfloat16) for x in (q, k, v)]
    for options in (
        {"softcap": 5.0, "window_size": (20, 3)},
        {"dropout_p": 0.3, "rng": torch.tensor([1, 2], device=device)},
        {"sink": torch.ones(4, device=device), "out_dtype": torch.float32},
    ):
        got = flash_cute.flash_attn_func(q, k, v, **options)
        options.pop("out_dtype", None)
        assert torch.equal(got, flash_cute.flash_attn_func(*wide, **options).to(got.dtype))
    options = {"sink": torch.ones(4, device=device), "window_size": (20, 3)}
    expected = flash_cute.flash_attn_func(*wide, **options).double().cpu()
    got = flash_cute.flash_attn_func(q, k, v, **options)
    assert error(got, expected) < relative(device, 0.01, q, k, v)


def test_autocast_keeps_the_descales(device):
    q, k, v = inputs(device, E4M3, E4M3)
    with torch.autocast(device, torch.bfloat16):
        got = flash_cute.flash_attn_func(q, k, v, q_descale=0.5, v_descale=2.0)
    assert torch.equal(got, flash_cute.flash_attn_func(q, k, v, q_descale=0.5, v_descale=2.0))


def test_compiled(device):
    torch._dynamo.reset()
    q, k, v = inputs(device, E4M3, torch.bfloat16)
    descale = torch.rand(2, 2, device=device) + 0.5

    def call(q, k, v, descale):
        return flash_cute.flash_attn_func(q, k, v, causal=True, q_descale=descale, v_descale=2.0)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v, descale), call(q, k, v, descale))


def test_a_gradient_is_refused_by_name():
    q, k, v = inputs("cpu", E4M3, torch.float16)
    v.requires_grad_()
    with pytest.raises(NotImplementedError, match="backward through fp8 q and k"):
        flash_cute.flash_attn_func(q, k, v)
    with torch.no_grad():
        assert not flash_cute.flash_attn_func(q, k, v).requires_grad
    qkv = torch.zeros(1, 8, 3, 2, 8).to(E5M2).requires_grad_()
    with pytest.raises(NotImplementedError, match="backward through fp8"):
        flash_cute.flash_attn_qkvpacked_func(qkv)


BAD = {
    "v alone": (dict.fromkeys("qk", torch.bfloat16), TypeError, "q has dtype torch.bfloat16"),
    "k of 16 bits": ({"k": torch.bfloat16}, TypeError, "k has dtype torch.bfloat16; with fp8"),
    "v of 32 bits": ({"v": torch.float32}, TypeError, "v has dtype torch.float32"),
    "no fp8": (
        dict.fromkeys("qkv", torch.bfloat16) | {"k_descale": 1.0},
        ValueError,
        "descales and out_dtype need fp8 q and k",
    ),
    "out_dtype": ({"out_dtype": torch.float64}, TypeError, "out_dtype is torch.float64"),
    "a string": ({"q_descale": "1"}, TypeError, "q_descale is str"),
    "zero": ({"k_descale": 0.0}, ValueError, "k_descale is 0.0"),
    "nan": ({"v_descale": math.nan}, ValueError, "v_descale is nan"),
    "integers": ({"v_descale": torch.ones(2, 2, dtype=torch.int32)}, TypeError, "v_descale has"),
    "shape": ({"q_descale": torch.ones(2, 4)}, ValueError, r"\(batch, heads_k\), \(2, 2\)"),
    "length": ({"q_descale": torch.ones(2)}, ValueError, r"shape \(2,\)"),
    "device": ({"q_descale": torch.ones(2, 2, device="meta")}, ValueError, "q_descale is on meta"),
    "scale": ({"softmax_scale": "x", "q_descale": 2.0}, TypeError, "softmax_scale is str"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    change, kind, words = BAD[name]
    tensors = dict(zip("qkv", inputs("cpu", E4M3, E4M3), strict=True))
    given = {n: tensors[n].to(x) if n in tensors else x for n, x in change.items()}
    with pytest.raises(kind, match=words):
        flash_cute.flash_attn_func(**(tensors | given))


def test_bad_shapes_have_the_usual_errors():
    q, k, v = inputs("cpu", E4M3, E4M3)
    with pytest.raises(ValueError, match="q and k differ in head dim"):
        flash_cute.flash_attn_func(q[..., :32], k, v, q_descale=torch.ones(2, 2))
    with pytest.raises(ValueError, match="expected \\(batch, seqlen, 3, heads, dim\\)"):
        flash_cute.flash_attn_qkvpacked_func(q)
    with pytest.raises(TypeError, match="q is list"):
        flash_cute.flash_attn_func([1], k, v)
