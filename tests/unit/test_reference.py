"""The oracle against PyTorch's attention and against loops over single numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_cute import reference
from flash_cute.call.philox import dropout_keep


def inputs(batch=2, seqlen_q=5, seqlen_k=7, heads=4, heads_k=2, dim=3, dim_v=2, seed=0):
    """q, k and v in fp64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, seqlen_q, heads, dim),
        (batch, seqlen_k, heads_k, dim),
        (batch, seqlen_k, heads_k, dim_v),
    )
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse, one row at a time in Python floats."""
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    out = q.new_zeros(batch, seqlen_q, heads, v.shape[-1])
    lse = q.new_full((batch, heads, seqlen_q), -math.inf)
    kept = 1 - round(dropout_p * 65536) / 65536
    for b in range(batch):
        for h in range(heads):
            for i in range(seqlen_q):
                centre = i + seqlen_k - seqlen_q
                weights = {}
                for j in range(seqlen_k):
                    if (left >= 0 and j < centre - left) or (right >= 0 and j > centre + right):
                        continue
                    score = float(q[b, i, h] @ k[b, j, h // group]) / math.sqrt(dim)
                    if softcap:
                        score = softcap * math.tanh(score / softcap)
                    if alibi_slopes is not None:
                        slope = alibi_slopes[b, h] if alibi_slopes.dim() == 2 else alibi_slopes[h]
                        score -= float(slope) * abs(centre - j)
                    weights[j] = math.exp(score)
                total = sum(weights.values()) + (0 if sink is None else math.exp(float(sink[h])))
                lse[b, h, i] = math.log(total) if total else -math.inf
                for j, weight in weights.items():
                    place = (torch.tensor([n]) for n in (b * heads + h, i, j))
                    if dropout_p == 0 or dropout_keep(rng, dropout_p, *place).item():
                        out[b, i, h] += weight / total / kept * v[b, j, h // group]
    return out, lse


OPTIONS = {
    "plain": {},
    "causal": {"right": 0},
    "window": {"left": 2, "right": 1},
    "left": {"left": 0},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 2.0])},
    "alibi_batch": {"alibi_slopes": torch.linspace(-1, 1, 8).view(2, 4), "right": 0},
    "sink": {"sink": torch.tensor([0.3, -2.0, 4.0, -math.inf])},
    "dropout": {"dropout_p": 0.3, "rng": torch.tensor([5, 6])},
    "all": {
        "left": 3,
        "right": 0,
        "softcap": 1.5,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 2.0]),
        "sink": torch.tensor([0.3, -2.0, 4.0, 0.0]),
        "dropout_p": 0.5,
        "rng": torch.tensor([-1, 2**35]),
    },
}


def named(left: int = -1, right: int = -1, **options):
    """The options of ``loops`` under the names of the oracle."""
    return {"window_size_left": left, "window_size_right": right, **options}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("lengths", [(5, 7), (7, 4), (1, 1), (3, 0)])
def test_matches_loops(options, lengths):
    q, k, v = inputs(seqlen_q=lengths[0], seqlen_k=lengths[1])
    out, lse = loops(q, k, v, **options)
    result = reference.attention(q, k, v, **named(**options))
    torch.testing.assert_close(result.out, out)
    torch.testing.assert_close(result.softmax_lse, lse)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_matches_sdpa_and_its_gradients(is_causal, heads_k):
    q, k, v = (x.requires_grad_() for x in inputs(seqlen_k=5, heads_k=heads_k))
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q_, k_, v_, is_causal=is_causal, enable_gqa=True)
    expected = expected.transpose(1, 2)
    out = reference.attention(q, k, v, is_causal=is_causal).out
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), dout))


def test_softmax_and_row_max():
    q, k, v = inputs()
    sink, rng = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 1])
    options = {"is_causal": True, "sink": sink}
    plain = reference.attention(q, k, v, **options)
    dropped = reference.attention(q, k, v, dropout_p=0.5, rng=rng, **options)
    missing = torch.exp(sink[:, None] - plain.softmax_lse)
    torch.testing.assert_close(plain.softmax.sum(-1) + missing, torch.ones_like(missing))
    torch.testing.assert_close(dropped.softmax.abs(), plain.softmax)
    assert torch.equal(dropped.softmax_lse, plain.softmax_lse)
    weights = 2 * dropped.softmax.clamp(min=0)
    expected = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(dropped.out, expected)
    largest = plain.softmax.amax(-1)
    torch.testing.assert_close(torch.exp(plain.row_max - plain.softmax_lse), largest)


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_rows_without_keys(sink):
    q, k, v = (x.requires_grad_() for x in inputs(seqlen_q=6, seqlen_k=2))
    result = reference.attention(q, k, v, is_causal=True, sink=sink)
    assert not result.out[:, :4].any() and not result.out[:, :4].signbit().any()
    expected = torch.full((2, 4, 4), -torch.inf, dtype=torch.float64)
    if sink is not None:
        expected = sink.double()[:, None].expand(2, 4, 4)
    torch.testing.assert_close(result.softmax_lse[:, :, :4], expected)
    assert (result.row_max[:, :, :4] == -torch.inf).all()
    loss = result.out.sum() + result.softmax_lse[:, :, 4:].sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    assert not dq[:, :4].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_dropout_of_everything():
    q, k, v = inputs()
    result = reference.attention(q, k, v, dropout_p=1.0, rng=torch.tensor([0, 0]))
    assert not result.out.any()
    assert torch.equal(result.softmax_lse, reference.attention(q, k, v).softmax_lse)


def test_hidden_bits_do_not_matter_and_visible_ones_do():
    q, k, v = inputs(seqlen_q=6, seqlen_k=6)
    clean = reference.attention(q, k, v, is_causal=True)
    for poison in (torch.nan, torch.inf, -torch.inf):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, 4:], bad_v[:, 4:] = poison, poison
        result = reference.attention(q, bad_k, bad_v, is_causal=True)
        torch.testing.assert_close(result.out[:, :4], clean.out[:, :4])
        result = reference.attention(q, k, bad_v, is_causal=True)
        torch.testing.assert_close(result.softmax, clean.softmax)
        expected = torch.full_like(clean.out[:, 4], poison)
        torch.testing.assert_close(result.out[:, 4], expected, equal_nan=True)


def test_positive_infinity_in_a_score_is_nan():
    q, k, v = (torch.ones(1, 2, 1, 1) for _ in range(3))
    k[0, 1] = torch.inf
    result = reference.attention(q, k, v)
    assert result.out.isnan().all() and result.softmax_lse.isnan().all()


def test_dtype_of_the_chain():
    q, k, v = (x.bfloat16() for x in inputs())
    slopes, sink = torch.ones(4), torch.zeros(4)
    options = {"softcap": 2.0, "alibi_slopes": slopes, "sink": sink, "is_causal": True}
    assert {x.dtype for x in reference.attention(q, k, v, **options)} == {torch.float64}
    assert {x.dtype for x in reference.attention(q, k, v, dtype=None, **options)} == {q.dtype}


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(4, 7), (5, 5), (7, 4)])
def test_visible(seqlen_q, seqlen_k):
    for left in (-1, 0, 1, 3, 2**31 - 1, 2**63 - 1):
        for right in (-1, 0, 1, 3, 2**31 - 1, 2**63 - 1):
            seen = reference.visible(seqlen_q, seqlen_k, False, left, right)
            for i in range(seqlen_q):
                for j in range(seqlen_k):
                    offset = j - (i + seqlen_k - seqlen_q)
                    inside = (left < 0 or offset >= -left) and (right < 0 or offset <= right)
                    assert seen[i, j] == inside
    causal = reference.visible(seqlen_q, seqlen_k, is_causal=True, window_size_right=3)
    assert torch.equal(causal, reference.visible(seqlen_q, seqlen_k, window_size_right=0))


def test_varlen_is_each_sequence_alone():
    q, k, v = (x[0] for x in inputs(batch=1, seqlen_q=12, seqlen_k=14))
    cu_q, cu_k = torch.tensor([0, 3, 3, 10]), torch.tensor([1, 5, 9, 14])
    used_q, used_k = torch.tensor([3, 0, 5]), torch.tensor([4, 4, 2])
    slopes, rng = torch.linspace(0, 1, 12).view(3, 4), torch.tensor([4, 2])
    options = {"is_causal": True, "sink": torch.ones(4), "dropout_p": 0.2, "rng": rng}
    result = reference.attention_varlen(
        *(q, k, v, cu_q, cu_k, 7, 5),
        **{"seqused_q": used_q, "seqused_k": used_k, "alibi_slopes": slopes, **options},
    )
    parts = ((0, slice(0, 3), slice(1, 5)), (2, slice(3, 8), slice(9, 11)))
    for b, rows, keys in parts:
        parts_of = (q[None, rows], k[None, keys], v[None, keys])
        alone = reference.attention(*parts_of, alibi_slopes=slopes[b], first=b, **options)
        assert torch.equal(result.out[rows], alone.out[0])
        assert torch.equal(result.softmax_lse[:, rows], alone.softmax_lse[0])
        assert torch.equal(result.row_max[:, rows], alone.row_max[0])
        lengths = alone.softmax.shape[2:]
        assert torch.equal(result.softmax[b, :, : lengths[0], : lengths[1]], alone.softmax[0])
    assert not result.out[8:].any() and (result.softmax_lse[:, 8:] == -torch.inf).all()


BANDS = [{}, {"is_causal": True}, {"window_size_left": 9}, {"window_size_right": 2}]


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_a_cache_is_attention_over_its_rows(band):
    """With rotary embedding as a product of complex numbers."""
    q = torch.randn(1, 3, 2, 4, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 2, 4, dtype=torch.float64) for _ in range(2))
    k_cache, v_cache = (torch.randn(1, 20, 2, 4, dtype=torch.float64) for _ in range(2))
    angles = torch.randn(20, 2, dtype=torch.float64)

    def turn(x: torch.Tensor, positions: list[int]) -> torch.Tensor:
        by = torch.polar(torch.ones_like(angles), angles)[positions][:, None]
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2))) * by).flatten(-2)

    got = reference.attention_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(),
        cache_seqlens=torch.tensor([10]).int(), cache_leftpad=torch.tensor([3]).int(),
        rotary_interleaved=True, **band,
    )  # fmt: skip
    keys = torch.cat((k_cache[:, 3:10], turn(k, [10, 11])), 1)
    values = torch.cat((v_cache[:, 3:10], v), 1)
    turned = turn(q, [10, 11, 12] if band else [10, 10, 10])
    expected = reference.attention(turned, keys, values, **band)
    torch.testing.assert_close(got.out, expected.out)
    torch.testing.assert_close(got.softmax_lse, expected.softmax_lse)
    torch.testing.assert_close(got.k_cache[:, 10:12], keys[:, 7:])
    assert torch.equal(got.v_cache[:, 10:12], v)


def test_paged_is_packed():
    q, k, v = (x[0] for x in inputs(batch=1, seqlen_q=6, seqlen_k=14))
    cu_q, cu_k = torch.tensor([0, 2, 6]), torch.tensor([0, 5, 14])
    packed = reference.attention_varlen(q, k, v, cu_q, cu_k, 4, 9, is_causal=True)
    pages = torch.tensor([[3, 0, 9], [1, 4, 2]], dtype=torch.int32)
    cache_k, cache_v = (x.new_full((5, 3, *x.shape[1:]), torch.nan) for x in (k, v))
    for cache, x in ((cache_k, k), (cache_v, v)):
        cache[3], cache[0, :2] = x[0:3], x[3:5]
        cache[[1, 4, 2]] = x[5:14].view(3, 3, *x.shape[1:])
    paged = reference.attention_varlen(
        q, cache_k, cache_v, cu_q, cu_k, 4, 9, block_table=pages, is_causal=True
    )
    for a, b in zip(paged, packed, strict=True):
        assert torch.equal(a, b)
