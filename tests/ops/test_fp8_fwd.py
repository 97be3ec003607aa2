"""The op fp8_fwd: values against fp64, within what the rounding of weights may change."""

from __future__ import annotations

import math

import pytest
import torch
from fp8_calls import KINDS, MASKS, check, descales_of, meant, on, options_of, values
from fp8_oracle import E4M3, error, exact, rounded

from flash_cute.ops.typed import OPS

DTYPES = [torch.bfloat16, torch.float16]


pytestmark = pytest.mark.usefixtures("served")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_out_and_lse(device, kind, mask):
    q, k, v = values(2, 70, 6, 64), values(2, 90, 2, 64), values(2, 90, 2, 48)
    descales = descales_of(kind, q, k, v, 2)
    stood_for = map(meant, (q, k, v), descales)
    expected = exact(*stood_for, **MASKS[mask])
    out, lse = OPS.fp8_fwd(*on(device, q, k, v, *descales), **options_of(MASKS[mask]))
    check(out, lse, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_keys_of_many_tiles(device, mask, dtype):
    """Scores rise, so that sums are rescaled at most tiles."""
    q, v = values(1, 130, 2, 32), values(1, 1700, 1, 32)
    k = torch.randn(1, 1700, 1, 32) + torch.linspace(-3, 3, 1700)[:, None, None]
    k, q = k.to(E4M3), q.float().abs().to(E4M3)
    expected = exact(q, k, v, **MASKS[mask])
    out, lse = OPS.fp8_fwd(*on(device, q, k, v), **options_of(MASKS[mask]), dtype=dtype)
    check(out, lse, expected, dtype)


@pytest.mark.parametrize("seqlen_k", [1, 60, 128])
@pytest.mark.parametrize("with_sink", [False, True])
def test_weights_are_rounded_to_e4m3(seqlen_k, with_sink):
    """On the CPU, where one tile holds all keys: but for numbers next to the middle of two of e4m3
    out is that of rounded weights, and not that of exact ones."""
    q, k = values(2, 50, 4, 64, size=2), values(2, seqlen_k, 2, 64, size=2)
    v = values(2, seqlen_k, 2, 64)
    sink = torch.randn(4) if with_sink else None
    expected = exact(q, k, v, sink=sink)
    out, _ = OPS.fp8_fwd(q, k, v, sink=sink, dtype=torch.float16)
    assert error(out, rounded(expected)) < 1e-3
    assert seqlen_k == 1 or error(out, expected.out) > 4e-3


@pytest.mark.parametrize("two_level", [False, True])
def test_means_of_long_rows(device, two_level):
    """Sums of many weights that are alike: 65536 keys with values around .5. In one level CUDA's
    accumulators drop what is below 2^-13 of the sum, of each product."""
    keys = 65536 if device == "cpu" or two_level else 1024
    q, k = values(1, 2, 1, 64, size=0.1), values(1, keys, 1, 64)
    v = (0.5 + 0.1 * torch.randn(1, keys, 1, 64)).to(E4M3)
    expected = exact(q, k, v)
    out, lse = OPS.fp8_fwd(*on(device, q, k, v), two_level=two_level)
    check(out, lse, expected, two_level=two_level)
    bias = (out.cpu().double() / expected.out - 1).mean().abs()
    assert bias < (2e-3 if two_level or device == "cpu" else 3e-2)


def test_scale_and_sinks(device):
    q, k, v = values(2, 40, 4, 32), values(2, 50, 2, 32), values(2, 50, 2, 32)
    sink = torch.tensor([-20.0, 0.0, 3.0, 60.0])
    expected = exact(q, k, v, scale=0.3, sink=sink)
    out, lse = OPS.fp8_fwd(
        *on(device, q, k, v), softmax_scale=0.3, sink=sink.to(device), dtype=torch.float16
    )
    check(out, lse, expected, torch.float16)


@pytest.mark.parametrize("with_sink", [False, True])
def test_rows_without_keys(device, with_sink):
    q, k, v = values(2, 30, 2, 16), values(2, 20, 2, 16), values(2, 20, 2, 16)
    sink = torch.tensor([0.5, -1.0]) if with_sink else None
    out, lse = OPS.fp8_fwd(*on(device, q, k, v), is_causal=True, sink=on(device, sink)[0])
    assert not out[:, :10].any()
    if sink is None:
        assert lse[:, :, :10].isneginf().all()
    else:
        assert torch.equal(lse[:, :, :10].cpu(), sink[None, :, None].expand(2, 2, 10))
    check(out, lse, exact(q, k, v, True, sink=sink))


@pytest.mark.parametrize("seqlen_q", [0, 1, 5])
@pytest.mark.parametrize("seqlen_k", [0, 1, 129])
def test_short_and_empty(device, seqlen_q, seqlen_k):
    q, k, v = values(2, seqlen_q, 4, 16), values(2, seqlen_k, 2, 16), values(2, seqlen_k, 2, 8)
    descales = descales_of("all", q, k, v, 2)
    out, lse = OPS.fp8_fwd(*on(device, q, k, v, *descales))
    assert out.shape == (2, seqlen_q, 4, 8) and lse.shape == (2, 4, seqlen_q)
    if seqlen_q and seqlen_k:
        check(out, lse, exact(*map(meant, (q, k, v), descales)))
    else:
        assert not out.any() and lse.isneginf().all()


def test_hidden_numbers_may_be_anything(device):
    """NaN in k and v behind a sequence's end."""
    q, k, v = values(1, 20, 2, 16), values(1, 30, 2, 16), values(1, 30, 2, 16)
    bad = [x.float().clone() for x in (k, v)]
    for x in bad:
        x[:, 25:] = torch.nan
    mask = {"window_size_right": 0, "window_size_left": -1}
    out, lse = OPS.fp8_fwd(*on(device, q[:, :15], k[:, :25], v[:, :25]), is_causal=True)
    args = on(device, q[:, :15], *(x.to(E4M3) for x in bad))
    offsets = torch.tensor([0, 15], dtype=torch.int32), torch.tensor([0, 25], dtype=torch.int32)
    got = OPS.fp8_varlen_fwd(*(x[0] for x in args), *on(device, *offsets), 15, 25, **mask)
    assert torch.equal(got[0], out[0]) and torch.equal(got[1], lse[0])


def test_visible_nan_spoils_its_rows_alone(device):
    """On CUDA those of its tile of queries, too, which meet it with a weight of 0."""
    rows, tile = 500, 1 if device == "cpu" else 192
    q, k, v = values(1, rows, 2, 16), values(1, rows, 2, 16), values(1, rows, 2, 16)
    x = v.float()
    x[0, 405, 1, 3] = torch.nan
    out, lse = OPS.fp8_fwd(*on(device, q, k, x.to(E4M3)), is_causal=True)
    assert out[0, 405:, 1, 3].isnan().all() and lse.isfinite().all()
    rest = out.clone()
    rest[0, 405 // tile * tile :, 1, 3] = 0
    assert rest.isfinite().all()


@pytest.mark.parametrize("name", ["q", "k"])
def test_products_beyond_fp16_are_right(device, name):
    """Scores are fp32: the largest numbers, and descales that undo one another."""
    q, k, v = (torch.full((1, 4, 1, 128), 448.0).to(E4M3) for _ in "qkv")
    size = torch.full((1, 1), 2.0**30)
    descales = (size, 1 / size, None) if name == "q" else (1 / size, size, None)
    out, lse = OPS.fp8_fwd(*on(device, q, k, v, *descales), softmax_scale=2.0**-22)
    assert torch.equal(out.cpu(), torch.full_like(out.cpu(), 448.0))
    expected = 448.0**2 * 128 * 2.0**-22 + math.log(4)
    torch.testing.assert_close(lse.cpu(), torch.full((1, 1, 4), expected))


def test_a_sink_that_is_far_above_all_scores():
    """exp(sink - max) is beyond fp32; what is left of the keys is not 0."""
    q, k = (torch.zeros(1, n, 1, 16).to(torch.float8_e4m3fn) for n in (1, 4))
    v = torch.ones(1, 4, 1, 16).to(torch.float8_e4m3fn)
    sink = torch.tensor([88.0])
    scale = torch.full((1, 1), 1e35)
    out, lse = torch.ops.flash_cute.fp8_fwd(q, k, v, v_descale=scale, sink=sink)
    expected = 1e35 * 4 / (4 + math.exp(88.0))
    torch.testing.assert_close(
        out.double(), torch.full((1, 1, 1, 16), expected).double(), rtol=2**-8, atol=0
    )
    torch.testing.assert_close(lse, torch.full((1, 1, 1), 88.0))
