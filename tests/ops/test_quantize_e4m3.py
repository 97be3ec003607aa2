"""The op quantize_e4m3, of one tensor; quantize_fp8, which calls it, has tests of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fp8_oracle import E4M3, LARGEST, offsets, wide

from flash_cute.ops.typed import OPS

SCALINGS = ["head", "tensor", "row", "channel"]
SCHEMA = (
    'flash_cute::quantize_e4m3(Tensor x, Tensor? cu_seqlens=None, str scaling="head", '
    "SymInt? heads_k=None, bool power_of_two=False, bool hadamard=False, bool subtract_mean=False) "
    "-> (Tensor values, Tensor descale, Tensor? mean)"
)


def test_schema_is_pinned():
    assert str(torch.ops.flash_cute.quantize_e4m3.default._schema) == SCHEMA


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_values_and_descales(device, scaling, packed, power_of_two):
    """The largest number that shares a descale becomes 448, or with powers of two more than 224."""
    x = torch.randn(2, 30, 4, 16) * torch.randn(2, 30, 4, 1).exp() * torch.randn(16).exp()
    cu_seqlens = offsets("cpu", 30, 30) if packed else None
    given = x.flatten(0, 1) if packed else x
    values, descale, mean = OPS.quantize_e4m3(
        given.to(device), None if cu_seqlens is None else cu_seqlens.to(device), scaling,
        power_of_two=power_of_two,
    )  # fmt: skip
    assert values.dtype == E4M3 and values.shape == given.shape and mean is None
    shape = {"head": (2, 4), "tensor": (1,), "row": (*given.shape[:-1], 1), "channel": (2, 4, 16)}
    assert descale.shape == shape[scaling] and descale.dtype == torch.float32
    dims = {"head": (1, 3), "tensor": (0, 1, 2, 3), "row": (3,), "channel": (1,)}[scaling]
    largest = x.abs().amax(dims, keepdim=True)
    found = values.float().cpu().view(x.shape).abs().amax(dims, keepdim=True)
    if power_of_two:
        assert (torch.frexp(descale)[0] == 0.5).all() and (found > 216).all()
    else:
        assert torch.equal(found, torch.full_like(found, LARGEST))
    meant = wide(values, descale, cu_seqlens).view(x.shape)
    off = (meant - x.double()).abs()
    assert (off <= 2.0**-4 * x.abs() + 2.0**-10 / 200 * largest).all()


def test_heads_that_share_a_kv_head(device):
    x = torch.randn(2, 20, 6, 16, device=device)
    _, descale, _ = OPS.quantize_e4m3(x, heads_k=2)
    expected = x.abs().amax((1, 3)).unflatten(1, (2, 3)).amax(2) / LARGEST
    torch.testing.assert_close(descale, expected)


def test_what_is_not_finite_and_what_is_all_zero(device):
    x = torch.randn(1, 8, 2, 16, device=device)
    x[0, 1, 0, 2], x[0, 2, 0, 3], x[0, 3, 0, 4] = math.nan, math.inf, -math.inf
    x[:, :, 1] = 0
    values, descale, _ = OPS.quantize_e4m3(x)
    assert torch.equal(values.float().isnan(), ~x.isfinite())
    finite = torch.where(x.isfinite(), x.abs(), 0).amax((1, 3))
    torch.testing.assert_close(descale[0, 0], finite[0, 0] / LARGEST)
    assert descale[0, 1] == 1 and not values.float()[:, :, 1].any()


def test_rows_of_no_sequence_are_cut_off_and_never_nan(device):
    x = torch.randn(10, 2, 16, device=device)
    x[8:] *= 1e20
    values, descale, _ = OPS.quantize_e4m3(x, offsets(device, 8))
    assert values.float().isfinite().all() and values.float()[8:].abs().max() == LARGEST
    torch.testing.assert_close(descale, x[None, :8].abs().amax((1, 3)) / LARGEST)


def test_without_a_sequence_nothing_is_taken_from_rows(device):
    x = torch.tensor([[[448.0, -2.0]]], device=device)
    values, descale, mean = OPS.quantize_e4m3(x, offsets(device), subtract_mean=True)
    assert torch.equal(values.float(), x) and descale.shape == (0, 1) and mean is not None
    assert mean.shape == (0, 1, 2)


def test_results_are_contiguous(device):
    x = torch.randn(2, 4, 9, 16, device=device).transpose(1, 2)
    for scaling in SCALINGS:
        results = OPS.quantize_e4m3(x, None, scaling, subtract_mean=True)
        assert all(y is not None and y.is_contiguous() for y in results)


def test_mean_and_hadamard(device):
    """Scores keep their differences: of q and k spread by the same matrix, k without its mean."""
    q, k = torch.randn(1, 9, 2, 64, device=device), torch.randn(1, 70, 2, 64, device=device) + 5
    values, descale, mean = OPS.quantize_e4m3(k, None, "row", hadamard=True, subtract_mean=True)
    torch.testing.assert_close(mean, k.mean(1))
    spread_q, of_q, _ = OPS.quantize_e4m3(q, None, "row", hadamard=True)
    scores = torch.einsum("bihd,bjhd->bhij", wide(spread_q, of_q), wide(values, descale))
    expected = torch.einsum("bihd,bjhd->bhij", q.cpu().double(), (k - mean[:, None]).cpu().double())
    assert ((scores - expected).norm() / expected.norm()) < 0.06


@pytest.mark.parametrize("scaling", SCALINGS)
def test_opcheck(device, scaling):
    """But for the schema, which torch checks by comparing e4m3 as it cannot."""
    x, cu = torch.randn(10, 2, 16, device=device), offsets(device, 4, 6)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.flash_cute.quantize_e4m3.default, (x, cu, scaling, None, True, True, True),
        test_utils=tests,
    )  # fmt: skip


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"x": torch.zeros(1, 2, 2, 8).double()}, TypeError, "x has dtype torch.float64"),
    "dims": ({"x": torch.zeros(2, 2, 8)}, ValueError, "x has shape .* cu_seqlens is None"),
    "packed": ({"cu_seqlens": offsets("cpu", 2)}, ValueError, "x has shape .* cu_seqlens is given"),
    "scaling": ({"scaling": "block"}, ValueError, "scaling is 'block'; supported: head, tensor"),
    "heads": ({"heads_k": 3}, ValueError, "heads_k is 3, and x has 4 heads"),
    "channels": ({"heads_k": 2, "scaling": "channel"}, ValueError, "heads_k is 2"),
    "dim": ({"x": torch.zeros(1, 2, 2, 12), "hadamard": True}, ValueError, "x's head dim is 12"),
    "no dim": ({"x": torch.zeros(1, 2, 4, 0)}, ValueError, "x has head dim 0"),
    "offsets": ({"x": torch.zeros(2, 2, 8), "cu_seqlens": torch.zeros(2)}, TypeError,
                "cu_seqlens has dtype"),
    "gradient": ({"x": torch.zeros(1, 2, 2, 8).requires_grad_()}, NotImplementedError,
                 "x requires grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    change, kind, words = BAD[name]
    call = {"x": torch.zeros(1, 2, 4, 8)} | change
    with pytest.raises(kind, match=words):
        OPS.quantize_e4m3(**call)
    if name != "gradient":
        with torch.inference_mode(), pytest.raises(kind, match=words):
            OPS.quantize_e4m3(**call)
