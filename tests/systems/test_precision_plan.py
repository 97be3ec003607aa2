"""Plans of adaptive precision: which layouts there are, what each costs, which are taken."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest
import torch
from precision_models import encoder, model_bytes, perceptron, reachable_bytes
from torch import nn
from torch.nn.utils import parametrizations

from flash_cute.precision import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
    create_ultra_precision_module,
)
from flash_cute.precision.allocate import BudgetError, Choice, allocate, uniform
from flash_cute.precision.plan import (
    base_bytes,
    block_rows,
    budget_for,
    held_bytes,
    layouts,
    packable,
    squared_error,
    tabulate,
    tensors,
)
from flash_cute.precision.quantize import Layout, restore, round_rows

FORMATS = list(PrecisionFormat)
FP32, FP16, BF16, FP8 = (PrecisionFormat(x) for x in ("fp32", "fp16", "bf16", "fp8_e4m3"))


def random_blocks(pick: random.Random) -> list[list[Choice]]:
    """Up to 4 blocks with the same few layouts, of random bytes and errors."""
    forms = pick.sample(FORMATS, pick.randint(1, 5))

    def choice(form: PrecisionFormat) -> Choice:
        return Choice(Layout(form), pick.randint(1, 20), pick.choice([0.0, pick.random(), 0.5]))

    return [[choice(form) for form in forms] for _ in range(pick.randint(1, 4))]


def bytes_of(choices: list[Choice] | tuple[Choice, ...]) -> int:
    return sum(choice.nbytes for choice in choices)


def error_of(choices: list[Choice] | tuple[Choice, ...]) -> float:
    return sum(choice.error for choice in choices)


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_of_as_many_bytes_has_less_error(seed: int):
    """Of all that there are; and every choice is of its own block."""
    pick = random.Random(seed)
    blocks = random_blocks(pick)
    least = sum(min(choice.nbytes for choice in block) for block in blocks)
    taken = allocate(blocks, budget := least + pick.randint(0, 30))
    assert all(choice in block for choice, block in zip(taken, blocks, strict=True))
    assert bytes_of(taken) <= budget
    others = [error_of(x) for x in itertools.product(*blocks) if bytes_of(x) <= bytes_of(taken)]
    assert error_of(taken) == pytest.approx(min(others), abs=1e-12)
    assert bytes_of(allocate(blocks, least)) == least
    with pytest.raises(BudgetError, match=f"is {least} bytes, more than {least - 1}") as refusal:
        allocate(blocks, least - 1)
    assert refusal.value.least == least


def test_bytes_that_are_left_go_to_blocks_that_can_use_them():
    """A step that is too large for the budget ends its own block alone."""
    forms = [Layout(form) for form in FORMATS[:2]]
    large = [Choice(forms[0], 1, 100.0), Choice(forms[1], 50, 0.0)]
    small = [Choice(forms[0], 1, 1.0), Choice(forms[1], 3, 0.0)]
    for blocks in ([large, small, small], [small, large, small]):
        taken = allocate(blocks, 7)
        assert sorted(choice.nbytes for choice in taken) == [1, 3, 3]


@pytest.mark.parametrize("seed", range(40))
def test_uniform_takes_the_best_layout_that_all_have(seed: int):
    pick = random.Random(seed)
    blocks = random_blocks(pick)
    if pick.random() < 0.5:  # a layout that one block lacks
        lacking = pick.randrange(len(blocks))
        blocks[lacking] = blocks[lacking][1:] or blocks[lacking]
    alike = [x for x in itertools.product(*blocks) if len({c.layout for c in x}) == 1]
    budget = pick.choice([bytes_of(x) for x in alike])
    best = min((error_of(x), bytes_of(x)) for x in alike if bytes_of(x) <= budget)
    taken = uniform(blocks, budget)
    assert (error_of(taken), bytes_of(taken)) == best and len({c.layout for c in taken}) == 1
    least = min(map(bytes_of, alike))
    with pytest.raises(BudgetError) as refusal:
        uniform(blocks, least - 1)
    assert refusal.value.least == least
    assert uniform([], 0) == allocate([], 0) == []


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.value)
def test_formats_are_what_their_names_say(form: PrecisionFormat):
    name = form.value
    assert form.bits == int(re.sub(r"_.*|\D", "", name)) and form.is_integer == ("int" in name)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert form.dtype is (dtypes | {"fp8_e4m3": torch.float8_e4m3fn}).get(name)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.value)
@pytest.mark.parametrize(("cols", "group"), [(64, 0), (128, 64), (65, 0), (3, 0)])
def test_bytes_of_a_layout_are_those_that_are_stored(form: PrecisionFormat, cols: int, group: int):
    """Codes of each power of two begin at a byte of their own; a step takes 2 bytes."""
    layout = Layout(form, group if form.is_integer else 0)
    rounded = round_rows(torch.randn(5, cols), layout)
    assert rounded.codes.nbytes + rounded.steps.nbytes == layout.nbytes(5, cols)
    powers = [n for n in (32, 16, 8, 4, 2, 1) if form.bits & n]
    steps = 0 if form in (FP32, FP16, BF16) else max(1, cols // layout.group if layout.group else 1)
    assert layout.nbytes(5, cols) == 5 * (sum(math.ceil(cols * n / 8) for n in powers) + 2 * steps)


# Mean squared error of the best uniform quantizer of a unit Gaussian (J. Max, 1960).
BEST_OF_GAUSSIAN = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154, 5: 0.00349}


@pytest.mark.parametrize("bits", range(1, 13))
@pytest.mark.parametrize("group", [0, 64])
def test_rounding_is_to_the_nearest_level_with_as_little_error_as_can_be(bits: int, group: int):
    """Few bits: that of the best quantizer of a Gaussian. Many: that of levels from the least to
    the largest value, (2 peak / (2^bits - 1))^2 / 12 in the mean."""
    form = PrecisionFormat(f"int{bits}")
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(bits))
    rounded = round_rows(weight, Layout(form, group))
    got = restore(rounded, 256, torch.float32)
    steps = rounded.steps.float() * 2.0**rounded.exponent
    levels = steps[..., None] * (torch.arange(2**bits) - rounded.zero)
    parts = weight.unflatten(1, (steps.shape[1], -1))[:2]
    nearest = (parts[..., None] - levels[:2, :, None]).abs().amin(-1).flatten(1)
    torch.testing.assert_close((got - weight)[:2].abs(), nearest, rtol=0, atol=1e-6)
    error = (got - weight).square().mean().item()
    peaks = weight.unflatten(1, (-1, group or 256)).abs().amax(-1)
    bound = BEST_OF_GAUSSIAN.get(bits, (2 * peaks / (2**bits - 1)).square().mean().item() / 12)
    assert error < (1.05 if group == 0 else 1.0) * bound


def test_rounding_to_fp8_is_within_half_a_unit():
    """3 bits of mantissa: 2^-4 of each value, and half of the least subnormal, 2^-10 steps."""
    weight = torch.randn(8, 512) * torch.logspace(-6, 4, 8)[:, None]
    weight[3] *= torch.logspace(-5, 0, 512)
    rounded = round_rows(weight, Layout(FP8))
    steps = weight.abs().amax(1, keepdim=True) / 448
    error = (restore(rounded, 512, torch.float32) - weight).abs()
    smallest = 2.0**-10 * steps + 1e-7 * weight.abs().max()  # steps are fp16, below the largest
    assert (error <= (2.0**-4 + 2.0**-10) * weight.abs() + smallest).all()


def config(target: float = 0.4, **fields: object) -> PrecisionConfig:
    return PrecisionConfig(target_memory_reduction=target, **fields)  # type: ignore[arg-type]


def forms_of(dtype: torch.dtype, base: PrecisionFormat, floor: int = 1) -> list[PrecisionFormat]:
    found = layouts(torch.ones(64, 64, dtype=dtype), config(base_precision=base), floor)
    return [layout.format for layout in found]


def test_layouts_are_no_wider_than_the_base_and_no_narrower_than_the_floor():
    narrow = [form for form in FORMATS if form.bits <= 12]
    assert forms_of(torch.float16, FP16) == [FP16, *narrow]
    assert forms_of(torch.bfloat16, FP16) == [BF16, *narrow]
    assert forms_of(torch.float32, FP16) == [FP16, *narrow]
    assert forms_of(torch.float16, FP32) == [FP16, *narrow]
    assert forms_of(torch.float32, FP32) == [FP32, *narrow, FP16, BF16]
    for base in (FP8, PrecisionFormat.INT8):
        found = forms_of(torch.float16, base)
        assert found[0] is base and {*found} == {form for form in FORMATS if form.bits <= 8}
        assert len(found) == len({*found})
    for floor in (2, 5, 12):
        assert min(form.bits for form in forms_of(torch.float16, FP16, floor)) == floor


@pytest.mark.parametrize(
    ("cols", "mode", "grouped"),
    [(128, "dynamic", True), (128, "weight_only", True), (128, "static", False),
     (64, "dynamic", False), (96, "dynamic", False), (192, "dynamic", True)],
)  # fmt: skip
def test_columns_share_a_scale_by_64_where_that_divides_a_longer_row(cols, mode, grouped):
    weight = torch.ones(8, cols, dtype=torch.float16)
    found = layouts(weight, config(quantization_mode=QuantizationMode(mode)), 1)
    groups = {layout.format for layout in found if layout.group}
    assert groups == ({PrecisionFormat(f"int{n}") for n in range(1, 9)} if grouped else set())
    assert {layout.group for layout in found} == ({0, 64} if grouped else {0})


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, [1]), (127, [127]), (128, [64, 64]), (200, [66, 67, 67]), (1002, [250, 251, 250, 251])],
)
def test_blocks_are_of_64_rows_or_more_and_at_most_4(rows: int, sizes: list[int]):
    weight = torch.empty(rows, 8) if rows > 1 else torch.empty(1, 1, 8)
    assert block_rows(weight, False) == sizes and block_rows(weight, True) == [rows]


class Kinds(nn.Module):
    """Weights of 63 and 64 numbers, tied, recurrent, parametrized, of one dim, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(9, 7), nn.Linear(8, 8)
        self.tied, self.vector = nn.Linear(8, 8), nn.Parameter(torch.ones(100))
        self.tied.weight = self.large.weight
        self.recurrent, self.conv = nn.GRU(8, 8), nn.Conv1d(4, 4, 4)
        self.normed = parametrizations.weight_norm(nn.Linear(16, 16))
        self.ids = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
        self.register_buffer("table", torch.ones(64, 64))


