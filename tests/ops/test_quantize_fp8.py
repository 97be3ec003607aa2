"""quantize_fp8: its scales and values, and attention of them, against fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_cute import check as flash_check
from flash_cute import flash_attn_func, flash_attn_varlen_func, quantize_fp8
from flash_cute.fp8 import Fp8Inputs

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
QK, V = ["head", "tensor", "row"], ["head", "tensor", "channel"]


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """out and the LSE in fp64, of (batch, seqlen, heads, dim)."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.cpu().double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(
            hidden.triu(scores.shape[-1] - scores.shape[-2] + 1), -torch.inf
        )
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(0.0), v)
    return out, scores.logsumexp(-1)


def inputs(
    device: str, dtype: torch.dtype = torch.float32, lead: Any = ((2, 30), (2, 37)), dim: int = 32,
) -> list[Tensor]:  # fmt: skip
    """Heads, rows and channels of unlike sizes."""
    found = []
    for rows, heads in ((lead[0], 4), (lead[1], 2), (lead[1], 2)):
        x = torch.randn(*rows, heads, dim) * torch.randn(heads, 1).exp()
        x = x * torch.randn(*rows, 1, 1).div(2).exp() * torch.randn(dim).div(2).exp()
        found.append(x.to(device, dtype))
    return found


def offsets(device: str, *lengths: int, first: int = 0) -> Tensor:
    return torch.tensor([first, *lengths]).cumsum(0).int().to(device)


def error(out: Tensor, expected: Tensor) -> float:
    return ((out.cpu().double() - expected).norm() / expected.norm()).item()


