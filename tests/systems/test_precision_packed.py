"""What a packed module is to code around it: tensors in its state, writes that are refused, layers
with their attributes, rows of any size, inputs with a fixed scale."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from precision_models import error
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.hardware import memory
from flash_cute.precision import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
    analyze_precision_opportunities,
    create_ultra_precision_module,
)
from flash_cute.precision.inputs import InputRounding
from flash_cute.precision.packed import PackedEmbedding, as_bytes
from flash_cute.precision.quantize import Layout, restore, round_rows


class Words(nn.Module):
    def __init__(self, count: int = 100) -> None:
        super().__init__()
        self.embed = nn.Embedding(count, 64, padding_idx=3)
        self.head = nn.Linear(64, 96)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def packed(model: nn.Module, target: float = 0.6, **fields):
    return create_ultra_precision_module(
        model, PrecisionConfig(target_memory_reduction=target, **fields)
    )


# --- state ---------------------------------------------------------------------------------------


def test_state_dicts_hold_tensors_alone():
    torch.manual_seed(0)
    small, ids = packed(Words()), torch.randint(100, (3, 5))
    state = small.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    other = packed(Words(), 0.3)
    assert not torch.equal(other(ids), small(ids))
    other.load_state_dict({name: value.clone() for name, value in state.items()})
    assert torch.equal(other(ids), small(ids))
    assert other.get_precision_stats() == small.get_precision_stats()


def test_an_invalid_state_is_refused():
    small = packed(Words())
    for wrong in ({"shape": [1]}, torch.ones(3), torch.tensor([255, 1], dtype=torch.uint8)):
        state = small.state_dict()
        name = next(n for n in state if n.endswith("packed._extra_state"))
        state[name] = wrong
        with pytest.raises(ValueError, match="is not the state of a packed weight"):
            small.load_state_dict(state)


@pytest.mark.parametrize("wrong", [[], {}, {"base_bytes": 7}, {"shape": [100, 64]}, 3, None])
@pytest.mark.parametrize("name", ["_extra_state", "packed._extra_state"])
def test_values_that_lack_a_part_are_refused_and_change_nothing(name: str, wrong: object):
    small, ids = packed(Words()), torch.arange(5)
    before, stats = small(ids), small.get_precision_stats()
    state = small.state_dict()
    key = next(n for n in state if n.endswith(name))
    state[key] = as_bytes(wrong)
    with pytest.raises(ValueError, match="is not the state of a packed weight: it has"):
        small.load_state_dict(state)
    assert torch.equal(small(ids), before) and small.get_precision_stats() == stats


@pytest.mark.parametrize("name", ["codes", "steps"])
def test_missing_codes_are_refused(name: str):
    small, ids = packed(Words()), torch.arange(5)
    before, state = small(ids), small.state_dict()
    del state[next(n for n in state if n.endswith(f"packed.blocks.0.{name}"))]
    with pytest.raises(ValueError, match=rf"blocks\.0\.{name} is not in the state"):
        small.load_state_dict(state)
    assert torch.equal(small(ids), before)


@pytest.mark.parametrize("name", ["codes", "steps"])
def test_codes_that_do_not_make_the_weight_are_refused(name: str):
    small, ids = packed(Words()), torch.arange(5)
    before = small(ids)
    for cut in (lambda x: x[:-1], lambda x: x[:, :0], lambda x: torch.cat([x, x])):
        state = small.state_dict()
        key = next(n for n in state if n.endswith(f"packed.blocks.0.{name}"))
        state[key] = cut(state[key])
        if name == "codes" and len(state[key]) != 100:  # both, so that each row is whole
            steps = key.replace("codes", "steps")
            state[steps] = cut(state[steps])
        with pytest.raises(ValueError, match=r"is not Layout|rows of a weight of \[100, 64\]"):
            small.load_state_dict(state)
        assert torch.equal(small(ids), before)


# --- writes --------------------------------------------------------------------------------------

WRITES = {
    "data +=": lambda layer: exec("layer.weight.data += 1", {"layer": layer}),
    "data =": lambda layer: exec("layer.weight.data = 1", {"layer": layer}),
    "data.copy_": lambda layer: layer.weight.data.copy_(torch.ones(())),
    "add_": lambda layer: layer.weight.add_(1),
    "mul_": lambda layer: layer.weight.mul_(2),
    "setitem": lambda layer: layer.weight.__setitem__(0, 1.0),
    "item of data": lambda layer: layer.weight.data.__setitem__(0, 1.0),
    "init": lambda layer: nn.init.normal_(layer.weight),
    "detached": lambda layer: layer.weight.data.zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["head", "embed"])
def test_writes_that_would_be_lost_are_refused(write, name: str):
    small, ids = packed(Words()), torch.arange(9)
    before = small(ids)
    layer = small.model.get_submodule(name)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="is lost; change the model and pack it"),
    ):
        write(layer)
    assert torch.equal(small(ids), before)


def test_restored_weights_are_tensors_otherwise():
    layer = packed(Words()).model.head
    weight = layer.weight
    assert isinstance(weight, Tensor) and weight.shape == (96, 64)
    assert type(weight + 1) is Tensor and type(weight @ weight.t()) is Tensor
    assert weight.data.norm() == weight.norm() and weight.data.dtype is torch.float32
    changed = weight.clone()
    changed += 1
    assert torch.equal(changed - 1 < weight + 1e-3, torch.ones(96, 64, dtype=torch.bool))


# --- embeddings ----------------------------------------------------------------------------------


def test_embeddings_keep_their_attributes_and_refuse_ids():
    small = packed(Words())
    embed = small.model.embed
    assert isinstance(embed, PackedEmbedding)
    assert (embed.num_embeddings, embed.embedding_dim, embed.padding_idx) == (100, 64, 3)
    assert (embed.max_norm, embed.norm_type, embed.sparse) == (None, 2.0, False)
    assert repr(embed).startswith("PackedEmbedding(\n  100, 64, padding_idx=3")
    assert embed(torch.tensor([[1, 2]])).shape == (1, 2, 64)
    assert embed(torch.tensor(5, dtype=torch.int32)).shape == (64,)
    for ids in (torch.tensor([-1]), torch.tensor([100]), torch.tensor([[0, -100]])):
        with pytest.raises(IndexError):
            embed(ids)
        with pytest.raises(IndexError):
            nn.Embedding(100, 64)(ids)
    for ids in (torch.tensor([True] * 100), torch.tensor([0.0])):
        with pytest.raises(RuntimeError, match=r"int|Long|long"):
            embed(ids)


def test_embeddings_with_hooks_or_forwards_of_their_own_stay():
    for change in ("hook", "pre-hook", "forward", "buffer"):
        torch.manual_seed(0)
        model, ids = Words(), torch.arange(7)
        if change == "hook":
            model.embed.register_forward_hook(lambda m, x, out: out * 3)
        elif change == "pre-hook":
            model.embed.register_forward_pre_hook(lambda m, x: (x[0] + 1,))
        elif change == "forward":
            model.embed.forward = lambda ids: torch.ones(*ids.shape, 64)
        else:
            model.embed.register_buffer("more", torch.ones(3))
        small = packed(model, 0.5)
        assert not isinstance(small.model.embed, PackedEmbedding)
        assert error(small(ids), model(ids)) < 0.05
        assert "embed.weight" in small.get_precision_stats().layers


def test_an_embedding_of_two_names_is_replaced_under_both():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = nn.Embedding(100, 64)
            self.target = self.source

        def forward(self, ids: Tensor) -> Tensor:
            return self.source(ids) - 2 * self.target(ids.flip(0))

    model, ids = Two(), torch.arange(9)
    small = packed(model)
    assert small.model.source is small.model.target
    assert error(small(ids), model(ids)) < 0.05
    assert error(packed(nn.Embedding(100, 64))(ids), torch.zeros(1)) > 1


# --- rows of any size ----------------------------------------------------------------------------


@pytest.mark.parametrize("power", [12, 20, 24, 40, 100])
@pytest.mark.parametrize(
    "form", [f for f in PrecisionFormat if f.is_integer or f is PrecisionFormat.FP8_E4M3]
)
def test_small_rows_are_rounded_as_well_as_large_ones(form: PrecisionFormat, power: int):
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(power))
    small = weight.clone()
    small[::2] *= 2.0**-power
    both = [restore(round_rows(x, Layout(form)), 128, torch.float32) for x in (weight, small)]
    for row in range(16):
        expected = error(both[0][row], weight[row])
        assert error(both[1][row], small[row]) < 1.3 * expected + 2**-8


def test_no_row_of_a_module_is_lost():
    torch.manual_seed(0)
    for exponent in (-24, -60, 17):
        for strategy in (AllocationStrategy.UNIFORM, AllocationStrategy.ENTROPY_BASED):
            model = nn.Sequential(nn.Linear(128, 128, bias=False))
            model[0].weight.data[5] *= 2.0**exponent
            model[0].weight.data[77] *= 2.0**exponent
            for target in (0.0, 0.4, 0.6):
                small = packed(model, target, allocation_strategy=strategy)
                got, right = small.model[0].weight, model[0].weight
                assert max(error(a, b) for a, b in zip(got, right, strict=True)) < 0.1
                assert got.isfinite().all()


# --- inputs --------------------------------------------------------------------------------------


def static(base: PrecisionFormat = PrecisionFormat.INT8) -> PrecisionConfig:
    return PrecisionConfig(
        base, target_memory_reduction=0.05, quantization_mode=QuantizationMode.STATIC
    )


@pytest.mark.parametrize("base", [PrecisionFormat.INT8, PrecisionFormat.FP8_E4M3])
@pytest.mark.parametrize("mode", [QuantizationMode.STATIC, QuantizationMode.DYNAMIC])
def test_rounded_inputs_compile_as_one_graph(base: PrecisionFormat, mode: QuantizationMode):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(5, 64)
    config = PrecisionConfig(base, target_memory_reduction=0.05, quantization_mode=mode)
    eager = create_ultra_precision_module(model, config)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    for scale in (1.0, 3.0):
        torch.testing.assert_close(compiled(scale * x), eager(scale * x))


def test_no_call_waits_for_values():
    """A trace without values would stop if a branch or a number needed one."""
    small = create_ultra_precision_module(nn.Sequential(nn.Linear(64, 64)), static())
    with torch.no_grad(), internals.fake_tensors() as fakes:
        fake = memory.copy_with(small, fakes.from_tensor, fakes.from_tensor)
        assert fake(torch.ones(3, 64)).shape == (3, 64)


def test_a_fixed_scale_is_that_of_all_finite_calibration():
    model = nn.Sequential(nn.Linear(64, 64))
    calls = [torch.full((2, 64), value) for value in (1.0, 5.0, 2.0)]
    calls[2][0, 0] = math.inf
    small = create_ultra_precision_module(model, static(), calibration=calls[:2])
    (rounding,) = (m for m in small.modules() if isinstance(m, InputRounding))
    assert rounding.scale == 5 and not rounding.grows
    fresh = create_ultra_precision_module(model, static())
    (rounding,) = (m for m in fresh.modules() if isinstance(m, InputRounding))
    for x, scale in ((torch.zeros(2, 64), 0), (calls[2], 2), (calls[1], 2)):
        fresh(x)
        assert rounding.scale == scale
    assert fresh(torch.empty(0, 64)).shape == (0, 64)


def test_dynamic_scales_leave_out_what_is_not_finite():
    config = PrecisionConfig(PrecisionFormat.INT8, target_memory_reduction=0.05)
    small = create_ultra_precision_module(nn.Sequential(nn.Linear(64, 64)), config)
    x = torch.randn(3, 64)
    right = small(x)
    x[1, 7] = math.inf
    assert torch.equal(small(x)[::2], right[::2])


def test_layers_that_are_never_called_round_nothing():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    small = create_ultra_precision_module(layer.eval(), static())
    small(torch.randn(2, 5, 64))
    roundings = {n: m for n, m in small.named_modules() if isinstance(m, InputRounding)}
    assert len(roundings) == 3 and all(m.scale > 0 for m in roundings.values())


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", list(AllocationStrategy)[2:])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_samples_that_are_not_finite_are_refused(strategy: AllocationStrategy, bad: float):
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(4, 64)
    x[2, 3] = bad
    config = PrecisionConfig(allocation_strategy=strategy, target_memory_reduction=0.6)
    with pytest.raises(ValueError, match=r"calibration: squares of .* are not finite"):
        create_ultra_precision_module(model, config, calibration=x)
    with pytest.raises(ValueError, match=r"calibration: squares of .* are not finite"):
        analyze_precision_opportunities(model, x)


def test_weights_without_values_are_refused():
    for model in (nn.Linear(64, 64, device="meta"), nn.LazyLinear(64)):
        with pytest.raises(ValueError, match="weights must have values, and weight has none"):
            create_ultra_precision_module(model)


def test_transforms_of_packed_modules():
    small, x = packed(nn.Sequential(nn.Linear(64, 64), nn.Tanh())), torch.randn(64)
    rows = torch.autograd.functional.jacobian(small, x)
    torch.testing.assert_close(torch.func.jacrev(small)(x), rows)
    torch.testing.assert_close(torch.func.jacfwd(small)(x), rows)
    torch.testing.assert_close(torch.func.vmap(small)(x.expand(3, 64)), small(x.expand(3, 64)))