def test_what_can_be_packed_and_bytes_of_the_rest():
    model = Kinds()
    weights = packable(model)
    assert list(weights) == ["large.weight", "conv.weight"]
    kept = [*model.named_parameters(), ("table", model.table)]
    floats = sum(x.numel() for _, x in kept if x.is_floating_point())
    for base, size in ((FP32, 4), (BF16, 2), (PrecisionFormat.INT8, 1)):
        assert base_bytes(model, base) == size * floats + 64
    others = sum(x.nbytes for name, x in kept if name not in weights)
    for target in (0.0, 0.25):
        allowed = math.floor((1 - target) * base_bytes(model, FP32))
        assert budget_for(model, weights, config(target, base_precision=FP32)) == allowed - others
    model.large.weight.data[3, 2] = torch.inf
    with pytest.raises(ValueError, match=r"must be finite, and large\.weight is not"):
        packable(model)


def test_storages_count_once_and_whole():
    x = torch.ones(10, 8)
    assert held_bytes([x, x[2:], x.T]) == 320 and held_bytes([x[:1], torch.ones(3)]) == 332
    model = Kinds()
    assert len(tensors(model)) == len({id(t) for t in model.parameters()}) + 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_count_with_what_they_hold(layout: torch.layout):
    """Indices stay as they are in any base; a sparse parameter is not packed."""
    model = nn.Linear(64, 64)
    mask = torch.rand(64, 64) < 0.1
    count = int(mask.sum())
    model.register_buffer("table", mask.float().to_sparse(layout=layout))
    model.other = nn.Parameter(mask.double().to_sparse(layout=layout), requires_grad=False)
    indices = 8 * (2 * count if layout is torch.sparse_coo else count + 65)
    floats, own = 64 * 65, held_bytes([model.table, model.other])
    assert 2 * indices + 12 * count <= own <= 4 * indices + 12 * count  # CSR may hold COO's memory
    assert held_bytes(tensors(model)) == 4 * floats + own
    for base, size in ((FP32, 4), (FP16, 2)):
        assert base_bytes(model, base) == size * (floats + 2 * count) + 2 * indices
    weights = packable(model)
    assert list(weights) == ["weight"]
    room = base_bytes(model, FP32) - own - 4 * 64
    assert budget_for(model, weights, config(0.0, base_precision=FP32)) == room


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100])
def test_errors_are_estimated_from_evenly_spaced_rows(rows: int):
    weight = torch.randn(1, 64).expand(rows, 64).contiguous()
    layout = Layout(PrecisionFormat.INT3)
    exact = (restore(round_rows(weight, layout), 64, torch.float32) - weight).square().sum().item()
    assert squared_error(weight, layout) == pytest.approx(exact, rel=1e-5)
    if rows <= 32:
        weight = torch.randn(rows, 64) * torch.linspace(0.1, 5, rows)[:, None]
        change = restore(round_rows(weight, layout), 64, torch.float32) - weight
        assert squared_error(weight, layout) == pytest.approx(change.square().sum().item())


