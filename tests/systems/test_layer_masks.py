"""Masks of tokens and cross attention in the layers."""

from __future__ import annotations

from typing import Any

import layer_oracle as oracle
import pytest
import torch
from torch import Tensor

from flash_cute.attention import FlashAttention3
from flash_cute.core import AttentionLayer

D, HEADS = 64, 4
BOUND = 2e-5


def right_padded(seqlen: int = 40) -> Tensor:
    return torch.arange(seqlen) < torch.tensor([[seqlen], [13], [1], [0]])


MASKS = {
    "right": right_padded(),
    "left": right_padded().flip(1),
    "gaps": torch.rand(4, 40, generator=torch.Generator().manual_seed(1)) < 0.5,
    "all": torch.ones(4, 40, dtype=torch.bool),
}
LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": (lambda **kind: AttentionLayer(D, HEADS, 0.0, **kind), {}),
    "causal": (
        lambda **kind: FlashAttention3(D, HEADS, pattern="causal", num_kv_heads=2, **kind),
        {"causal": True, "kv_heads": 2},
    ),
}


def tokens(device: str, seqlen: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, seqlen, D, generator=generator).to(device).requires_grad_()


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30, 5.0], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LAYERS)
def test_only_tokens_that_take_part_matter(device, name, mask, garbage):
    torch.manual_seed(0)
    make, options = LAYERS[name]
    layer, keep = make(device=device), MASKS[mask]
    x64 = tokens("cpu").detach().double().requires_grad_()
    x = tokens(device).detach().masked_fill(~keep.to(device)[..., None], garbage).requires_grad_()
    parameters = oracle.parameters_of(layer)
    expected = oracle.attend(parameters, HEADS, x64, mask=keep, **options)
    out = layer(x, keep.to(device))
    assert oracle.difference(out, expected) < BOUND
    dout = torch.randn_like(expected)
    expected.backward(dout)
    out.backward(dout.to(out))
    assert oracle.difference(x.grad, x64.grad) < BOUND
    assert not x.grad[~keep.to(device)].any()
    oracle.compare_gradients(layer, parameters, BOUND)


def test_rows_that_take_no_part_are_the_output_bias(device):
    layer = AttentionLayer(D, HEADS, 0.0, device=device)
    torch.nn.init.normal_(layer.out_proj.bias)
    keep = right_padded().to(device)
    out = layer(tokens(device), keep)
    torch.testing.assert_close(out[~keep], layer.out_proj.bias.expand(int((~keep).sum()), D))


@pytest.mark.parametrize("name", LAYERS)
def test_a_sequence_is_as_if_it_was_cut_out(device, name):
    """Gaps close: causal masks and windows count tokens that take part."""
    layer, keep = LAYERS[name][0](device=device), MASKS["gaps"].to(device)
    x = tokens(device)
    out = layer(x, keep)
    for i in range(4):
        torch.testing.assert_close(out[i, keep[i]], layer(x[i : i + 1, keep[i]])[0])
    windowed = FlashAttention3(D, HEADS, window_size=(3, 2), device=device)
    out = windowed(x, keep)
    for i in range(4):
        torch.testing.assert_close(out[i, keep[i]], windowed(x[i : i + 1, keep[i]])[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.half], ids=str)
def test_numbers_say_the_same(device, dtype):
    layer, keep = AttentionLayer(D, HEADS, 0.0, device=device), right_padded().to(device)
    keep[:, 0] = True  # floats without a 1 are refused
    x = tokens(device)
    assert torch.equal(layer(x, keep.to(dtype)), layer(x, keep))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_cross_attention(device, name, masked):
    make, options = LAYERS[name]
    layer = make(device=device)
    x, key, value = tokens(device, 10), tokens(device), tokens(device).detach().cos()
    keep = MASKS["right"] if masked else None
    inputs64 = [y.detach().cpu().double().requires_grad_() for y in (x, key, value)]
    x64, key64, value64 = inputs64
    parameters = oracle.parameters_of(layer)
    if name == "causal" and masked:  # aligned to the last key that takes part
        options = {**options, "causal": False}
        keep = torch.arange(40) < torch.tensor([[40], [13], [10], [40]])
        expected = torch.cat([
            oracle.attend(
                parameters, HEADS, x64[i : i + 1], key=key64[i : i + 1, : keep[i].sum()],
                value=value64[i : i + 1, : keep[i].sum()], kv_heads=2, causal=True,
            )
            for i in range(4)
        ])  # fmt: skip
    else:
        expected = oracle.attend(
            parameters, HEADS, x64, key=key64, value=value64, mask=keep, **options
        )
    inputs = [y.detach().clone() for y in (x, key, value)]
    if keep is not None:
        for y in inputs[1:]:
            y[~keep.to(device)] = torch.nan
    x, key, value = (y.requires_grad_() for y in inputs)
    out = layer(x, None if keep is None else keep.to(device), key=key, value=value)
    assert oracle.difference(out, expected) < BOUND
    dout = torch.randn_like(expected)
    expected.backward(dout)
    out.backward(dout.to(out))
    for y, y64 in zip((x, key, value), inputs64, strict=True):
        assert oracle.difference(y.grad, y64.grad) < BOUND
    oracle.compare_gradients(layer, parameters, BOUND)


def test_a_value_of_its_own_is_the_key_by_default(device):
    layer = AttentionLayer(D, HEADS, 0.0, device=device)
    x, key = tokens(device, 7), tokens(device)
    assert torch.equal(layer(x, key=key), layer(x, key=key, value=key))
    torch.testing.assert_close(layer(x, key=x), layer(x))
    torch.testing.assert_close(layer(x, is_causal=True), layer(x, key=x, is_causal=True))
    assert not torch.allclose(layer(x, is_causal=True), layer(x))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "tokens": ({"hidden_states": [1]}, TypeError, "hidden_states is list"),
    "rank": ({"hidden_states": torch.ones(4, D)}, ValueError, r"hidden_states has shape \(4, 64\)"),
    "width": ({"hidden_states": torch.ones(4, 40, 63)}, ValueError, "d_model = 64"),
    "list": ({"attention_mask": [1]}, TypeError, "attention_mask is list"),
    "added": ({"attention_mask": torch.zeros(4, 40)}, ValueError, "dtype torch.float32"),
    "floats": ({"attention_mask": torch.rand(4, 40)}, ValueError, "not made of 0 and 1"),
    "complex": ({"attention_mask": torch.ones(4, 40, dtype=torch.cfloat)}, TypeError, "complex64"),
    "scores": (
        {"attention_mask": torch.ones(4, 4, 40, 40).bool()}, ValueError,
        r"attention_mask has shape \(4, 4, 40, 40\); expected \(batch, seqlen\) = \(4, 40\)",
    ),
    "length": ({"attention_mask": torch.ones(4, 39).bool()}, ValueError, "mask has shape"),
    "place": (
        {"attention_mask": torch.ones(4, 40, device="meta").bool()}, ValueError,
        "attention_mask is on meta",
    ),
    "value": ({"value": torch.ones(4, 40, D)}, ValueError, "value is given without key"),
    "key": ({"key": torch.ones(3, 40, D)}, ValueError, r"key has shape \(3, 40, 64\)"),
    "values": (
        {"key": torch.ones(4, 40, D), "value": torch.ones(4, 41, D)}, ValueError,
        r"value has shape \(4, 41, 64\); expected \(4, 40, 64\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    arguments, error, said = BAD[name]
    layer = AttentionLayer(D, HEADS)
    with pytest.raises(error, match=said):
        layer(**({"hidden_states": torch.ones(4, 40, D)} | arguments))
