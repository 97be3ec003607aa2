"""Every kernel of e4m3 inputs against fp64, at its head dims and below them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_calls import MASKS, check, descales_of, meant, on, options_of, values
from fp8_oracle import exact
from torch import Tensor

from flash_cute.native import library
from flash_cute.ops.typed import OPS
from flash_cute.testing.kernels import parse

KERNELS = [x for x in library.kernels() if parse(x).precision == "e4m3"]
DIMS = [
    (64, 64),
    (48, 32),
    (128, 128),
    (80, 112),
    (256, 256),
    (192, 128),
    (64, 256),
    (40, 24),
    (13, 7),
]
pytestmark = pytest.mark.usefixtures("cuda")


def attend(kind: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    descales = descales_of(kind, q, k, v, len(q))
    return OPS.fp8_fwd(*on("cuda", q, k, v, *descales), **options)


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name, mask, two_level):
    kernel = parse(name)
    q = values(2, 333, 4, kernel.dim)
    k, v = values(2, 450, 2, kernel.dim), values(2, 450, 2, kernel.dim_v)
    descales = descales_of("all", q, k, v, 2)
    with library.only(name):
        out, lse = OPS.fp8_fwd(
            *on("cuda", q, k, v, *descales), two_level=two_level, **options_of(MASKS[mask])
        )
    expected = exact(*map(meant, (q, k, v), descales), **MASKS[mask])
    check(out, lse, expected, two_level=two_level)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims, dtype):
    """Those of a kernel's tile, smaller ones, and rows that no 16-byte vector starts."""
    q, k, v = values(2, 70, 4, dims[0]), values(2, 200, 2, dims[0]), values(2, 200, 2, dims[1])
    out, lse = OPS.fp8_fwd(*on("cuda", q, k, v), is_causal=True, dtype=dtype)
    check(out, lse, exact(q, k, v, causal=True), dtype)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scales_that_are_not_positive(scale):
    q, k, v = values(1, 100, 2, 64), values(1, 300, 2, 64), values(1, 300, 2, 64)
    out, lse = OPS.fp8_fwd(*on("cuda", q, k, v), softmax_scale=scale)
    check(out, lse, exact(q, k, v, scale=scale))


def test_views():
    """Heads before rows, and every second row."""
    q, k, v = values(2, 4, 300, 64), values(2, 2, 400, 64), values(2, 800, 2, 64)
    expected = exact(q.transpose(1, 2), k.transpose(1, 2), v[:, ::2])
    q, k, v = on("cuda", q, k, v)
    check(*OPS.fp8_fwd(q.transpose(1, 2), k.transpose(1, 2), v[:, ::2]), expected)


@pytest.mark.parametrize("dim", [64, 40])
def test_heads_and_sequences_that_are_one_in_memory(dim):
    q, k, v = values(2, 100, 1, dim), values(1, 300, 2, dim), values(1, 300, 2, dim)
    views = q.expand(2, 100, 4, dim), k.expand(2, 300, 2, dim), v.expand(2, 300, 2, dim)
    shapes = [x.shape for x in views]
    given = [x.expand(shape) for x, shape in zip(on("cuda", q, k, v), shapes, strict=True)]
    check(*OPS.fp8_fwd(*given), exact(*views))


@pytest.mark.parametrize("size", [1e4, 1e9, 1e30])
def test_huge_scores(size):
    """What the largest score gets is 1, whatever its size."""
    q, k, v = values(1, 64, 1, 64), values(1, 500, 1, 64), values(1, 500, 1, 64)
    scale = torch.full((1, 1), size)
    out, lse = OPS.fp8_fwd(*on("cuda", q, k, v, scale))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    top = scores.topk(2, -1)
    clear = (top.values[..., 0] - top.values[..., 1]) > 0.1  # accumulators keep 14 bits
    best = v[0, top.indices[0, 0, :, 0], 0].double()
    assert torch.equal(out.cpu().double()[0, :, 0][clear[0, 0]], best[clear[0, 0]])
    torch.testing.assert_close(
        lse.cpu().double(), top.values[..., 0] * 64**-0.5 * size, rtol=1e-2, atol=0.0
    )


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_results_repeat(dim):
    q, k, v = on("cuda", values(2, 700, 4, dim), values(2, 1500, 2, dim), values(2, 1500, 2, dim))
    first = OPS.fp8_fwd(q, k, v, is_causal=True)
    for _ in range(20):
        again = OPS.fp8_fwd(q, k, v, is_causal=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_ragged_sequences_are_those_of_dense_calls(dim):
    """Bit for bit, with NaN in the rows of no sequence and in those that are not used."""
    lengths_q, lengths_k = [1, 0, 500, 193, 64], [700, 30, 0, 128, 129]
    starts = [torch.tensor([7, *x]).cumsum(0).int() for x in (lengths_q, lengths_k)]
    used = torch.tensor([650, 30, 0, 128, 1], dtype=torch.int32)
    q, k, v = (
        values(int(x[-1]) + 9, h, dim) for x, h in zip((*starts, starts[1]), (4, 2, 2), strict=True)
    )
    holes = torch.ones(len(k), dtype=torch.bool)
    for start, count in zip(starts[1], used, strict=False):
        holes[int(start) : int(start) + int(count)] = False
    k, v = (torch.where(holes[:, None, None], torch.nan, x.float()).to(q.dtype) for x in (k, v))
    q, k, v, *where = on("cuda", q, k, v, *starts, used)
    out, lse = OPS.fp8_varlen_fwd(
        q, k, v, where[0], where[1], 500, 700, seqused_k=where[2], is_causal=True
    )
    for b, n in enumerate(lengths_q):
        rows = slice(int(starts[0][b]), int(starts[0][b]) + n)
        keys = slice(int(starts[1][b]), int(starts[1][b]) + int(used[b]))
        one = OPS.fp8_fwd(q[None, rows], k[None, keys], v[None, keys], is_causal=True)
        assert torch.equal(out[rows], one[0][0]) and torch.equal(lse[:, rows], one[1][0])
    assert not out[:7].any() and lse[:, :7].isneginf().all() and not out[-9:].any()