@pytest.mark.parametrize("strategy", ["uniform", "entropy_based"])
def test_the_largest_target_in_the_error_can_be_met(strategy: str):
    model, chosen = encoder(), {"allocation_strategy": AllocationStrategy(strategy)}
    with pytest.raises(
        ValueError, match=r"=0\.99 cannot be met: this config can save at"
    ) as refusal:
        create_ultra_precision_module(model, config(0.99, **chosen))
    most = float(re.search(r"at most (\d\.\d+)", str(refusal.value)).group(1))
    small = create_ultra_precision_module(model, config(most, **chosen))
    assert most <= 1 - reachable_bytes(small) / model_bytes(model) < most + 2e-4
    with pytest.raises(ValueError, match=f"can save at most {most} of this"):
        create_ultra_precision_module(model, config(most + 2e-4, **chosen))


@pytest.mark.parametrize(("threshold", "least"), [(1.5, 2), (3.0, 3), (3.5, 4), (0.0, 1), (8.0, 1)])
@pytest.mark.parametrize("strategy", AllocationStrategy)
def test_layers_of_more_entropy_than_the_threshold_get_so_many_bits(strategy, threshold, least):
    """A Gaussian has about 7 bits, signs have 1; by ENTROPY_BASED alone."""
    model = nn.Sequential(nn.Linear(130, 130), nn.Linear(130, 64))
    nn.init.normal_(model[0].weight)
    model[1].weight.data = model[0].weight.data[:64].sign()
    chosen = config(allocation_strategy=strategy, entropy_threshold=threshold)
    table = tabulate(model, packable(model), chosen)
    by_entropy = strategy is AllocationStrategy.ENTROPY_BASED
    of_signs = 1 if threshold >= 1 or not by_entropy else math.ceil(threshold)
    bits = [min(choice.layout.format.bits for choice in choices) for choices in table.choices]
    assert bits == [least if by_entropy else 1] * 2 + [max(1, of_signs)]
    assert table.names == ["0.weight", "0.weight", "1.weight"] and table.rows == [65, 65, 64]
    for rows, choices in zip(table.rows, table.choices, strict=True):
        assert all(choice.nbytes == choice.layout.nbytes(rows, 130) for choice in choices)


