"""quantize_fp8: its scales and values, entry by entry."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fp8_oracle import E4M3, LARGEST, QK, V, attend, error, inputs, offsets, wide
from torch import Tensor

from flash_cute import flash_attn_func, flash_attn_varlen_func, quantize_fp8
from flash_cute.fp8 import Fp8Inputs

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


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


def test_the_mean_of_large_keys_is_finite(device):
    q, k, v = inputs(device)
    k.fill_(3e38)
    assert quantize_fp8(q, k, v, smooth_k=True).k_mean.isfinite().all()


def test_layouts(device):
    """Any strides, and a last dimension that is not contiguous."""
    q, k, v = inputs(device)
    v = v[:, :1].expand_as(v)
    expected = quantize_fp8(q, k, v.contiguous())
    x = quantize_fp8(q.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT, v)
    for got, other in zip(x[:6], expected[:6], strict=True):
        assert torch.equal(got.float(), other.float())
    assert flash_attn_func(x.q, x.k, x.v, **x.descales()).shape == q.shape


def test_inputs_stay_as_they_are(device):
    given = inputs(device)
    copies = [x.clone() for x in given]
    quantize_fp8(*given, smooth_k=True, hadamard=True)
    assert all(map(torch.equal, given, copies))
