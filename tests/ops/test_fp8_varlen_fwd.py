"""The op fp8_varlen_fwd: packed sequences and pages, each against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_calls import KINDS, MASKS, check, descales_of, meant, on, options_of, scales, values
from fp8_oracle import E4M3, exact, offsets
from torch import Tensor

from flash_cute.ops.typed import OPS

LENGTHS_Q, LENGTHS_K = (20, 0, 7, 13), (30, 5, 0, 47)


pytestmark = pytest.mark.usefixtures("served")


def of_sequence(
    descale: Tensor | None, b: int, rows: slice, of_rows: tuple[int, ...]
) -> Tensor | None:
    if descale is None:
        return None
    return descale[:, rows] if tuple(descale.shape) == of_rows else descale[b : b + 1]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_with_gaps_and_used_rows(device, kind, mask):
    """Rows before the first sequence, behind the last one, and unused ones have out 0 and LSE -inf;
    their numbers, and those of their descales, may be NaN."""
    cu_q, cu_k = offsets("cpu", *LENGTHS_Q, first=3), offsets("cpu", *LENGTHS_K, first=2)
    used_q, used_k = torch.tensor([20, 0, 7, 9]).int(), torch.tensor([30, 3, 0, 40]).int()
    q, k, v = values(50, 4, 32), values(90, 2, 32), values(90, 2, 24)
    descales = descales_of(kind, q, k, v, 4)
    taken_q, taken_k = torch.zeros(50, dtype=torch.bool), torch.zeros(90, dtype=torch.bool)
    spans = []
    for b in range(4):
        rows = slice(int(cu_q[b]), int(cu_q[b] + used_q[b]))
        keys = slice(int(cu_k[b]), int(cu_k[b] + used_k[b]))
        taken_q[rows], taken_k[keys] = True, True
        spans.append((rows, keys))
    spoiled = [
        x.float().masked_fill(~taken[:, None, None], torch.nan).to(E4M3)
        for x, taken in ((q, taken_q), (k, taken_k), (v, taken_k))
    ]
    spoiled_descales = [
        x.masked_fill(~taken[None, :, None], torch.nan)
        if x is not None and x.dim() == 3 and x.shape[1] == len(taken) else x
        for x, taken in zip(descales, (taken_q, taken_k, taken_k), strict=True)
    ]  # fmt: skip
    out, lse = OPS.fp8_varlen_fwd(
        *on(device, *spoiled, cu_q, cu_k), 20, 47, *on(device, used_q, used_k), None,
        *on(device, *spoiled_descales), **options_of(MASKS[mask]),
    )  # fmt: skip
    assert not out[~taken_q].any() and lse[:, ~taken_q].isneginf().all()
    for b, (rows, keys) in enumerate(spans):
        parts = ((q[None, rows], rows), (k[None, keys], keys), (v[None, keys], keys))
        shapes = ((1, 50, 4), (1, 90, 2), ())
        stood_for = [
            meant(x, of_sequence(descale, b, span, shape))
            for (x, span), descale, shape in zip(parts, descales, shapes, strict=True)
        ]
        check(out[None, rows], lse[None, :, rows], exact(*stood_for, **MASKS[mask]))


@pytest.mark.parametrize("with_seqused", [False, True])
@pytest.mark.parametrize("kind", ["none", "head", "row", "channel", "all"])
def test_pages(device, kind, with_seqused):
    """Out of order, one in two sequences, and table entries behind the lengths that name none."""
    q, k, v = values(12, 4, 32), values(5, 16, 2, 32), values(5, 16, 2, 32)
    cu_q, lengths = offsets("cpu", 5, 4, 3), (33, 16, 20)
    table = torch.tensor([[4, 0, 2], [1, 99, -7], [2, 3, 99]]).int()
    descales = descales_of(kind, q, k, v, 3)
    cu_k = torch.zeros(4).int() if with_seqused else offsets("cpu", *lengths)
    used = torch.tensor(lengths).int() if with_seqused else None
    out, lse = OPS.fp8_varlen_fwd(
        *on(device, q, k, v, cu_q, cu_k), 5, 48, None, *on(device, used, table, *descales),
        is_causal=True,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        rows, pages = slice(int(cu_q[b]), int(cu_q[b + 1])), table[b][: -(-length // 16)].long()
        keys, found = (x[pages].flatten(0, 1)[None, :length] for x in (k, v))
        of_k = descales[1]
        if of_k is not None:
            of_k = of_k[pages].flatten(0, 1)[None, :length] if of_k.dim() == 3 else of_k[b : b + 1]
        of_q = of_sequence(descales[0], b, rows, (1, 12, 4))
        of_v = of_sequence(descales[2], b, rows, ())
        stood_for = meant(q[None, rows], of_q), meant(keys, of_k), meant(found, of_v)
        check(out[None, rows], lse[None, :, rows], exact(*stood_for, causal=True))


@pytest.mark.parametrize("kind", ["none", "head", "all"])
@pytest.mark.parametrize("size", [1, 5, 20, 24, 100])
def test_pages_of_any_size(device, size, kind):
    """Kernels cannot read all of them in place. Rows behind the lengths are NaN."""
    lengths = (133, 1, 0, 60)
    most = max(lengths) // size + 1
    q, k, v = (
        values(*n, h, 40) for n, h in (((9,), 4), ((4 * most, size), 2), ((4 * most, size), 2))
    )
    table = torch.randperm(4 * most).int().view(4, most)
    cu_q = offsets("cpu", 5, 1, 0, 3)
    descales = descales_of(kind, q, k, v, 4)
    expected, is_used = [], torch.zeros(4 * most, size, dtype=torch.bool)
    for b, length in enumerate(lengths):
        places = table[b].long().repeat_interleave(size)[:length], torch.arange(length) % size
        is_used[places] = True
        rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
        keys, found = k[places][None], v[places][None]
        of_k = descales[1]
        if of_k is not None:
            of_k = of_k[places][None] if of_k.dim() == 3 else of_k[b : b + 1]
        of_q, of_v = (of_sequence(descales[i], b, rows, (1, 9, 4)) for i in (0, 2))
        stood_for = meant(q[None, rows], of_q), meant(keys, of_k), meant(found, of_v)
        expected.append((rows, exact(*stood_for, causal=True)))
    k, v = (x.float().masked_fill(~is_used[..., None, None], torch.nan).to(E4M3) for x in (k, v))
    used = torch.tensor(lengths).int()
    out, lse = OPS.fp8_varlen_fwd(
        *on(device, q, k, v, cu_q, torch.zeros(5).int()), 5, max(lengths), None,
        *on(device, used, table, *descales), is_causal=True,
    )  # fmt: skip
    for rows, one in expected:
        check(out[None, rows], lse[None, :, rows], one)


def test_pages_that_do_not_exist_read_as_zeros(device):
    """With descales of rows, too."""
    q, k, v = values(3, 2, 16), values(2, 8, 2, 16), values(2, 8, 2, 16)
    table = torch.tensor([[0, 5]]).int()
    args = on(device, q, k, v, offsets("cpu", 3), offsets("cpu", 16))
    descale = scales(2, 8, 2)
    out, lse = OPS.fp8_varlen_fwd(*args, 3, 16, None, None, *on(device, table, None, descale))
    zeros = torch.zeros(1, 8, 2, 16).double()
    keys = torch.cat((meant(k[:1], descale[:1]), zeros), 1)
    found = torch.cat((v[:1].double(), zeros), 1)
    check(out[None], lse[None], exact(q[None].double(), keys, found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_and_dtypes(device, dtype):
    q, k, v = values(20, 4, 64), values(33, 2, 64), values(33, 2, 64)
    sink = torch.tensor([0.5, 9.0, -3.0, 1.0])
    cu_q, cu_k = offsets("cpu", 20), offsets("cpu", 33)
    out, lse = OPS.fp8_varlen_fwd(
        *on(device, q, k, v, cu_q, cu_k), 20, 33, softmax_scale=0.2, sink=sink.to(device),
        dtype=dtype,
    )  # fmt: skip
    check(out[None], lse[None], exact(q[None], k[None], v[None], scale=0.2, sink=sink), dtype)


def test_no_sequences(device):
    q, k, v = values(4, 2, 8), values(6, 2, 8), values(6, 2, 8)
    none = torch.zeros(1).int()
    out, lse = OPS.fp8_varlen_fwd(
        *on(device, q, k, v, none, none), 4, 6, v_descale=torch.ones(0, 2, device=device)
    )
    assert not out.any() and lse.isneginf().all()


def test_bad_offsets_are_clamped(device):
    q, k, v = values(10, 2, 8), values(12, 2, 8), values(12, 2, 8)
    bad: Any = (torch.tensor([-5, 99]).int(), torch.tensor([0, 99]).int())
    out, lse = OPS.fp8_varlen_fwd(*on(device, q, k, v, *bad), 99, 99)
    check(out[None], lse[None], exact(q[None], k[None], v[None]))