ACCEPTED = [("entropy_threshold", 0, 8), ("gradient_weight", 0, 1), ("activation_weight", 0, 1)]


@pytest.mark.parametrize(("name", "least", "most"), ACCEPTED)
def test_numbers_of_a_config_up_to_their_limits(name: str, least: int, most: int):
    for value in (least, most, float(most)):
        assert getattr(PrecisionConfig(**{name: value}), name) == value
    for value in (math.nextafter(0, -1), math.nextafter(most, 9)):
        with pytest.raises(ValueError, match=f"^{name} must be from 0 to {most}, not {value}$"):
            PrecisionConfig(**{name: value})
    with pytest.raises(TypeError, match=f"^{name} must be a number, not True$"):
        PrecisionConfig(**{name: True})


def test_targets_from_0_to_below_1():
    assert PrecisionConfig(target_memory_reduction=0).target_memory_reduction == 0
    assert PrecisionConfig(target_memory_reduction=0.9999).target_memory_reduction == 0.9999
    with pytest.raises(ValueError, match="target_memory_reduction must be below 1: nothing"):
        PrecisionConfig(target_memory_reduction=1)
    model = perceptron(layers=1)
    small = create_ultra_precision_module(model, config(0.0))
    x = torch.randn(3, 192).half()
    assert torch.equal(small(x), model(x))  # there is room for all bits
