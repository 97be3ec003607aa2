"""Layers over several devices of one process: parts of a sequence, options, limits, reprs."""

from __future__ import annotations

import itertools
from typing import Any

import layer_oracle as oracle
import pytest
import torch

import flash_cute
from flash_cute.attention import (
    AttentionConfig,
    ContextParallelAttention,
    FP8AttentionConfig,
    create_attention,
    create_context_parallel_attention,
    create_ring_attention,
)
from flash_cute.attention.fp8 import RoundToFP8, power_of_two_scale
from flash_cute.attention.query_slice import attend_masked_slice, attend_slice

D, HEADS, SEQLEN = 32, 4, 12
SIDES = (-1, 0, 1, 5, SEQLEN, 100)


def heads(seqlen: int = SEQLEN, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    shapes = ((2, seqlen, n, 8) for n in (HEADS, kv_heads, kv_heads))
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", itertools.product(SIDES, SIDES), ids=str)
def test_parts_of_a_sequence_are_the_whole(window: tuple[int, int], causal: bool):
    """Wherever they begin and end, whatever their queries see."""
    q, k, v = heads()
    options = {"window_size": window, "causal": causal, "softcap": 2.0, "softmax_scale": 0.4}
    whole = flash_cute.flash_attn_func(q, k, v, **options)
    for start, stop in ((0, 1), (0, SEQLEN), (3, 7), (7, 12), (11, 12), (5, 5)):
        part = attend_slice(q[:, start:stop], k, v, start, options)
        torch.testing.assert_close(part, whole[:, start:stop], rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (0, 0), (100, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_tokens_that_take_part(window: tuple[int, int], causal: bool):
    """Gaps close; rows of no token are 0, and theirs hold NaN."""
    if not causal and window[0] >= 0 and window[1] < 0:
        pytest.skip("refused: test_windows_that_masks_refuse")
    q, k, v = heads()
    mask = torch.rand(2, SEQLEN, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[1, :5] = False
    for x in (q, k, v):
        x[~mask] = torch.nan
    options = {"window_size": window, "causal": causal, "softmax_scale": 0.4}
    for start, stop in ((0, SEQLEN), (0, 4), (4, 9), (9, 12)):
        out = attend_masked_slice(q[:, start:stop], k, v, start, mask, options)
        for i in range(2):
            seen = mask[i]
            alone = flash_cute.flash_attn_func(
                q[i, seen][None], k[i, seen][None], v[i, seen][None], **options
            )[0]
            first, last = int(seen[:start].sum()), int(seen[:stop].sum())
            got = out[i][seen[start:stop]]
            torch.testing.assert_close(got, alone[first:last], rtol=0, atol=1e-12)
            assert not out[i][~seen[start:stop]].any()


@pytest.mark.parametrize("window", [(-1, 1), (2, 3), (3, -1)], ids=str)
def test_windows_that_masks_refuse(window: tuple[int, int]):
    q, k, v = heads()
    mask = torch.ones(2, SEQLEN)
    options: dict[str, Any] = {"window_size": window, "causal": False}
    with pytest.raises(NotImplementedError, match=rf"window_size \({window[0]}, {window[1]}\)"):
        attend_masked_slice(q, k, v, 0, mask, options)
    attend_masked_slice(q, k, v, 0, mask, options | {"causal": True})  # right is 0 then


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "grouped": ({"num_kv_heads": 2, "bias": False}, {"kv_heads": 2}),
    "window": ({"window_size": (4, 2)}, {"window": (4, 2)}),
    "left": ({"window_size": (3, -1)}, {"window": (3, -1)}),
    "scores": ({"softmax_scale": 0.3, "softcap": 1.5}, {"scale": 0.3, "softcap": 1.5}),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", OPTIONS)
def test_any_number_of_devices_is_one(name: str, size: int, is_causal: bool):
    """Outputs and all gradients, in fp64; also if there are fewer tokens than devices."""
    fields, options = OPTIONS[name]
    layer = create_context_parallel_attention(D, HEADS, size, dtype=torch.float64, **fields)
    assert layer.device_mesh == [torch.device("cpu")] * size
    for seqlen in (1, 4, 19):
        x = torch.randn(2, seqlen, D, dtype=torch.float64).requires_grad_()
        x64, parameters = x.detach().clone().requires_grad_(), oracle.parameters_of(layer)
        expected = oracle.attend(parameters, HEADS, x64, causal=is_causal, **options)
        out = layer(x, is_causal=is_causal)
        assert oracle.difference(out, expected) < 1e-12
        layer.zero_grad()
        dout = torch.randn_like(expected)
        expected.backward(dout)
        out.backward(dout)
        assert oracle.difference(x.grad, x64.grad) < 1e-12
        oracle.compare_gradients(layer, parameters, 1e-12)


def test_dropout_over_devices_is_refused_in_training_alone():
    layer = create_context_parallel_attention(D, HEADS, 2, dropout=0.25)
    x = torch.randn(1, 8, D)
    with pytest.raises(NotImplementedError, match=r"^dropout is 0\.25: what is dropped"):
        layer(x)
    plain = create_context_parallel_attention(D, HEADS, 2)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain(x))


def test_fewer_devices_are_used_in_turn():
    config = AttentionConfig(D, HEADS, "context_parallel", context_parallel_size=5)
    mesh = ContextParallelAttention(config, ["meta", "cpu"]).device_mesh
    assert [device.type for device in mesh] == ["meta", "cpu", "meta", "cpu", "meta"]
    for given in ([], ["cpu"] * 6):
        message = f"device_mesh has {len(given)} devices; expected 1 to context_parallel_size, 5"
        with pytest.raises(ValueError, match=message):
            ContextParallelAttention(config, given)
    with pytest.raises(TypeError, match="device_mesh is 'cpu'; expected a list of devices"):
        ContextParallelAttention(config, "cpu")


def test_the_longest_sequence_of_a_ring():
    ring = create_ring_attention(D, HEADS, max_sequence_length=10)
    assert ring(torch.randn(2, 10, D)).shape == (2, 10, D)
    message = "^hidden_states have 11 tokens; the layer's max_sequence_length is 10$"
    with pytest.raises(ValueError, match=message):
        ring(torch.randn(2, 11, D))
    assert create_ring_attention(D, HEADS, 1)(torch.randn(1, 1, D)).shape == (1, 1, D)


@pytest.mark.parametrize("name", ["context_parallel_size", "max_sequence_length"])
def test_sizes_of_at_least_1(name: str):
    assert getattr(AttentionConfig(D, HEADS, **{name: 1}), name) == 1
    for bad in (0, -3):
        with pytest.raises(ValueError, match=f"^{name} is {bad}; expected at least 1$"):
            AttentionConfig(D, HEADS, **{name: bad})
    with pytest.raises(TypeError, match=f"^{name} is bool; expected an int$"):
        AttentionConfig(D, HEADS, **{name: True})


@pytest.mark.parametrize("pattern", ["full", "ring", "context_parallel"])
def test_a_layer_prints_all_of_its_options(pattern: str):
    fields = {"num_kv_heads": 2, "window_size": (5, 3), "softmax_scale": 0.25, "softcap": 7.0}
    config = AttentionConfig(
        D, HEADS, pattern, deterministic=True, context_parallel_size=2, max_sequence_length=77,
        **fields,
    )  # fmt: skip
    text = repr(create_attention(config))
    for said in (
        "num_kv_heads=2", "window_size=(5, 3)", "softmax_scale=0.25", "softcap=7.0",
        "deterministic=True",
    ):  # fmt: skip
        assert said in text
    more = {"full": "pattern=full", "ring": "max_sequence_length=77",
            "context_parallel": "context_parallel_size=2, device_mesh=[cpu, cpu]"}  # fmt: skip
    assert more[pattern] in text


@pytest.mark.parametrize("layer", [create_ring_attention, create_context_parallel_attention])
def test_tokens_that_devices_share_attend_to_themselves(layer: Any):
    made = layer(D, HEADS, 4)
    x = torch.randn(1, 4, D)
    if layer is create_ring_attention:  # of one device
        torch.testing.assert_close(made(x, key=x), made(x))
        return
    for given in ({"key": x}, {"value": x}):
        with pytest.raises(NotImplementedError, match="key or value is given: cross attention"):
            made(x, **given)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", ["tensor", "head"])
def test_fp8_rounds_to_the_nearest_value_of_its_scale(name: str, scaling: str):
    """Half a unit of 3 or 2 bits of mantissa, or half of the least subnormal; a scale is the least
    power of two by which the largest value fits, so that one more would halve it."""
    layer = create_attention(FP8AttentionConfig(D, HEADS, format=name, scaling=scaling))
    x = torch.randn(2, 50, HEADS, 8, dtype=torch.float64) * torch.logspace(-3, 2, HEADS)[:, None]
    x[0, 0, 0, 0] = torch.nan
    finite = x.nan_to_num(0.0)
    got, largest = layer._rounded(x), torch.finfo(layer.format).max
    dims = (0, 1, 2, 3) if scaling == "tensor" else (0, 1, 3)
    scale = power_of_two_scale(x, dims, largest).double()
    peak = finite.abs().amax(dims, keepdim=True)
    assert (scale.log2() % 1 == 0).all()
    assert (peak <= scale * largest).all() and (peak > scale / 2 * largest).all()
    mantissa, smallest = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}[name]
    bound = torch.maximum(mantissa * finite.abs(), smallest * scale)
    error = (got - finite).abs().nan_to_num(0.0)
    assert (error <= bound).all() and error.max() > 0.3 * bound.max()
    assert got.isnan().sum() == 1
    values = (got / scale).nan_to_num(0.0).float()
    assert torch.equal(values.to(layer.format).float(), values)


def test_powers_of_two_fit_exactly():
    for largest in (448.0, 57344.0):
        for power in (-30, 0, 5):
            x = torch.tensor([2.0**power * largest, 0.0])
            assert power_of_two_scale(x, (0,), largest).item() == 2.0**power
            above = x * (1 + 2.0**-20)
            assert power_of_two_scale(above, (0,), largest).item() == 2.0 ** (power + 1)
    assert power_of_two_scale(torch.zeros(3), (0,), 448.0).item() == 2.0**-126


def test_the_gradient_passes_through_the_rounding():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(3, 4, dtype=torch.float64)
    RoundToFP8.apply(x, torch.float8_e4m3fn, (0, 1)).backward(dout)
    assert torch.equal(x.grad, dout)
