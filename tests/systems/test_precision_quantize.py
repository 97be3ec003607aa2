"""Codes in bytes, and rounding of rows."""

from __future__ import annotations

import pytest
import torch
from precision_models import error

from flash_cute.precision import AllocationStrategy, PrecisionConfig, PrecisionFormat
from flash_cute.precision.allocate import BudgetError, Choice, allocate, uniform
from flash_cute.precision.quantize import Layout, pack, packed_width, restore, round_rows, unpack
from flash_cute.precision.sensitivity import entropy

INTEGERS = [form for form in PrecisionFormat if form.is_integer]


@pytest.mark.parametrize("bits", range(1, 13))
def test_packing_is_lossless_and_small(device: str, bits: int):
    for cols in (1, 7, 64, 130):
        codes = torch.randint(0, 2**bits, (5, cols), dtype=torch.int16).to(device)
        packed = pack(codes, bits)
        assert packed.dtype == torch.uint8 and packed.shape == (5, packed_width(bits, cols))
        assert packed.shape[1] <= cols * bits / 8 + bits.bit_count()
        assert torch.equal(unpack(packed, bits, cols).to(torch.int16), codes)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e4])
@pytest.mark.parametrize("form", [*INTEGERS, PrecisionFormat.FP8_E4M3], ids=lambda f: f.value)
def test_rounding_of_gaussians(form: PrecisionFormat, scale: float):
    """Within twice the error of levels that just cover 3.5 sigma, at any scale of the weights."""
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)) * scale
    weight[5] = 0
    for group in (0, 64) if form.is_integer else (0,):
        rounded = round_rows(weight, Layout(form, group))
        got = restore(rounded, 256, torch.float32)
        bound = 0.03 if form is PrecisionFormat.FP8_E4M3 else 3.5 / 3**0.5 / 2**form.bits
        assert error(got / scale, weight / scale) < max(bound, 1e-9)
        assert rounded.codes.nbytes + rounded.steps.nbytes == rounded.layout.nbytes(32, 256)


@pytest.mark.parametrize(
    ("values", "form"),
    [
        ([-0.3, 0.3], PrecisionFormat.INT1),
        ([0.0, 0.7], PrecisionFormat.INT1),
        ([-0.7, 0.0, 0.7], PrecisionFormat.INT2),
        ([-3.0, -1.0, 1.0, 3.0], PrecisionFormat.INT2),
    ],
)
def test_few_values_are_held_exactly(values: list[float], form: PrecisionFormat):
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(values), (16, 100), generator=generator)
    weight = torch.tensor(values).half()[places]
    assert torch.equal(restore(round_rows(weight, Layout(form)), 100, torch.float16), weight)


def test_entropy_in_bits():
    noise = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    scales = torch.linspace(0.1, 9, 64)[:, None]
    assert entropy(noise.sign() * scales) == pytest.approx(1, abs=0.01)
    assert entropy((noise * 0.9).round().clamp(-1, 1)) == pytest.approx(1.58, abs=0.05)
    assert 6.5 < entropy(noise) < 8
    assert entropy(torch.ones(4, 64)) == 0 and entropy(torch.zeros(4, 64)) == 0


def choices(*pairs: tuple[int, float]) -> list[Choice]:
    forms = [PrecisionFormat.INT1, PrecisionFormat.INT2, PrecisionFormat.INT4]
    return [Choice(Layout(f), *pair) for f, pair in zip(forms, pairs, strict=True)]


def test_allocation_takes_what_a_byte_gains_most():
    blocks = [choices((1, 9.0), (2, 8.5), (4, 0.0)), choices((1, 5.0), (2, 1.0), (4, 0.0))]
    assert [c.nbytes for c in allocate(blocks, 6)] == [4, 2]
    assert [c.nbytes for c in allocate(blocks, 3)] == [1, 2]
    assert [c.nbytes for c in allocate(blocks, 99)] == [4, 4]
    assert [c.nbytes for c in uniform(blocks, 7)] == [2, 2]
    for pick in (allocate, uniform):
        with pytest.raises(BudgetError) as refusal:
            pick(blocks, 1)
        assert refusal.value.least == 2


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"target_memory_reduction": -0.1}, ValueError),
        ({"target_memory_reduction": 1.0}, ValueError),
        ({"target_memory_reduction": float("nan")}, ValueError),
        ({"target_memory_reduction": "0.4"}, TypeError),
        ({"entropy_threshold": -1}, ValueError),
        ({"entropy_threshold": 8.5}, ValueError),
        ({"gradient_weight": 1.5}, ValueError),
        ({"activation_weight": -0.5}, ValueError),
        ({"base_precision": PrecisionFormat.INT4}, ValueError),
        ({"base_precision": "fp16"}, TypeError),
        ({"allocation_strategy": "entropy_based"}, TypeError),
        ({"quantization_mode": AllocationStrategy.UNIFORM}, TypeError),
    ],
)
def test_config_refuses_by_name(fields: dict[str, object], kind: type[Exception]):
    with pytest.raises(kind, match=next(iter(fields))):
        PrecisionConfig(**fields)  # type: ignore[arg-type]