def wide(x: Tensor, descale: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """What values and descales stand for, in fp64, looked up entry by entry."""
    x, descale = x.cpu().double(), descale.cpu().double()
    if descale.shape == (1,):
        return x * descale
    if descale.shape == (*x.shape[:-1], 1):
        return x * descale
    group = x.shape[-2] // descale.shape[1]
    found = x.clone()
    for b in range(len(descale)):
        rows: Any = b if cu_seqlens is None else slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        for head in range(x.shape[-2]):
            found[rows, ..., head, :] *= descale[b, head // group]
    return found


def sizes_sharing(
    x: Tensor, scaling: str, heads_k: int, cu_seqlens: Tensor | None
) -> list[tuple[Any, Tensor]]:
    """For each entry of the descale: its place, and the numbers that share it."""
    x = x.cpu().double()
    if scaling == "row":
        places = itertools.product(*map(range, x.shape[:-1]))
        return [((*place, 0), x[place]) for place in places]
    if cu_seqlens is None:
        documents = list(x)
    else:
        documents = [x[a:b] for a, b in itertools.pairwise(cu_seqlens.tolist())]
    if scaling == "tensor":
        return [((0,), torch.cat([y.flatten() for y in documents]))]
    group = x.shape[-2] // heads_k
    found: list[tuple[Any, Tensor]] = []
    for b, h in itertools.product(range(len(documents)), range(heads_k)):
        y = documents[b][:, h * group : (h + 1) * group]
        if scaling == "head":
            found.append(((b, h), y.flatten()))
        else:
            found += [((b, h, d), y[..., d].flatten()) for d in range(x.shape[-1])]
    return found


def check_values(
    x: Tensor, values: Tensor, descale: Tensor, scaling: str, heads_k: int,
    cu_seqlens: Tensor | None, power_of_two: bool,
) -> None:  # fmt: skip
    """Each descale is that of the largest value, and each value the nearest of e4m3."""
    assert values.dtype == E4M3 and values.shape == x.shape and descale.dtype == torch.float32
    rounded = sizes_sharing(values.float(), scaling, heads_k, cu_seqlens)
    for (place, y), (_, got) in zip(
        sizes_sharing(x, scaling, heads_k, cu_seqlens), rounded, strict=True
    ):
        scale = descale[place].item()
        largest = y.abs().max().item() if y.numel() else 0.0
        if largest == 0:
            assert scale == 1.0 and not got.any()
            continue
        if power_of_two:
            assert torch.tensor(scale).frexp().mantissa == 0.5
            assert scale / 2 * LARGEST < largest <= scale * LARGEST
        else:
            assert abs(scale * LARGEST / largest - 1) < 1e-6 and got.abs().max() == LARGEST
        bound = torch.maximum(2.0**-4 * y.abs(), torch.tensor(2.0**-10 * scale)) * (1 + 1e-6)
        assert ((got * scale - y).abs() <= bound).all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("qk", "of_v"), [*zip(QK, V, strict=True), ("row", "head")])
def test_values_and_descales(device, qk, of_v, dtype, power_of_two):
    q, k, v = inputs(device, dtype)
    x = quantize_fp8(q, k, v, qk_scaling=qk, v_scaling=of_v, power_of_two=power_of_two)
    assert isinstance(x, Fp8Inputs) and x.k_mean is None and x.mean_scores is None
    shapes = {"head": (2, 2), "tensor": (1,), "channel": (2, 2, 32)}
    assert x.q_descale.shape == shapes.get(qk, (2, 30, 4, 1))
    assert x.k_descale.shape == shapes.get(qk, (2, 37, 2, 1))
    assert x.v_descale.shape == shapes[of_v]
    check_values(q, x.q, x.q_descale, qk, 2, None, power_of_two)
    check_values(k, x.k, x.k_descale, qk, 2, None, power_of_two)
    check_values(v, x.v, x.v_descale, of_v, 2, None, power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("qk", "of_v"), zip(QK, V, strict=True))
def test_packed_sequences(device, qk, of_v, power_of_two):
    """Some without queries, without keys, without both; rows of none may hold anything."""
    cu_q, cu_k = offsets(device, 9, 0, 0, 5), offsets(device, 6, 7, 0, 0)
    q, k, v = inputs(device, lead=((17,), (16,)))
    for x, end in ((q, 14), (k, 13), (v, 13)):
        x[end:] = torch.tensor([torch.nan, torch.inf, 1e30], device=device)[:, None, None]
    options = {"qk_scaling": qk, "v_scaling": of_v, "power_of_two": power_of_two}
    x = quantize_fp8(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    for given, values, descale, scaling, cu, end in (
        (q, x.q, x.q_descale, qk, cu_q, 14), (k, x.k, x.k_descale, qk, cu_k, 13),
        (v, x.v, x.v_descale, of_v, cu_k, 13),
    ):  # fmt: skip
        descale = descale[:end] if scaling == "row" else descale
        check_values(given[:end], values[:end], descale, scaling, 2, cu, power_of_two)
    out, lse = flash_attn_varlen_func(
        x.q, x.k, x.v, cu_q, cu_k, 9, 7, **x.descales(), return_lse=True
    )
    of_q, of_k, of_v = (
        wide(values, descale, cu)[None, :rows]
        for values, descale, cu, rows in (
            (x.q, x.q_descale, cu_q, 9), (x.k, x.k_descale, cu_k, 6), (x.v, x.v_descale, cu_k, 6),
        )
    )  # fmt: skip
    assert error(out[None, :9], attend(of_q, of_k, of_v)[0]) < 0.05
    assert not out[9:].any() and lse[:, 9:].isneginf().all()


@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("qk", ["head", "row"])
def test_a_sequence_is_the_same_alone(device, qk, smooth_k):
    q, k, v = inputs(device, torch.bfloat16, ((20,), (26,)))
    cu_q, cu_k = offsets(device, 8, 12), offsets(device, 15, 11)
    options = {"qk_scaling": qk, "smooth_k": smooth_k, "hadamard": True}
    both = quantize_fp8(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    for b in range(2):
        rows_q, rows_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = quantize_fp8(q[None, rows_q], k[None, rows_k], v[None, rows_k], **options)
        assert torch.equal(both.v[rows_k].float(), one.v[0].float())
        for got, alone in ((both.q[rows_q], one.q[0]), (both.k[rows_k], one.k[0])):
            # The mean of k is a sum in another order.
            assert (got.float() != alone.float()).float().mean() <= 0.02 * smooth_k
        if smooth_k:
            torch.testing.assert_close(both.k_mean[b], one.k_mean[0])
            torch.testing.assert_close(both.mean_scores[:, rows_q], one.mean_scores[0])


@pytest.mark.parametrize("options", [
    {}, {"qk_scaling": "row", "v_scaling": "channel"}, {"qk_scaling": "tensor"},
    {"smooth_k": True, "hadamard": True}, {"power_of_two": True, "v_scaling": "tensor"},
    {"smooth_k": True, "hadamard": True, "qk_scaling": "row", "power_of_two": True},
])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_them(device, options, causal):
    q, k, v = (torch.randn(2, n, h, 64) for n, h in ((80, 4), (90, 2), (90, 2)))
    expected, expected_lse = attend(q, k, v, causal)
    x = quantize_fp8(*(y.to(device, torch.bfloat16) for y in (q, k, v)), **options)
    out, lse = flash_attn_func(x.q, x.k, x.v, causal=causal, return_lse=True, **x.descales())
    assert error(out, expected) < 0.08
    assert (x.corrected_lse(lse).cpu() - expected_lse).abs().max() < 0.25
    rounded = ((x.q, x.q_descale), (x.k, x.k_descale), (x.v, x.v_descale))
    exact, exact_lse = attend(*(wide(*y) for y in rounded), causal)
    assert error(out, exact) < 0.015
    assert (lse.cpu() - exact_lse).abs().max() < 0.03


def with_outliers(*shape: int) -> Tensor:
    """N(0, 1) + N(0, 100) Bernoulli(0.001), as FlashAttention-3's paper measures."""
    return torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)


@pytest.mark.parametrize(("seqlen", "dim", "ratio"), [(2048, 128, 1.5), (4096, 256, 1.9)])
def test_hadamard_and_smoothing_halve_the_error_of_outliers(device, seqlen, dim, ratio):
    """The larger the more: 1.9 and 2.6 times in the mean, from run to run within a tenth."""
    q, k, v = (with_outliers(1, seqlen, 2, dim) for _ in "qkv")
    heads = [attend(*(x[:, :, h : h + 1] for x in (q, k, v)))[0] for h in range(2)]
    errors = []
    for is_on in (False, True):
        x = quantize_fp8(*(y.to(device) for y in (q, k, v)), smooth_k=is_on, hadamard=is_on)
        out = flash_attn_func(x.q, x.k, x.v, **x.descales(), out_dtype=torch.float32)
        errors.append(error(out, torch.cat(heads, 2)))
    assert errors[1] <= errors[0] / ratio


def test_smoothing_helps_channels_that_all_keys_share(device):
    q, k, v = (torch.randn(1, 500, 2, 64) for _ in "qkv")
    k[..., ::16] += 30
    expected, expected_lse = attend(q, k, v)
    errors = []
    for smooth_k in (False, True):
        x = quantize_fp8(*(y.to(device) for y in (q, k, v)), smooth_k=smooth_k)
        out, lse = flash_attn_func(x.q, x.k, x.v, **x.descales(), return_lse=True)
        errors.append(error(out, expected))
    assert errors[1] < errors[0] / 2
    assert (x.corrected_lse(lse).cpu() - expected_lse).abs().max() < 0.15
    assert (lse.cpu() - expected_lse).abs().max() > 1


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("rows", ["dense", "packed"])
def test_mean_and_the_lse(device, rows, scale):
    q, k, v = inputs(device)
    k = k + 3
    mean = k.double().mean(1).cpu()
    scores = torch.einsum("bihd,bhd->bhi", q.double().cpu(), mean.repeat_interleave(2, 1))
    if rows == "dense":
        x = quantize_fp8(q, k, v, smooth_k=True, hadamard=True)
        _, lse = flash_attn_func(
            x.q, x.k, x.v, softmax_scale=scale, **x.descales(), return_lse=True
        )
    else:
        cu_q, cu_k = offsets(device, 30, 30), offsets(device, 37, 37)
        x = quantize_fp8(*(y.flatten(0, 1) for y in (q, k, v)), smooth_k=True, hadamard=True,
                         cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)  # fmt: skip
        _, lse = flash_attn_varlen_func(x.q, x.k, x.v, cu_q, cu_k, 30, 37, softmax_scale=scale,
                                        **x.descales(), return_lse=True)  # fmt: skip
        scores = scores.transpose(0, 1).flatten(1)
    torch.testing.assert_close(x.k_mean.cpu().double(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.mean_scores.cpu().double(), scores, rtol=1e-4, atol=1e-4)
    corrected = x.corrected_lse(lse, scale)
    assert corrected.shape == lse.shape and corrected.dtype == torch.float32
    expected = lse.cpu().double() + scores * (32**-0.5 if scale is None else scale)
    torch.testing.assert_close(corrected.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def test_an_lse_without_smoothing_is_right_as_it_is(device):
    x = quantize_fp8(*inputs(device))
    lse = torch.randn(2, 4, 30, device=device)
    assert x.corrected_lse(lse) is lse


@pytest.mark.parametrize("dim", [1, 2, 4, 64, 128, 256, 512])
def test_the_rotation_is_orthonormal_and_spreads(device, dim):
    """Of q and k the same one: from unit vectors, which are exact in e4m3 when they are spread."""
    unit = torch.eye(dim, device=device)[None, :, None]
    x = quantize_fp8(unit, unit, unit, hadamard=True)
    rotation = wide(x.k, x.k_descale)[0, :, 0]
    assert torch.equal(wide(x.q, x.q_descale)[0, :, 0], rotation)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(dim).double(), rtol=1e-6, atol=1e-6)
    assert (rotation.abs() - dim**-0.5).abs().max() < 1e-6
    common = torch.ones(dim).double() @ rotation  # what all dims share is spread, too
    assert common.abs().max() <= 2**0.5 + 1e-6


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Any, interleaved: bool) -> Tensor:
    """Rows of x (seqlen, heads, dim) at ``positions``, in fp64, pair by pair."""
    x, cos, sin = x.cpu().double().clone(), cos.cpu().double(), sin.cpu().double()
    half = cos.shape[1]
    given = x.clone()
    for row, position in enumerate(positions):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            c, s = cos[position, i], sin[position, i]
            x[row, :, a] = given[row, :, a] * c - given[row, :, b] * s
            x[row, :, b] = given[row, :, b] * c + given[row, :, a] * s
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [3, 16])
@pytest.mark.parametrize("rows", ["dense", "packed"])
def test_rotary_embedding(device, rows, half, interleaved):
    """The last query of a sequence is at the position of its last key."""
    angles = torch.rand(20, half) * 6
    cos, sin = angles.cos(), angles.sin()
    options = {
        "rotary_cos": cos.to(device), "rotary_sin": sin.to(device),
        "rotary_interleaved": interleaved, "qk_scaling": "row",
    }  # fmt: skip
    if rows == "dense":
        lengths, lead = [(7, 20)] * 2, ((2, 7), (2, 20))
    else:
        lengths, lead = [(5, 5), (0, 3), (2, 12)], ((7,), (20,))
        options |= {
            "cu_seqlens_q": offsets(device, 5, 0, 2), "cu_seqlens_k": offsets(device, 5, 3, 12),
        }  # fmt: skip
    q, k, v = inputs(device, lead=lead)
    x = quantize_fp8(q, k, v, **options)
    got_q, got_k = wide(x.q, x.q_descale), wide(x.k, x.k_descale)
    if rows == "dense":
        q, k, got_q, got_k = (y.flatten(0, 1) for y in (q, k, got_q, got_k))
    start_q = start_k = 0
    for of_q, of_k in lengths:
        rows_q, rows_k = slice(start_q, start_q + of_q), slice(start_k, start_k + of_k)
        for y, got, positions in (
            (q[rows_q], got_q[rows_q], range(of_k - of_q, of_k)),
            (k[rows_k], got_k[rows_k], range(of_k)),
        ):
            if not len(y):
                continue
            expected = rotate(y, cos, sin, positions, interleaved)
            largest = expected.abs().amax(-1, keepdim=True)
            assert ((got - expected).abs() <= 2.0**-4 * expected.abs() + 1e-5 * largest
                    + 2.0**-10 * largest / LARGEST).all()  # fmt: skip
        start_q, start_k = start_q + of_q, start_k + of_k


@pytest.mark.parametrize("options", [
    {}, {"smooth_k": True, "hadamard": True}, {"qk_scaling": "row", "v_scaling": "channel"},
    {"qk_scaling": "tensor", "v_scaling": "tensor"},
])  # fmt: skip
@pytest.mark.parametrize("lead", [
    ((0, 5), (0, 6)), ((2, 0), (2, 6)), ((2, 5), (2, 0)), ((2, 0), (2, 0)), ((1, 1), (1, 1)),
])  # fmt: skip
def test_empty_and_single(device, lead, options):
    q, k, v = inputs(device, lead=lead)
    x = quantize_fp8(q, k, v, **options)
    out, lse = flash_attn_func(x.q, x.k, x.v, **x.descales(), return_lse=True)
    assert out.shape == q.shape and out.isfinite().all()
    assert x.corrected_lse(lse).shape == (len(q), 4, q.shape[1])
    for descale in x.descales().values():
        assert descale.isfinite().all() and (descale > 0).all()


@pytest.mark.parametrize("qk", QK)
def test_no_sequences(device, qk):
    q, k, v = inputs(device, lead=((3,), (2,)))
    cu = offsets(device)
    x = quantize_fp8(q, k, v, qk_scaling=qk, smooth_k=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    out = flash_attn_varlen_func(x.q, x.k, x.v, cu, cu, 0, 0, **x.descales())
    assert out.shape == q.shape and not out.any()


@pytest.mark.parametrize(("qk", "of_v"), zip(QK, V, strict=True))
def test_zeros_and_what_is_not_finite(device, qk, of_v):
    q, k, v = inputs(device, torch.bfloat16)
    clean = [x.clone() for x in (q, k, v)]
    k[0, :, 0], v[0, :, 1] = 0, 0
    zeros = quantize_fp8(q, k, v, qk_scaling=qk, v_scaling=of_v)
    if qk != "tensor":
        of_zeros = zeros.k_descale[0, 0] if qk == "head" else zeros.k_descale[0, :, 0]
        assert of_zeros.eq(1).all()
        assert zeros.v_descale[0, 1].eq(1).all()
    assert not zeros.k[0, :, 0].float().any() and not zeros.v[0, :, 1].float().any()
    q, k, v = clean
    for x in (q, k, v):
        x[0, 3, 0, :3] = 0
    expected = quantize_fp8(q, k, v, qk_scaling=qk, v_scaling=of_v, smooth_k=True)
    for x in (q, k, v):
        x[0, 3, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    got = quantize_fp8(q, k, v, qk_scaling=qk, v_scaling=of_v, smooth_k=True)
    for name in ("q", "k", "v"):
        low, other = getattr(got, name).float(), getattr(expected, name).float()
        assert low[0, 3, 0, :3].isnan().all() and low.isnan().sum() == 3
        low[0, 3, 0, :3] = other[0, 3, 0, :3]
        assert name == "k" or torch.equal(low, other)  # 0 less the mean is no part of k's descale
    assert torch.equal(got.k_mean, expected.k_mean)
    assert all(x.isfinite().all() for x in got.descales().values())


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("size", [3e37, 65504.0, 1e-5, 1e-30, 1e-37, 1e-44])
def test_large_and_small_numbers(device, size, hadamard, power_of_two):
    """None is cut off, and a descale is a normal number."""
    x = torch.randn(1, 20, 2, 4).clamp(-1, 1).to(device) * size
    got = quantize_fp8(x, x, x, hadamard=hadamard, power_of_two=power_of_two)
    assert (got.v_descale >= 2.0**-126).all() and got.v_descale.isfinite().all()
    off = (wide(got.v, got.v_descale) - x.cpu().double()).abs()
    assert (off <= 0.0626 * x.cpu().double().abs() + 2.0**-10 * got.v_descale.max().item()).all()
    assert not got.q.float().isnan().any()


def test_layouts(device):
    """Any strides, and a last dimension that is not contiguous."""
    q, k, v = inputs(device)
    v = v[:, :1].expand_as(v)
    expected = quantize_fp8(q, k, v.contiguous())
    x = quantize_fp8(q.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT, v)
    for got, other in zip(x[:6], expected[:6], strict=True):
        assert torch.equal(got.float(), other.float())
    assert flash_attn_func(x.q, x.k, x.v, **x.descales()).shape == q.shape


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "smooth": {"smooth_k": True, "hadamard": True},
    "fine": {"qk_scaling": "row", "v_scaling": "channel", "power_of_two": True},
    "coarse": {"qk_scaling": "tensor", "v_scaling": "tensor"},
}


@pytest.mark.parametrize(
    ("name", "is_packed"), [("smooth", False), ("fine", True), ("coarse", True)]
)
def test_compiled_as_one_graph(device, name, is_packed):
    torch._dynamo.reset()
    angles = torch.rand(100, 16, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor, *cu: Tensor) -> tuple[Any, ...]:
        lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=False))
        x = quantize_fp8(q, k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(), **lengths,
                         **OPTIONS[name])  # fmt: skip
        if cu:
            out = flash_attn_varlen_func(
                x.q, x.k, x.v, *cu, 60, 60, **x.descales(), return_lse=True
            )
        else:
            out = flash_attn_func(x.q, x.k, x.v, **x.descales(), return_lse=True)
        return out[0], x.corrected_lse(out[1])

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (20, 33):
        if is_packed:
            args = [*inputs(device, lead=((n,), (n + 4,))), offsets(device, n - 5, 5),
                    offsets(device, n - 4, 8)]  # fmt: skip
        else:
            args = inputs(device, lead=((2, n), (2, n + 4)))
        for got, expected in zip(compiled(*args), call(*args), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_mapped(device, name):
    samples = [torch.stack(x) for x in zip(*(inputs(device) for _ in range(3)), strict=True)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        x = quantize_fp8(q, k, v, **OPTIONS[name])
        return tuple(y.float() for y in x if y is not None)

    expected = [torch.stack(x) for x in zip(*map(call, *samples), strict=True)]
    for got, alone in zip(torch.func.vmap(call)(*samples), expected, strict=True):
        torch.testing.assert_close(got, alone)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_needs_no_values_on_the_host(name, is_packed):
    """Tensors without values do."""
    lead = ((20,), (26,)) if is_packed else ((2, 20), (2, 26))
    q, k, v = (x.to("meta") for x in inputs("cpu", lead=lead))
    cos = torch.empty(30, 8, device="meta")
    options = dict(OPTIONS[name], rotary_cos=cos, rotary_sin=cos)
    if is_packed:
        cu = torch.empty(3, dtype=torch.int32, device="meta")
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    x = quantize_fp8(q, k, v, **options)
    assert x.q.shape == q.shape and x.k.shape == k.shape and x.v.dtype == E4M3


@pytest.mark.parametrize("options", [
    {}, {"qk_scaling": "tensor", "v_scaling": "channel"}, {"smooth_k": True, "hadamard": True},
])  # fmt: skip
def test_rows_before_the_first_sequence_have_no_part(device, options):
    q, k, v = inputs(device, lead=((17,), (16,)))
    cu_q, cu_k = offsets(device, 8, 6, first=3), offsets(device, 5, 6, first=4)
    clean = quantize_fp8(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    for x, first in ((q, 3), (k, 4), (v, 4)):
        x[:first] = 1e30
    x = quantize_fp8(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    for name in ("q_descale", "k_descale", "v_descale", "k_mean"):
        if getattr(clean, name) is not None:
            assert torch.equal(getattr(x, name), getattr(clean, name)), name
    assert torch.equal(x.k[4:].float(), clean.k[4:].float())


def test_bad_offsets_are_refused_if_values_are_checked():
    q, k, v = inputs("cpu", lead=((12,), (12,)))
    good, bad = offsets("cpu", 5, 7), torch.tensor([0, 12, 5], dtype=torch.int32)
    with flash_check.switched(), pytest.raises(ValueError, match="cu_seqlens_k"):
        quantize_fp8(q, k, v, cu_seqlens_q=good, cu_seqlens_k=bad)


def test_the_mean_of_large_keys_is_finite(device):
    q, k, v = inputs(device)
    k.fill_(3e38)
    assert quantize_fp8(q, k, v, smooth_k=True).k_mean.isfinite().all()


def test_exported_with_lengths_of_any_size():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            x = quantize_fp8(q, k, v, qk_scaling="row")
            return flash_attn_func(x.q, x.k, x.v, **x.descales())

    q, k, v = torch.randn(2, 12, 4, 16), *torch.randn(2, 2, 17, 2, 16)
    of_q, of_k = {1: torch.export.Dim("a")}, {1: torch.export.Dim("b")}
    exported = torch.export.export(Attention(), (q, k, v), dynamic_shapes=(of_q, of_k, of_k))
    others = torch.randn(2, 30, 4, 16), *torch.randn(2, 2, 9, 2, 16)
    torch.testing.assert_close(exported.module()(*others), Attention()(*others))


def test_autocast_changes_nothing(device):
    q, k, v = inputs(device)
    expected = quantize_fp8(q, k, v, smooth_k=True, hadamard=True)
    with torch.autocast(device, torch.bfloat16):
        got = quantize_fp8(q, k, v, smooth_k=True, hadamard=True)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x.float(), y.float())


def test_inputs_stay_as_they_are(device):
    given = inputs(device)
    copies = [x.clone() for x in given]
    quantize_fp8(*given, smooth_k=True, hadamard=True)
    assert all(map(torch.equal, given, copies))


def test_gradients_are_refused():
    q, k, v = inputs("cpu")
    k.requires_grad_()
    with pytest.raises(NotImplementedError, match="q, k, v or a rotary table requires grad"):
        quantize_fp8(q, k, v)
    table = torch.ones(40, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="q, k, v or a rotary table requires grad"):
        quantize_fp8(q, k.detach(), v, rotary_cos=table, rotary_sin=table)
    with torch.no_grad():
        assert not quantize_fp8(q, k, v).k_descale.requires_grad


COS = torch.ones(40, 8)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "qk_scaling": ({"qk_scaling": "channel"}, ValueError,
                   "qk_scaling is 'channel'; supported: head, tensor, row"),
    "v_scaling": ({"v_scaling": "row"}, ValueError,
                  "v_scaling is 'row'; supported: head, tensor, channel"),
    "no string": ({"v_scaling": None}, ValueError, "v_scaling is None"),
    "head dim": ({n: torch.ones(2, 30, 2, 24) for n in "qk"}, ValueError,
                 "hadamard is given, and q's head dim is 24; supported: powers of two"),
    "flag": ({"smooth_k": "yes"}, TypeError, "smooth_k is str; expected a bool"),
    "power": ({"power_of_two": 2}, ValueError, "power_of_two is 2; expected a bool"),
    "packed without offsets": ({n: torch.ones(30, 2, 32) for n in "qkv"}, ValueError,
                               "cu_seqlens_q is None"),
    "fp64": ({n: torch.ones(2, 30, 2, 32).double() for n in "qkv"}, TypeError,
             "q has dtype torch.float64; supported: torch.float16, torch.bfloat16, torch.float32"),
    "fp8": ({"q": torch.ones(2, 30, 2, 32).to(E4M3)}, TypeError, "q has dtype torch.float8_e4m3fn"),
    "integers": ({"q": torch.ones(2, 30, 2, 32).int()}, TypeError, "q has dtype torch.int32"),
    "one dtype": ({"v": torch.ones(2, 30, 2, 32).half()}, TypeError, "dtypes differ"),
    "rank": ({"q": torch.ones(30, 2, 32)}, ValueError, "q has 3 dimensions"),
    "heads": ({"q": torch.ones(2, 30, 3, 32)}, ValueError, "q has 3 heads and k 2"),
    "one cu_seqlens": ({"q": torch.ones(30, 2, 32), "k": torch.ones(30, 2, 32),
                        "v": torch.ones(30, 2, 32),
                        "cu_seqlens_q": torch.tensor([0, 30], dtype=torch.int32)}, TypeError,
                       "cu_seqlens_k is NoneType"),
    "one table": ({"rotary_cos": COS}, ValueError, "rotary_cos or rotary_sin is None"),
    "width": ({"rotary_cos": torch.ones(40, 17), "rotary_sin": torch.ones(40, 17)}, ValueError,
              "rotary_cos has shape"),
    "tables": ({"rotary_cos": COS.half(), "rotary_sin": COS.half()}, TypeError,
               "rotary_cos is torch.float16; q is torch.float32"),
    "positions": ({"rotary_cos": COS[:9], "rotary_sin": COS[:9]}, ValueError,
                  "rotary_cos has 9 positions, and k 30 rows"),
    "queries": ({"q": torch.ones(2, 31, 2, 32), "rotary_cos": COS, "rotary_sin": COS}, ValueError,
                "q has 31 rows, k 30"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    change, kind, words = BAD[name]
    given = {n: torch.ones(2, 30, 2, 32) for n in "qkv"}
    with pytest.raises(kind, match=words):
        quantize_fp8(**given | {"hadamard": True} | change)
