"""The op dequantize_e4m3, beside torch's arithmetic in fp32."""

from __future__ import annotations

import pytest
import torch
from fp8_oracle import E4M3

from flash_cute.ops.typed import OPS

DTYPES = [torch.float16, torch.bfloat16]


def every_number(shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Tensors that begin with each of e4m3's 256 codes."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)[: codes.numel()]
    return codes.to(device).view(E4M3)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of numbers; of all NaN the same."""
    return x.masked_fill(x.isnan(), torch.nan).view(torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [1, 2, 6])
@pytest.mark.parametrize("lead", [(3, 7), (11,), (1, 2, 3), (2048,)])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 1, 7, 40])
def test_numbers_are_those_of_fp32_rounded_once(device, dtype, scales, lead, dim):
    values = every_number((*lead, 6, dim), device)
    descale = torch.rand(scales, device=device) * 2.0 ** torch.randint(-20, 9, (scales,)).to(device)
    found = OPS.dequantize_e4m3(values, descale, dtype)
    of_heads = descale.repeat_interleave(6 // scales)[:, None]
    expected = (values.float() * of_heads).to(dtype)
    assert found.dtype == dtype and found.is_contiguous()
    assert torch.equal(bits(found), bits(expected))


def test_powers_of_two_change_no_number(device):
    values = every_number((4, 4, 64), device)
    descale = 2.0 ** torch.tensor([-100.0, -3.0, 0.0, 90.0], device=device)
    found = OPS.dequantize_e4m3(values, descale, torch.bfloat16)
    assert torch.equal((found.double() / descale[:, None].double()).nan_to_num(9.0),
                       values.double().nan_to_num(9.0))  # fmt: skip


def test_values_need_not_begin_on_vectors(device):
    values = every_number((20 * 4 * 32 + 3,), device)[3:].view(20, 4, 32)
    descale = torch.rand(4, device=device)
    found = OPS.dequantize_e4m3(values, descale, torch.float16)
    expected = (values.float() * descale[:, None]).half()
    assert torch.equal(bits(found), bits(expected))


def test_nothing(device):
    empty = torch.empty(0, 4, 64, device=device).to(E4M3)
    found = OPS.dequantize_e4m3(empty, torch.ones(4, device=device), torch.float16)
    assert found.shape == empty.shape and found.dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": torch.zeros(5, 4, 16)}, "values is torch.float32"),
        ({"values": torch.zeros(4, 16).to(E4M3)}, r"shape \(4, 16\)"),
        ({"values": torch.zeros(5, 16, 4).to(E4M3).mT}, "values is not contiguous"),
        ({"descale": torch.ones(4, dtype=torch.float64)}, "descale is torch.float64"),
        ({"descale": torch.ones(3)}, "descale has 3 elements, and values 4 heads"),
        ({"descale": torch.ones(0)}, "descale has 0 elements"),
        ({"dtype": torch.float32}, "dtype is torch.float32; supported: "),
    ],
)
def test_refusals(device, change, words):
    given = {
        "values": torch.zeros(5, 4, 16).to(E4M3), "descale": torch.ones(4), "dtype": torch.float16
    } | change  # fmt: skip
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    with pytest.raises((TypeError, ValueError), match=words):
        OPS.dequantize_e4m3(**given)


def test_it_has_no_gradient(device):
    values, descale = torch.zeros(5, 4, 16, device=device).to(E4M3), torch.ones(4, device=device)
    with pytest.raises(NotImplementedError, match="requires grad"):
        OPS.dequantize_e4m3(values, descale.requires_grad_(), torch.float16)


def test_opcheck(device):
    """torch's check of the schema has no operators for e4m3."""
    values = torch.randn(2, 9, 4, 16, device=device).to(E4M3)
    given = (values, torch.rand(2, device=device), torch.bfloat16)
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.flash_cute.dequantize_e4m3.default, given, test_utils=utilities)
