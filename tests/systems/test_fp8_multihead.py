"""FP8MultiheadAttention is torch's attention in all but its products, which are exact here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flash_cute.precision import fp8_attention, fp8_linear
from flash_cute.precision.fp8_attention import FP8MultiheadAttention

BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 5, 7, 32, 4


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    for module in (fp8_attention, fp8_linear):
        monkeypatch.setattr(module, "fp8_linear", lambda x, w, b, scales: F.linear(x, w, b))


def masks(kind):
    lengths = torch.tensor([7, 3, 5])
    return {
        "none": {},
        "added": {"attn_mask": torch.randn(QUERIES, KEYS)},
        "hidden": {"attn_mask": torch.ones(QUERIES, KEYS).triu(1).bool(), "is_causal": True},
        "per head": {"attn_mask": torch.rand(BATCH * HEADS, QUERIES, KEYS) > 0.8},
        "padding": {"key_padding_mask": torch.arange(KEYS) >= lengths[:, None]},
        "padding added": {"key_padding_mask": torch.randn(BATCH, KEYS)},
        "both": {
            "attn_mask": torch.randn(QUERIES, KEYS),
            "key_padding_mask": torch.randn(BATCH, KEYS),
        },
    }[kind]


def both(calls, batch_first=False, key_width=None, bias=True):
    """Results of torch's module and of ours for the same arguments."""
    plain = nn.MultiheadAttention(
        WIDTH, HEADS, bias=bias, kdim=key_width, vdim=key_width, batch_first=batch_first
    ).eval()
    if bias:
        nn.init.normal_(plain.in_proj_bias)
        nn.init.normal_(plain.out_proj.bias)
    ours = FP8MultiheadAttention.from_attention(plain)
    assert list(ours.state_dict()) == list(plain.state_dict())
    return [calls(module) for module in (ours, plain)]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "kind", ["none", "added", "hidden", "per head", "padding", "padding added", "both"]
)
@pytest.mark.parametrize("weights", [{}, {"average_attn_weights": False}, {"need_weights": False}])
def test_masks_and_weights(kind, batch_first, weights):
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, n, WIDTH) for n in (QUERIES, KEYS, KEYS))
    if not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    options = masks(kind) | weights
    ours, theirs = both(lambda module: module(q, k, v, **options), batch_first)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("key_width", [None, 24])
def test_widths_and_one_sequence(key_width, bias):
    q, k = torch.randn(QUERIES, WIDTH), torch.randn(KEYS, key_width or WIDTH)
    ours, theirs = both(lambda module: module(q, k, k), key_width=key_width, bias=bias)
    torch.testing.assert_close(ours, theirs)
    if key_width is None:
        ours, theirs = both(lambda module: module(q, q, q), bias=bias)
        torch.testing.assert_close(ours, theirs)


def test_dropout_in_training_alone():
    plain = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5)
    ours = FP8MultiheadAttention.from_attention(plain)
    x = torch.randn(QUERIES, 2, WIDTH)
    for options in ({}, {"need_weights": False}):
        assert not torch.equal(ours(x, x, x, **options)[0], ours(x, x, x, **options)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_refusals():
    ours = FP8MultiheadAttention.from_attention(nn.MultiheadAttention(WIDTH, HEADS))
    x = torch.randn(QUERIES, 2, WIDTH)
    with pytest.raises(ValueError, match="give the attn_mask"):
        ours(x, x, x, is_causal=True)
    with pytest.raises(NotImplementedError, match="add_bias_kv"):
        FP8MultiheadAttention.from_attention(nn.MultiheadAttention(8, 2, add_bias_kv=True))


@pytest.mark.parametrize("options", [{}, {"need_weights": False}], ids=["weights", "no weights"])
def test_scores_that_fp16_has_only_when_they_are_scaled(options):
    """q k^T of 1e5 times 1/8 is in fp16's range."""
    plain = nn.MultiheadAttention(64, 1, bias=False, dtype=torch.float16)
    with torch.no_grad():
        plain.in_proj_weight.copy_(torch.eye(64).repeat(3, 1))
        plain.out_proj.weight.copy_(torch.eye(64))
    ours = FP8MultiheadAttention.from_attention(plain)
    x = (torch.randint(0, 2, (9, 2, 64)) * 2 - 1).half() * 40
    out, weights = ours(x, x, x, **options)
    y = x.double().transpose(0, 1)
    exact = (y @ y.mT / 8).softmax(-1)
    torch.testing.assert_close(out.double(), (exact @ y).transpose(0, 1), rtol=0, atol=0.1)
    if weights is not None:
        torch.testing.assert_close(weights.double(), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "options,error,message",
    [
        (
            {"key_padding_mask": torch.zeros(KEYS, BATCH).bool()},
            ValueError,
            r"\(7, 3\); expected \(3",
        ),
        ({"attn_mask": torch.zeros(BATCH, QUERIES, KEYS)}, ValueError, "attn_mask has shape"),
        ({"attn_mask": torch.zeros(1, KEYS)}, ValueError, r"expected \(5, 7\) or \(12, 5, 7\)"),
        ({"attn_mask": torch.zeros(QUERIES, KEYS).int()}, TypeError, "attn_mask has dtype"),
        ({"key_padding_mask": torch.zeros(BATCH, KEYS).byte()}, TypeError, "has dtype torch.uint8"),
    ],
)
def test_masks_that_torch_refuses(options, error, message):
    ours = FP8MultiheadAttention.from_attention(nn.MultiheadAttention(WIDTH, HEADS))
    q, k = torch.randn(QUERIES, BATCH, WIDTH), torch.randn(KEYS, BATCH, WIDTH)
    with pytest.raises(error, match=message):
        ours(q, k, k, **options)


@pytest.mark.parametrize("shapes", [(2, 3, 3), (3, 2, 2), (3, 3, 2), (1, 1, 1), (4, 4, 4)])
def test_inputs_that_do_not_go_together(shapes):
    ours = FP8MultiheadAttention.from_attention(nn.MultiheadAttention(WIDTH, HEADS))
    q, k, v = (torch.randn((BATCH,) * (dim - 1) + (WIDTH,)) for dim in shapes)
    with pytest.raises(ValueError, match="query, key and value have shapes"):
        ours(q, k, v)
    q, k = torch.randn(QUERIES, BATCH, WIDTH), torch.randn(KEYS, BATCH, WIDTH)
    for bad in ((q, k, k[1:]), (q[:, :2], k, k)):
        with pytest.raises(ValueError, match="one batch, and as many keys as values"):
            ours(*bad)
